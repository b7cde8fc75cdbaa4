"""What a module of the user's own cannot be asked for. Nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidewheel.models.own_module import OwnModule
from tidewheel.parts import name_of

if TYPE_CHECKING:
    from tidewheel.train.config import TrainConfig


def reason_against(config: TrainConfig) -> str | None:
    """Return what a configuration asks of a module of one's own that needs to know its inside, or None."""
    model = config.model
    if not isinstance(model, OwnModule):
        return None
    parallel = config.parallel
    wants: list[tuple[str, Any, Any]] = [
        *((f"parallel.{name}", getattr(parallel, name), 1) for name in ("tensor", "pipeline", "context", "expert")),
        ("parallel.offload", parallel.offload, False), ("compile", config.compile, False),
        ("memory.activation_checkpointing", config.memory.activation_checkpointing, "none"),
        ("parameters", config.parameters, "fp32"), ("neftune_alpha", config.neftune_alpha, 0),
        ("metrics.loss_by_source", config.metrics.loss_by_source, False)]
    for name, value, legal in wants:
        if value != legal:
            return (f"model.kind {name_of(type(model))} is a module of your own, and {name} {_shown(value)} needs to "
                    f"know its inside; nearest legal choice: {name} {_shown(legal)}")
    for name, present in (("adapter", config.adapter is not None), ("rollouts", config.rollouts is not None),
                          ("precision fp8", config.precision == "fp8")):
        if present:
            return (f"model.kind {name_of(type(model))} is a module of your own, and {name} needs to know its inside; "
                    f"nearest legal choice: no {name}")
    if config.objective.HEAD or config.objective.VALUES:
        return (f"objective.kind {name_of(type(config.objective))} puts a head on the decoder, which a module of your "
                "own does not have; nearest legal choice: an objective of logits, such as next_token")
    return None


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
