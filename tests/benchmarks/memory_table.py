"""Bytes of parameters, gradients and optimizer state on one rank, by layout, beside the published arithmetic.

    python -m tests.benchmarks.memory_table [--only 7b|70b]

Every row spreads the model as training does (`train.parallel`, `train.optim`) for the first of N ranks and runs a
forward and a backward pass of it, on torch's fake tensors and fake process group: shapes, types and the moments when
memory is taken and given back are real, the numbers and the other ranks are not. Counted are the tensors there are:
parameters between the forward and the backward pass, gradients after the backward pass, the optimizer's state.

The published arithmetic is ZeRO's (https://arxiv.org/abs/1910.02054, section 3.1 and figure 1): bf16 parameters and
gradients, and fp32 master weights and two moments, 2 + 2 + 12 bytes a parameter.
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
from tidewheel.train.parallel.mesh import Mesh
from tidewheel.train.parallel.model import parallelize
from tidewheel.train.runtime import Runtime

GB = 1e9
TOLERANCE = 0.005
"""Of a measured figure against the arithmetic, relative."""

MODELS: dict[str, tuple[dict[str, object], int]] = {
    # Llama 2 7B's and Llama 3 70B's blocks; vocabularies that make them 7.00e9 and 70.0e9 parameters, as published
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
    """ZeRO's stages: the optimizer's state is sharded from 1 on, gradients from 2, parameters from 3."""
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
    """Whole ones, or a rank's own rows under zero3."""
    beside: float
    """zero2: own rows, which FSDP2 keeps beside the gathered parameters; zero3: what is gathered between forward and
    backward pass (embedding, final norm and output; blocks are gathered while they compute)."""
    gradients: float
    optimizer: float
    billions: float
    """Parameters of the whole model, 1e9."""


def measure(shape: Mapping[str, object], vocabulary: int, ranks: int, data: str) -> Measured:
    """A forward and a backward pass of rank 0 of `ranks`, with nothing behind it."""
    config = build_config(TrainConfig, {
        "model": shape, "parallel": {"data": data}, "precision": "bf16", "parameters": "bf16",
        "batch": {"virtual_ranks": ranks, "global_sequences": ranks, "micro_sequences": 1},
        "elastic": {"min_workers": ranks, "max_workers": ranks}})
    sharded = config.parallel.fully_sharded and ranks > 1
    # FSDP2 wants memory, so it gets fake memory; everything else is content with the meta device, which has none
    device = torch.device("cpu" if sharded else "meta")
    with fake_ranks(ranks):
        mesh = Mesh.build(config.parallel, Runtime(0, ranks))
        with torch.device("meta"):
            decoder = Decoder(config.model, vocabulary, config.objective.token_loss()).to(torch.bfloat16)
        number = sum(parameter.numel() for parameter in decoder.parameters())
        with FakeTensorMode(allow_non_fake_inputs=True) if sharded else nullcontext():
            layout = parallelize(decoder, config, mesh, device, number)
            rows = [parameter for _, parameter in layout.named_parameters()]
            optimizer, shards = build_optimizer(layout, config.optimizer), size(rows)
            tokens = torch.zeros(1, 16, dtype=torch.int64, device=device)
            loss = decoder(tokens, tokens, tokens, tokens)
            whole = size(parameter for parameter in decoder.parameters() if not isinstance(parameter, DTensor))
            loss.backward()
            gradients = size(parameter.grad for parameter in decoder.parameters())
            state = size(optimizer.tensors().values())
    parameters, beside = (shards, whole) if data == "zero3" and sharded else (whole, shards if sharded else 0)
    return Measured(parameters / GB, beside / GB, gradients / GB, state / GB, number / 1e9)


def size(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of this rank's parts."""
    total = 0
    for tensor in tensors:
        mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert mine is not None
        total += mine.numel() * mine.element_size()
    return total


@contextmanager
def fake_ranks(number: int) -> Iterator[None]:
    """This process is rank 0 of `number`; its collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()


def within(row: Row, found: Measured) -> bool:
    """Whether every figure is the published one."""
    figures = (found.parameters, found.gradients, found.optimizer)
    return all(abs(ours - theirs) <= TOLERANCE * theirs for ours, theirs in zip(figures, row.published))


def cells(row: Row, found: Measured) -> list[str]:
    """A line of the table."""
    beside = f" (+ {found.beside:.2f})" if found.beside else ""
    total = found.parameters + found.gradients + found.optimizer
    return [f"{row.model}, {found.billions:.2f}e9", str(row.ranks), row.data, f"{found.parameters:.2f}{beside}",
            f"{found.gradients:.2f}", f"{found.optimizer:.2f}", f"{total:,.2f}",
            " + ".join(f"{gb:.4g}" for gb in row.published), f"{sum(row.published):,.4g}"]


HEAD = ["model, parameters", "ranks", "data", "parameters", "gradients", "optimizer", "total", "published", "total"]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", choices=MODELS, help="rows of this model")
    given = arguments.parse_args()
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    good = True
    for row in ROWS:
        if given.only in (None, row.model):
            found = measure(*MODELS[row.model], row.ranks, row.data)
            same = within(row, found)
            good &= same
            print("| " + " | ".join(cells(row, found)) + " |" + ("" if same else "  <- not as published"), flush=True)
    print(f"\nGB (1e9 bytes) on a rank; every figure is within {TOLERANCE:.1%} of the published one."
          if good else "\nsome figures are not as published")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
