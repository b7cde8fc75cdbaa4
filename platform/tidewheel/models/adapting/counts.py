"""Shapes of the modules that adapters are attached to, from a model's settings. Nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidewheel.models.adapting.names import EXPERTS
from tidewheel.models.moe.config import MixtureOfExperts

if TYPE_CHECKING:
    from tidewheel.models.adapter import Place
    from tidewheel.models.family import Model

BLOCK = 64
"""Entries of a row that share a scale in NF4; see `nf4`."""
Shapes = dict[str, tuple[int, int]]
"""{name of a module: (width of its input, width of its output)}."""


def layer_shapes(model: Model, layer: int) -> Shapes:
    """Return the shapes of a block's linear layers that `Model.tensor_parallel` cuts, by their names in the block."""
    heads, keys = model.num_heads * model.head_width, model.kv_heads * model.head_width
    of_attention = {"wq": heads, "wk": keys, "wv": keys, "wo": heads}
    inner = {"ffn.shared": model.shared_experts * model.expert_width} if isinstance(model, MixtureOfExperts) else {}
    shapes: Shapes = {}
    for name, cut in model.tensor_parallel(layer).items():
        part, _, last = name.rpartition(".")
        width = of_attention.get(last, inner.get(part, model.ffn_width))
        if cut == "columns":
            shapes[name] = (model.dim, width)
        elif cut == "rows":
            shapes[name] = (width, model.dim)
    return shapes


def nf4_refusal(model: Model, tensor: int) -> tuple[str, int] | None:
    """Return (the first linear layer whose rows cannot be cut into blocks, its inputs); None: there is none.

    Args:
        model: settings of the base.
        tensor: number of tensor-parallel ranks.
    """
    for layer in range(model.num_layers):
        cuts = model.tensor_parallel(layer)
        for name, (inputs, _) in layer_shapes(model, layer).items():
            if inputs % (BLOCK * tensor if cuts[name] == "rows" else BLOCK):
                return f"blocks.{layer}.{name}", inputs
    return None


def expert_shapes(model: Model) -> dict[str, tuple[int, int, int]]:
    """Return {name of stacked matrices: (number of experts, width of the input, width of the output)} of a model."""
    shapes: dict[str, tuple[int, int, int]] = {}
    if not isinstance(model, MixtureOfExperts):
        return shapes
    for layer in filter(model.has_experts, range(model.num_layers)):
        begin = f"blocks.{layer}.ffn{EXPERTS}"
        shapes |= dict.fromkeys((f"{begin}.w1", f"{begin}.w3"), (model.num_experts, model.dim, model.expert_width))
        shapes[f"{begin}.w2"] = (model.num_experts, model.expert_width, model.dim)
    return shapes


def shapes_of(place: Place, model: Model, vocabulary_size: int) -> Shapes:
    """Return the shapes of all modules that an adapter may be attached to, by their names in the whole model.

    Args:
        place: of the adapter.
        model: settings of the base.
        vocabulary_size: rows of the embedding.
    """
    shapes: Shapes = {}
    if place in ("linear", "embedding"):
        shapes["embedding"] = (vocabulary_size, model.dim)
    for layer in range(model.num_layers) if place != "embedding" else ():
        places = layer_shapes(model, layer)
        if place == "output":
            places = dict.fromkeys(("attention", "ffn"), (model.dim, model.dim))
        elif place == "attention":
            places = {"attention": (model.dim, model.kv_heads * model.head_width)}
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in places.items()}
    return shapes
