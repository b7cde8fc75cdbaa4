"""Count, for each optimizer, how often the host waits for the device in a step, and what the update moves in memory.

    python -m tests.benchmarks.host_syncs [--preset 1b]

The step is the training's own, from the backward pass on: norm, report, guard, clipping, update, read-back of the
result. The meta device takes the GPU's place (`tests.device_counters`), so shapes and operators are real and no memory
is used. "plain" is each optimizer as on CPU, where the factor that clips is a pass of its own and the host decides
whether to update. "apart" has the fused update with such a pass before it, "fused" is what CUDA gets. Traffic is what
the kernels read and write if no cache helps, over the bytes of the fp32 gradients.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal
from unittest import mock

import torch

from tests.device_counters import DEVICE, device_that_counts
from tidewheel.config import build as build_config
from tidewheel.train import optimizers, parallel, step
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.guards.config import GuardsConfig
from tidewheel.train.guards.policy import Guard
from tidewheel.train.optim.build import build_optimizer
from tidewheel.train.optim.model_optimizer import ModelOptimizer, multiply
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import MicroBatch, start_step

VOCABULARY = 128_256
Form = Literal["plain", "apart", "fused"]
FORMS: tuple[Form, ...] = ("plain", "apart", "fused")
READ_BACK = 1
"""The result of the step is read back once; a run that runs ahead reads it while the next step is computed."""


@dataclass(frozen=True)
class Counted:
    """What one step costs behind its backward pass."""

    syncs: int
    """Times that the host waits, without the read-back of the result."""
    launches: int
    """Kernels, and foreach operators, that read or write whole tensors."""
    gradient_reads: float
    """How often all gradients are read, the norm's pass included."""
    gradient_writes: float
    traffic: float
    """Bytes read and written, over the bytes of the gradients."""


@contextmanager
def form(kind: str, *, fused: bool) -> Iterator[None]:
    """Have a built-in optimizer choose its fused or its plain form."""
    modules = [sys.modules[base.__module__] for base in optimizers.KIND.find(kind).__mro__
               if hasattr(sys.modules[base.__module__], "on_cuda")]
    patches = [mock.patch.object(module, "on_cuda", return_value=fused) for module in modules]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def gradients(model: ParallelModel) -> list[torch.Tensor]:
    """Give every parameter a gradient, and return them."""
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def factor_apart(optimizer: ModelOptimizer, skip: torch.Tensor, factor: torch.Tensor) -> None:
    """Make an update whose factor is a pass of its own."""
    multiply(optimizer.parts, factor)
    ModelOptimizer.step(optimizer, skip)


def count(preset: str, kind: str, name: Form) -> Counted:
    """Count one step of a model of `preset` with an optimizer in one of its forms."""
    config = build_config(TrainConfig, {"model": {"preset": preset}, "optimizer": {"kind": kind}})
    runtime = Runtime(device=DEVICE)
    rows = torch.zeros(1, 16, dtype=torch.int64, device=DEVICE)
    batch = [MicroBatch(rows, rows, rows, rows, 0, 16, 16)]
    with device_that_counts() as counters, form(kind, fused=name != "plain"):
        model = parallel.build(config, VOCABULARY, runtime)
        optimizer = build_optimizer(model, config.optimizer)
        held = gradients(model)
        update = partial(factor_apart, optimizer) if name == "apart" else optimizer.step
        losses = torch.zeros(1, device=DEVICE)
        with mock.patch.object(model, "zero_grad"), mock.patch.object(step, "precision_context"), \
                mock.patch.object(optimizer, "step", update), \
                mock.patch.object(model, "forward_backward", return_value=losses):
            with counters:
                started = start_step(model, optimizer, batch, Collectives(runtime), virtual_ranks=1,
                                     clip_norm=config.optimizer.clip_norm, guard=Guard(GuardsConfig(), DEVICE))
            started.result()
        size = sum(gradient.nbytes for gradient in held)
        reads, writes = counters.passes(held)
    return Counted(len(counters.syncs) - READ_BACK, len(counters.kernels), reads, writes, counters.bytes_moved / size)


def rows_of(preset: str, kinds: Sequence[str]) -> Iterator[list[str]]:
    """Yield the table's rows, and raise unless the fused form never waits and moves less."""
    for kind in kinds:
        table: dict[Form, Counted] = {name: count(preset, kind, name) for name in FORMS}
        assert table["fused"].syncs == 0, kind
        assert table["fused"].traffic < min(table["plain"].traffic, table["apart"].traffic), kind
        for name, counted in table.items():
            yield [kind, name, str(counted.syncs), str(counted.launches), f"{counted.gradient_reads:.1f}",
                   f"{counted.gradient_writes:.1f}", f"{counted.traffic:.1f}"]


HEAD = ["optimizer", "form", "syncs", "launches", "gradient reads", "gradient writes", "traffic / gradients"]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--preset", default="1b", help="size of the model")
    options = arguments.parse_args()
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    for row in rows_of(options.preset, optimizers.KIND.built_in()):
        print("| " + " | ".join(row) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
