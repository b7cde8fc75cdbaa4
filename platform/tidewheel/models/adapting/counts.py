"""Shapes of the modules that adapters are attached to, from a model's settings. Nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidewheel.models.adapting.names import EXPERTS
from tidewheel.models.moe.config import MixtureOfExperts

if TYPE_CHECKING:
    from tidewheel.models.adapter import Adapter
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


def adaptable(adapter: Adapter, model: Model, vocabulary_size: int) -> dict[str, tuple[int, int, int]]:
    """Return {name in the whole model: (number of matrices, inputs, outputs)} of what an adapter can be attached to.

    Args:
        adapter: the settings.
        model: settings of the base.
        vocabulary_size: rows of the embedding.
    """
    shapes: dict[str, tuple[int, int, int]] = {}
    if adapter.EMBEDDING or adapter.PLACE == "embedding":
        shapes["embedding"] = (1, vocabulary_size, model.dim)
    for layer in range(model.num_layers) if adapter.PLACE != "embedding" else ():
        block = f"blocks.{layer}"
        if adapter.PLACE == "output":
            shapes |= dict.fromkeys((f"{block}.attention", f"{block}.ffn"), (1, model.dim, model.dim))
        elif adapter.PLACE == "attention":
            shapes[f"{block}.attention"] = (1, model.dim, model.kv_heads * model.head_width)
        else:
            shapes |= {f"{block}.{name}": (1, *shape) for name, shape in layer_shapes(model, layer).items()}
        if adapter.EXPERTS and isinstance(model, MixtureOfExperts) and model.has_experts(layer):
            number, width, stack = model.num_experts, model.expert_width, f"{block}.ffn{EXPERTS}"
            shapes |= dict.fromkeys((f"{stack}.w1", f"{stack}.w3"), (number, model.dim, width))
            shapes[f"{stack}.w2"] = (number, width, model.dim)
    return shapes
