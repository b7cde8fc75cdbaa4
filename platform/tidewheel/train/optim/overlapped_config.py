"""When offloaded parameters may be updated before the backward pass ends. Nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidewheel.parts import name_of

if TYPE_CHECKING:
    from tidewheel.train.config import TrainConfig


def reason_against(config: TrainConfig) -> str | None:
    """Return why `parallel.overlap_update` would change a result or cannot work, with the nearest legal choice."""
    parallel, last = config.parallel, "nearest legal choice"
    if not parallel.overlap_update:
        return None
    what = "parallel.overlap_update updates a layer before the backward pass has reached the others"
    if not parallel.offload:
        return f"parallel.overlap_update is for the updates of parallel.offload, which is false; {last}: offload true"
    if config.optimizer.NOT_OVERLAPPED:
        return (f"{what}, but optimizer.kind {name_of(type(config.optimizer))} {config.optimizer.NOT_OVERLAPPED}; "
                f"{last}: adamw, or overlap_update false")
    if config.optimizer.clip_norm:
        return (f"{what}, but optimizer.clip_norm {config.optimizer.clip_norm:g} needs the norm of the whole gradient "
                f"first; {last}: clip_norm 0, or overlap_update false")
    if config.guards.non_finite != "stop" or config.guards.spike != "ignore":
        return (f"{what}, so that a guard cannot withhold the update; {last}: guards.non_finite stop and guards.spike "
                "ignore, or overlap_update false")
    if config.precision == "fp16":
        return (f"{what}, but the loss scale of precision fp16 withholds updates; {last}: precision bf16, or "
                "overlap_update false")
    if config.reproducible:
        return (f"{what}, but in reproducible mode gradients are whole after the last micro-batch alone; {last}: "
                "overlap_update false")
    if parallel.pipeline > 1:
        return f"{what}, but a pipeline reduces its gradients after all passes; {last}: overlap_update false"
    if config.memory.optimizer_disk:
        return (f"{what}, but memory.optimizer_disk updates piece by piece in the order of the file; {last}: "
                "overlap_update false")
    return None
