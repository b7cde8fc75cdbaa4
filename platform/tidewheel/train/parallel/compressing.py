"""Layouts and settings with which gradients cannot be compressed. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidewheel.parts import name_of

if TYPE_CHECKING:
    from tidewheel.train.config import TrainConfig

LAST = "nearest legal choice"


def reason_against(config: TrainConfig) -> str | None:
    """Return why a run's gradients cannot be compressed, or None."""
    part, parallel = config.compression, config.parallel
    if part is None:
        return None
    what = f"compression {name_of(type(part))}"
    if parallel.fully_sharded:
        return (f"{what} sums whole gradients, but data {parallel.data} leaves that to FSDP2, which reduces them "
                f"uncompressed; {LAST}: parallel.data zero1, or ddp")
    for name in ("tensor", "pipeline", "context"):
        if getattr(parallel, name) > 1:
            return (f"{what} has been shown for workers with whole gradients only, and parallel.{name} "
                    f"{getattr(parallel, name)} divides them; {LAST}: {name} 1")
    if config.precision == "fp16":
        return (f"{what} keeps what it has not sent for later steps, but the loss scale of precision fp16 changes from "
                f"step to step; {LAST}: precision bf16")
    if config.guards.recomputation is not None:
        return (f"{what} with guards.recomputation, whose second pass would send a step's gradient twice; {LAST}: "
                "leave guards.recomputation out")
    if config.reproducible and part.NOT_REPRODUCIBLE:
        return f"reproducible, but {what} {part.NOT_REPRODUCIBLE}; {LAST}: reproducible false"
    return None
