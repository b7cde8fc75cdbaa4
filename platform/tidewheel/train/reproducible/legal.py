"""What reproducible mode cannot have, said before any process starts. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidewheel.train.config import TrainConfig

OPTIMIZERS = {
    "adamw8bit": "keeps its moments in blocks, whose bounds follow the shards",
    "adafactor": "takes means over rows and columns, which it adds up over workers",
    "muon": "gathers matrices in products whose order follows the layout",
}
"""Why an optimizer's update depends on the number of workers. AdamW and Lion are element-wise."""


def reason_against(config: TrainConfig) -> str | None:
    """Why this configuration's result would depend on the number of workers, or None."""
    if not config.reproducible:
        return None
    if (why := OPTIMIZERS.get(config.optimizer.kind)) is not None:
        return (f"reproducible, but optimizer.kind {config.optimizer.kind} {why}; nearest that is legal: adamw")
    if config.precision == "fp8":
        return "reproducible, but nobody has shown it of torchao's fp8 layers; nearest that is legal: precision bf16"
    if config.parallel.pipeline > 1:
        return (f"reproducible, but with parallel.pipeline {config.parallel.pipeline} a stage adds up the gradients of "
                "its micro-batches as they come back, in an order that follows their number on each worker; nearest "
                f"that is legal: parallel.tensor {config.parallel.pipeline}, pipeline 1")
    return None
