"""Compare the bytes of parameters, gradients and optimizer state on one rank, by layout, with published formulas.

    python -m tests.benchmarks.memory_table [--only 7b|70b]

Every row parallelizes the model as training does (`train.parallel`, `train.optim`) for the first of N ranks and runs a
forward and a backward pass on torch's fake tensors and fake process group. Shapes, types and the times of allocation
are real; values and the other ranks are not. The table counts the existing tensors: parameters between the forward and
the backward pass, gradients after the backward pass, and the optimizer's state.

The formulas are ZeRO's (https://arxiv.org/abs/1910.02054, section 3.1 and figure 1): 16-bit parameters and gradients,
and fp32 master weights and two moments, 2 + 2 + 12 bytes per parameter. Tidewheel's gradients are fp32, so they must
take twice the formula's bytes: 2 + 4 + 12.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tidewheel.config import build as build_config
from tidewheel.models.decoder import Decoder
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.build import build_optimizer
from tidewheel.train.parallel.building import parallelize
from tidewheel.train.parallel.mesh import Mesh
from tidewheel.train.runtime import Runtime

GB = 1e9
TOLERANCE = 0.005
"""Largest relative difference of a measured figure from the formula."""

MODELS: dict[str, tuple[dict[str, object], int]] = {
    # the blocks of Llama 2 7B and Llama 3 70B, with vocabularies that give 7.00e9 and 70.0e9 parameters, as published
    "7b": ({"dim": 4096, "num_layers": 32, "num_heads": 32, "ffn_dim": 11008, "qk_norm": False}, 64_000),
    "70b": ({"preset": "70b"}, 94_592)}


@dataclass(frozen=True)
class Row:
    """One layout of one model."""

    model: str
    ranks: int
    data: str
    """ParallelConfig.data."""
    published: tuple[float, float, float]
    """GB of parameters, gradients and optimizer state on a rank."""


def arithmetic(billions: float, ranks: int, stage: int) -> tuple[float, float, float]:
    """Return ZeRO's figures: optimizer state is sharded from stage 1 on, gradients from 2, parameters from 3."""
    return tuple(size * billions / (ranks if stage >= first else 1)  # type: ignore[return-value]
                 for size, first in ((2, 3), (2, 2), (12, 1)))


STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
ROWS = [Row("7b", 1, "ddp", arithmetic(7, 1, 0)),
        *(Row("7b", 8, data, arithmetic(7, 8, stage)) for data, stage in STAGES.items()),
        *(Row("70b", ranks, "zero3", arithmetic(70, ranks, 3)) for ranks in (1, 8, 64, 256))]


@dataclass(frozen=True)
class Measured:
    """GB on one rank."""

    parameters: float
    """Whole parameters, or a rank's own rows under zero3."""
    beside: float
    """Under zero2, the rank's own rows, which FSDP2 keeps in addition to the gathered parameters. Under zero3, the
    parameters gathered between forward and backward pass: embedding, final norm and output."""
    gradients: float
    optimizer: float
    billions: float
    """Parameters of the whole model in units of 1e9."""


def measure(shape: Mapping[str, object], vocabulary: int, ranks: int, data: str) -> Measured:
    """Measure a forward and a backward pass of rank 0 of `ranks` on fake tensors."""
    config = build_config(TrainConfig, {
        "model": shape, "parallel": {"data": data}, "precision": "bf16", "parameters": "bf16",
        "batch": {"virtual_ranks": ranks, "global_sequences": ranks, "micro_sequences": 1},
        "elastic": {"min_workers": ranks, "max_workers": ranks}})
    sharded = config.parallel.fully_sharded and ranks > 1
    # FSDP2 needs memory, so it gets fake memory; the meta device, which has none, is enough for everything else
    device = torch.device("cpu" if sharded else "meta")
    with fake_ranks(ranks):
        mesh = Mesh.build(config.parallel, Runtime(0, ranks))
        with torch.device("meta"):
            decoder = Decoder(config.model, vocabulary, config.objective.token_loss()).to(torch.bfloat16)
        count = sum(parameter.numel() for parameter in decoder.parameters())
        with FakeTensorMode(allow_non_fake_inputs=True) if sharded else nullcontext():
            layout = parallelize(decoder, config, mesh, device, count)
            rows = [parameter for _, parameter in layout.named_parameters()]
            optimizer, shards = build_optimizer(layout, config.optimizer), size(rows)
            layout.zero_grad()  # as each step begins
            tokens = torch.zeros(1, 16, dtype=torch.int64, device=device)
            loss = decoder(tokens, tokens, tokens, tokens)
            whole = size(parameter for parameter in decoder.parameters() if not isinstance(parameter, DTensor))
            loss.backward()
            gradients = size(parameter.grad for parameter in decoder.parameters())
            state = size(optimizer.tensors().values())
    parameters, beside = (shards, whole) if data == "zero3" and sharded else (whole, shards if sharded else 0)
    return Measured(parameters / GB, beside / GB, gradients / GB, state / GB, count / 1e9)


def size(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes of this rank's parts."""
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert local is not None
        total += local.numel() * local.element_size()
    return total


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Make this process rank 0 of `ranks`, whose collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def within(row: Row, measured: Measured) -> bool:
    """Return whether every figure matches the published one, and the gradients twice theirs."""
    figures = (measured.parameters, measured.gradients / 2, measured.optimizer)
    return all(abs(ours - theirs) <= TOLERANCE * theirs for ours, theirs in zip(figures, row.published))


def cells(row: Row, measured: Measured) -> list[str]:
    """Return the cells of a row of the table."""
    beside = f" (+ {measured.beside:.2f})" if measured.beside else ""
    total = measured.parameters + measured.gradients + measured.optimizer
    return [f"{row.model}, {measured.billions:.2f}e9", str(row.ranks), row.data, f"{measured.parameters:.2f}{beside}",
            f"{measured.gradients:.2f}", f"{measured.optimizer:.2f}", f"{total:,.2f}",
            " + ".join(f"{gb:.4g}" for gb in row.published), f"{sum(row.published):,.4g}"]


HEAD = ["model, parameters", "ranks", "data", "parameters", "gradients", "optimizer", "total", "published", "total"]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", choices=MODELS, help="rows of this model")
    options = arguments.parse_args()
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    good = True
    for row in ROWS:
        if options.only in (None, row.model):
            measured = measure(*MODELS[row.model], row.ranks, row.data)
            matches = within(row, measured)
            good &= matches
            note = "" if matches else "  <- not as published"
            print("| " + " | ".join(cells(row, measured)) + " |" + note, flush=True)
    print(f"\nGB (1e9 bytes) on a rank; parameters and optimizer state are within {TOLERANCE:.1%} of the published "
          "figures; gradients, which are fp32 here, of twice the published ones."
          if good else "\nsome figures are not as published")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
