"""Shapes of the modules that adapters are attached to, from a model's settings. Nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidewheel.models.adapter import Place
    from tidewheel.models.family import Model

Shapes = dict[str, tuple[int, int]]
"""{name of a module: (width of its input, width of its output)}."""


def layer_shapes(model: Model, layer: int) -> Shapes:
    """Return the shapes of a block's linear layers that `Model.tensor_parallel` cuts, by their names in the block."""
    heads, keys = model.num_heads * model.head_width, model.kv_heads * model.head_width
    of_attention = {"wq": heads, "wk": keys, "wv": keys, "wo": heads}
    shapes: Shapes = {}
    for name, cut in model.tensor_parallel(layer).items():
        width = of_attention.get(name.rpartition(".")[2], model.ffn_width)
        if cut == "columns":
            shapes[name] = (model.dim, width)
        elif cut == "rows":
            shapes[name] = (width, model.dim)
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
