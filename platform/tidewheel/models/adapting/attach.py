"""Attach adapters to a decoder and freeze everything else."""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from tidewheel.errors import ConfigError
from tidewheel.models.adapter import MARK, Adapter
from tidewheel.models.adapting import nf4
from tidewheel.models.adapting.experts import StackedLinear, Updates, stacks
from tidewheel.models.adapting.names import matches
from tidewheel.models.adapting.shards import distribute
from tidewheel.models.blocks.embedding import Embedding
from tidewheel.models.decoder import Decoder
from tidewheel.parts import calling, name_of

PARTS = ("attention", "ffn")
"""The modules of a block that add to the residual stream."""


def attach(model: Decoder, adapter: Adapter) -> None:
    """Freeze a decoder and attach an adapter to its targets, after tensor parallelism and before compilation.

    Args:
        model: a decoder or a pipeline stage, on the meta device or with values.
        adapter: the settings; `check` has found that all targets exist.

    Raises:
        ConfigError: the base cannot be quantised, or the adapter does not work on this model.
    """
    for _, module, added in build(model, adapter):
        put(module, added)
    adapter.prepare(model)


def build(model: Decoder, adapter: Adapter) -> list[tuple[str, nn.Module, nn.Module]]:
    """Freeze a decoder, quantise it if it is to be, and return (name, module, its adapter) of the targets.

    Args:
        model: see `attach`.
        adapter: the settings.

    Raises:
        ConfigError: the base cannot be quantised.
    """
    model.requires_grad_(False)
    chosen = {name: module for name, module in candidates(model, adapter).items() if adapter.chooses(name)}
    if adapter.base == "nf4":
        nf4.quantize(model)
    built = []
    for name, module in chosen.items():
        with calling(adapter):
            added = adapter.build(name, module)
        weights = [module.weight] if isinstance(module, StackedLinear) else list(module.parameters())
        weight = next((one for one in weights if isinstance(one, DTensor) and one.ndim > 1), None)
        if weight is not None:
            distribute(added, weight, added.CUTS)  # type: ignore[arg-type]
        built.append((name, module, added))
    return built


def put(module: nn.Module, added: nn.Module) -> None:
    """Let a module compute with an adapter."""
    if isinstance(module, StackedLinear):
        if module.holder.adapter is None:
            module.holder.adapter = Updates()
        module.holder.adapter[module.matrix] = added
        return
    module.adapter = added
    module.__class__ = _adapted(type(module))  # type: ignore[arg-type]


@functools.cache
def _adapted(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a module's class whose forward pass calls the module's adapter.

    One class for all modules of a kind, so that compiled code is shared between blocks.
    """
    class Adapted(kind):  # type: ignore[misc, valid-type]
        adapter_is_off = False

        def forward(self, *inputs: Any) -> Any:
            if self.adapter_is_off:
                return super().forward(*inputs)
            return self.adapter(self, super().forward, *inputs)

    Adapted.__name__ = Adapted.__qualname__ = kind.__name__
    return Adapted


@contextlib.contextmanager
def adapters_off(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Let a model compute as its base within the block. Only for adapters that change modules and nothing else.

    Args:
        parts: a decoder, or pipeline stages.
    """
    modules = [module for part in parts for _, module, _ in adapted(part)]
    for module in modules:
        module.adapter_is_off = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in modules:
            module.adapter_is_off = False  # type: ignore[assignment]


def adapted(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield (name, module, its adapter) of all adapted modules."""
    for name, module in model.named_modules():
        added = vars(module)["_modules"].get("adapter")
        if isinstance(added, Updates):
            for matrix, update in added.items():
                yield f"{name}.{matrix}", StackedLinear(module, matrix), update
        elif added is not None:
            yield name, module, added


def is_constant(name: str, adapter: Adapter) -> bool:
    """Return whether a parameter belongs to an adapter and is not trained; see `Adapter.CONSTANT`."""
    return MARK in name and name.endswith(adapter.CONSTANT)


def candidates(model: Decoder, adapter: Adapter) -> dict[str, nn.Module]:
    """Return {name: module} of all modules that an adapter could be attached to."""
    found: dict[str, nn.Module] = {}
    if (adapter.EMBEDDING or adapter.PLACE == "embedding") and isinstance(model.embedding, Embedding):
        found["embedding"] = model.embedding
    for index, block in model.layers() if adapter.PLACE != "embedding" else ():
        if adapter.PLACE == "linear":
            found |= {f"blocks.{index}.{name}": module for name, module in block.named_modules()
                      if isinstance(module, nn.Linear)}
            if adapter.EXPERTS:
                found |= {f"blocks.{index}.{name}": stack for name, stack in stacks(block)}
            continue
        for part in PARTS if adapter.PLACE == "output" else PARTS[:1]:
            module = getattr(block, part, None)
            if isinstance(module, nn.Module) and (adapter.PLACE == "output" or hasattr(module, "wk")):
                found[f"blocks.{index}.{part}"] = module
    return found


def check(model: Decoder, adapter: Adapter) -> None:
    """Check that each pattern of an adapter matches a module.

    Args:
        model: the whole decoder.
        adapter: the settings.

    Raises:
        ConfigError: a pattern matches nothing; the nearest names are given.
    """
    names = list(candidates(model, adapter))
    patterns = [*adapter.targets, *getattr(adapter, "ranks", ()), *getattr(adapter, "alphas", ())]
    for pattern in patterns:
        if any(matches(pattern, name) for name in names):
            continue
        words = sorted({word for name in names for word in name.split(".") if not word.isdigit()})
        near = difflib.get_close_matches(pattern, words, n=3) or words
        raise ConfigError(f"the target {pattern!r} matches no module that the adapter {name_of(type(adapter))} can be "
                          f"attached to; nearest names: {', '.join(near) or 'none'}", where="adapter.targets",
                          fix="name components of module names as they are here, such as attention, wq or blocks.0")
