"""Forms of experts at Hugging Face.

transformers holds experts fused in memory and saves them one by one; both forms are read, single ones are written.
Nothing here imports torch before weights are converted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from tidewheel.errors import ConfigError
from tidewheel.models.conversion import Conversion, joined, per_expert, renamed
from tidewheel.models.moe.config import MixtureOfExperts

if TYPE_CHECKING:
    import torch

    Tensors = Sequence[torch.Tensor]

FUSED = "mlp.experts.gate_up_proj"
ROUTER, BIAS = "ffn.router.weight", "ffn.router.selection_bias"


def expert_weights(config: MixtureOfExperts, layer: int, present: Collection[str] | None, *, module: str = "mlp",
                   projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
                   bias: str = "") -> Sequence[Conversion]:
    """Return the conversions of a layer's router and experts.

    Args:
        config: the model.
        layer: index of the block.
        present: see `Model.hugging_face_weights`.
        module: begin of the names of single experts and of the router.
        projections: names of an expert's w1, w3 and w2.
        bias: name of the selection bias; "": the format has none.
    """
    if not config.has_experts(layer):
        return ()
    selection = renamed(BIAS, bias) if bias else without_bias(config)
    if present is not None and FUSED in present:
        width = config.expert_width
        return (renamed(ROUTER, "mlp.gate.weight"), selection,
                joined(("ffn.experts.w1", "ffn.experts.w3"), FUSED, (width, width), dim=1),
                renamed("ffn.experts.w2", "mlp.experts.down_proj"))
    single = [per_expert(f"ffn.experts.{ours}", f"{module}.experts.{{}}.{theirs}.weight", config.num_experts)
              for ours, theirs in zip(("w1", "w3", "w2"), projections)]
    return (renamed(ROUTER, f"{module}.gate.weight"), selection, *single)


def without_bias(config: MixtureOfExperts) -> Conversion:
    """Return the conversion of a selection bias to a format that has none: only zeros can be written."""
    def to_theirs(tensors: Tensors) -> Tensors:
        if tensors[0].any():
            raise ConfigError("the selection bias that balanced the experts has no place in this model's format at "
                              "Hugging Face, and without it tokens choose other experts", where="model.balancing",
                              fix="train with balancing: auxiliary, or a family whose format has the bias")
        return []

    def to_ours(tensors: Tensors) -> Tensors:
        import torch

        return [torch.zeros(config.num_experts)]

    return Conversion((BIAS,), (), to_theirs, to_ours)
