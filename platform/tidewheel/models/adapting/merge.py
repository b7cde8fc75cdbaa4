"""Models with an adapter in one process: attach values, merge, unmerge, and choose one of several for each row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tidewheel.errors import ConfigError
from tidewheel.models.adapter import Adapter
from tidewheel.models.adapting import nf4
from tidewheel.models.adapting.attach import adapted, build, check, put
from tidewheel.models.adapting.experts import StackedLinear
from tidewheel.models.adapting.low_rank import Product
from tidewheel.models.adapting.names import by_module, parameter_name, weight_name
from tidewheel.models.adapting.nf4 import Nf4Linear
from tidewheel.models.blocks.embedding import Embedding
from tidewheel.models.decoder import Decoder
from tidewheel.models.family import Model
from tidewheel.parts import name_of

Values = Mapping[str, torch.Tensor]
"""An adapter's parameters by their names in the whole model."""


def add(model: Decoder, adapter: Adapter, values: Values) -> None:
    """Attach a trained adapter to a whole model that has its values. A base in NF4 is quantised.

    Args:
        model: a decoder on one device.
        adapter: its settings.
        values: its parameters.

    Raises:
        ConfigError: the values are of another adapter or another model.
    """
    for _, module, added in _trained(model, adapter, values):
        put(module, added)
    adapter.prepare(model)


@torch.no_grad()
def _trained(model: Decoder, adapter: Adapter, values: Values) -> list[tuple[str, nn.Module, nn.Module]]:
    """Return (name, module, its trained adapter) of the targets; see `add`."""
    check(model, adapter)
    weights = {name: layer.weight for name, layer in model.named_modules()
               if isinstance(layer, nn.Linear) and not isinstance(layer, Nf4Linear)}
    built = build(model, adapter)
    for name, layer in model.named_modules():
        if isinstance(layer, Nf4Linear) and name in weights:
            layer.fill(weights[name])
    for name, parameter in _parameters(built, values, "adapter").items():
        parameter.copy_(values[name])
    return built


def check_values(config: Model, vocabulary_size: int, adapter: Adapter, values: Values, where: str) -> None:
    """Check that a trained adapter fits a model.

    Args:
        config: of the model.
        vocabulary_size: rows of its embedding.
        adapter: the settings.
        values: the parameters.
        where: location for messages.

    Raises:
        ConfigError: the values are of other settings or another model.
    """
    with torch.device("meta"):
        model = Decoder(config, vocabulary_size)
    check(model, adapter)
    _parameters(build(model, adapter), values, where)


def _parameters(built: list[tuple[str, nn.Module, nn.Module]], values: Values, where: str) -> dict[str, nn.Parameter]:
    """Return the parameters of an adapter, for which there are values of the same shapes, by name."""
    parameters = {parameter_name(name, key): parameter
                  for name, _, added in built for key, parameter in added.named_parameters()}
    if parameters.keys() != values.keys():
        odd = sorted(parameters.keys() ^ values.keys())
        raise ConfigError(f"{len(odd)} parameters belong only to the adapter's settings or only to its values, such as "
                          f"{odd[0]}", where=where, fix="give the settings that the values were trained with")
    for name, parameter in parameters.items():
        if parameter.shape != values[name].shape:
            raise ConfigError(f"{name} is {list(values[name].shape)}, but {list(parameter.shape)} in this model",
                              where=where, fix="give the base and the ranks that it was trained with")
    return parameters


@torch.no_grad()
def merged(weights: Mapping[str, torch.Tensor], adapter: Adapter, values: Values) -> dict[str, torch.Tensor]:
    """Return some matrices of a model with the adapter in them.

    Args:
        weights: whole parameters of the base, by name.
        adapter: its settings.
        values: its parameters.

    Raises:
        ConfigError: the adapter is more than a change of matrices.
    """
    results = dict(weights)
    if adapter.base == "nf4":  # the matrices that it was trained with
        results |= {name: nf4.rounded(weight).to(weight.dtype) for name, weight in weights.items()
                    if nf4.quantizes(name) and weight.ndim == 2}
    for key, added in _changes(weights, adapter, values):
        results[key] = added.merged(results[key]).to(weights[key].dtype)
    return results


@torch.no_grad()
def unmerged(weights: Mapping[str, torch.Tensor], adapter: Adapter, values: Values) -> dict[str, torch.Tensor]:
    """Return the matrices from which `merged` makes these. They are rounded twice.

    Args:
        weights: whole parameters by name, with the adapter in them.
        adapter: its settings.
        values: its parameters.

    Raises:
        ConfigError: the adapter cannot be taken out: DoRA has forgotten the lengths of the rows, and NF4 the digits of
            the base.
    """
    results = dict(weights)
    for key, added in _changes(weights, adapter, values):
        if adapter.base != "plain" or not added.CAN_UNMERGE:
            what = "a base in 4 bits" if adapter.base != "plain" else f"the adapter {name_of(type(adapter))}"
            raise ConfigError(f"{key}: the base of {what} cannot be computed from the merged matrix", where="adapter",
                              fix="take the base's own checkpoint")
        results[key] = added.unmerged(weights[key]).to(weights[key].dtype)
    return results


def _changes(weights: Mapping[str, torch.Tensor], adapter: Adapter, values: Values) -> Iterator[tuple[str, Any]]:
    """Yield (name, adapter of its module with its values) of the parameters that an adapter changes."""
    for name, parts in by_module(values).items():
        weight, bias = weight_name(name, weights), f"{name}.bias"
        added: Any = None if weight is None else adapter.build(name, _layer(name, weights[weight]))
        if weight is None or not hasattr(added, "merged"):
            raise ConfigError(f"{name}: the adapter {name_of(type(adapter))} cannot be merged into a matrix",
                              where="adapter", fix="export the adapter alone, or use a kind that changes matrices")
        added.to_empty(device="cpu")
        added.load_state_dict(parts)
        yield weight, added
        if bias in weights and added.CHANGES_BIAS:
            yield bias, added


def _layer(name: str, weight: torch.Tensor) -> nn.Module:
    """Return a module on the meta device whose matrix has the shape of `weight`."""
    with torch.device("meta"):
        if weight.ndim == 3:
            experts, matrix = nn.Module(), name.rpartition(".")[2]
            experts.register_parameter(matrix, nn.Parameter(torch.empty(weight.shape)))
            return StackedLinear(experts, matrix)
        if name == "embedding":
            return Embedding(*weight.shape)
        return nn.Linear(weight.shape[1], weight.shape[0], bias=False)


class Several(nn.Module):
    """Several adapters of one module; each row of a batch is computed with its own.

    Args:
        members: by name.
    """

    def __init__(self, members: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleDict({f"of_{name}": member for name, member in members.items()})
        self.rows: Sequence[str] = ()
        """Name of each row's adapter, "": the base alone. One name is for all rows, () is the base for all."""

    def forward(self, layer: nn.Module, base: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
        """Return the module's output, with each row's adapter; see `LowRank.forward`."""
        if len(set(self.rows)) <= 1:
            return self._of("".join(self.rows[:1]), layer, base, x, *others)
        whole = None
        for name in dict.fromkeys(self.rows):
            indices = torch.tensor([row for row, chosen in enumerate(self.rows) if chosen == name], device=x.device)
            part = self._of(name, layer, base, x[indices], *others)
            whole = part.new_empty(len(x), *part.shape[1:]) if whole is None else whole
            whole = whole.index_copy(0, indices, part)
        assert whole is not None
        return whole

    def _of(self, name: str, layer: nn.Module, base: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
        if f"of_{name}" not in self.members:
            return base(x, *others)
        return self.members[f"of_{name}"](layer, base, x, *others)

    def update(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        """Return the update of a stack of experts' matrices; see `LowRank.update`.

        Raises:
            ConfigError: the rows have several adapters, but the tokens of all rows come sorted by expert.
        """
        if len(set(self.rows)) > 1:
            raise ConfigError("rows of a batch cannot have adapters of experts of their own", where="adapter",
                              fix="give each adapter a batch of its own")
        name = f"of_{''.join(self.rows[:1])}"
        if name not in self.members:
            return x.new_zeros(())
        update: torch.Tensor = self.members[name].update(x, product)  # type: ignore[operator]
        return update


def add_several(model: Decoder, adapters: Mapping[str, tuple[Adapter, Values]]) -> None:
    """Attach several adapters of linear layers to one model. `rows` chooses among them.

    Args:
        model: a decoder on one device.
        adapters: settings and parameters by name.

    Raises:
        ConfigError: an adapter is of whole parts of a block, or does not fit the model or the others' base; or the
            model has an adapter already.
    """
    if any(adapted(model)):
        raise ConfigError("the model has an adapter already", where="adapter",
                          fix="give the base, and this adapter beside the others")
    members: dict[str, tuple[nn.Module, dict[str, nn.Module]]] = {}
    bases = {adapter.base for adapter, _ in adapters.values()}
    if len(bases) > 1:
        raise ConfigError(f"the adapters were trained on bases in {', '.join(sorted(bases))}", where="adapter.base",
                          fix="give the adapters of one kind of base")
    for name, (adapter, values) in adapters.items():
        if adapter.PLACE != "linear":
            raise ConfigError(f"{name}: only adapters of linear layers can be chosen by row, not "
                              f"{name_of(type(adapter))}", where="adapter", fix="merge it into a model of its own")
        for module_name, module, added in _trained(model, adapter, values):
            members.setdefault(module_name, (module, {}))[1][name] = added
    for module, of_module in members.values():
        put(module, Several(of_module))


@contextlib.contextmanager
def rows(model: Decoder, names: Sequence[str]) -> Iterator[None]:
    """Compute each row of a batch with the adapter of this name, inside the block; "" is the base alone.

    Args:
        model: from `add_several`.
        names: for each row of the batches that the model is given, or one for all rows.
    """
    chosen = [added for _, _, added in adapted(model) if isinstance(added, Several)]
    for several in chosen:
        several.rows = names
    try:
        yield
    finally:
        for several in chosen:
            several.rows = ()
