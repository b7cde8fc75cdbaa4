"""Count the bytes of tensor parallelism's collectives in a block, and how many of them overlap with products.

    python -m tests.benchmarks.tensor_collectives [--preset 8b] [--ranks 8] [--length 4096] [--rows 1] [--pass]

One block runs forward and backward as the first of T ranks, with bf16 products and fp32 parameters, on torch's fake
tensors and fake process group. Shapes, dtypes and collectives are real; values and the other ranks are not. A
collective counts with the bytes of its whole result (of its whole input, for a reduce-scatter).

- gathers in fp32: the whole input of attention and of the feed-forward is gathered in the residual stream's dtype.
- plain: it is gathered in the products' dtype.
- async_tensor: each collective and the product beside it are one operator.

`--pass` instead compiles a small block in fp32 and in bf16 with inductor's own pass for asynchronous tensor
parallelism (`_micro_pipeline_tp`), and counts the fused operators that it makes; for comparison also a single product
of a gathered matrix.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch._inductor import config as inductor
from torch._inductor.fx_passes import micro_pipeline_tp, post_grad
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_gather_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.benchmarks.memory_table import fake_ranks
from tests.symmetric_memory import on_cpu
from tidewheel.config import build as build_config
from tidewheel.console import print_table
from tidewheel.models.attention import DocumentMask, document_mask
from tidewheel.models.decoder import Decoder
from tidewheel.models.families import Llama
from tidewheel.models.rope import RopeTable, rope_table
from tidewheel.train.parallel import tensor
from tidewheel.train.parallel.config import ParallelConfig
from tidewheel.train.parallel.mesh import Mesh
from tidewheel.train.runtime import Runtime

WAYS = {"gathers in fp32": False, "plain": False, "async_tensor": True}
"""Rows of the table: whether collectives overlap with products."""
GATHERS = {"_c10d_functional::all_gather_into_tensor", "_c10d_functional::all_gather_single"}
SCATTERS = {"_c10d_functional::reduce_scatter_tensor", "_c10d_functional::reduce_scatter_single"}
FUSED = {"symm_mem::fused_all_gather_matmul": "all_gather", "symm_mem::fused_matmul_reduce_scatter": "reduce_scatter"}


@dataclass(frozen=True)
class Call:
    """One collective."""

    kind: str
    """all_gather or reduce_scatter."""
    phase: str
    """forward or backward."""
    dtype: torch.dtype
    bytes: int
    """Of the whole result of a gather, or of the whole input of a reduce-scatter."""
    products: int
    """Products that overlap with it; 0: none, so its time adds to the step's."""


class Collectives(TorchDispatchMode):
    """Records collectives, and those that are one operator with products.

    Args:
        ranks: T.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.phase = "forward"
        self._ranks = ranks

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = function.name()
        if name in GATHERS or name in SCATTERS:
            kind = "all_gather" if name in GATHERS else "reduce_scatter"
            size = arguments[0].nbytes * (self._ranks if kind == "all_gather" else 1)
            self.calls.append(Call(kind, self.phase, arguments[0].dtype, size, 0))
        elif name in FUSED:
            first, second = arguments[:2]
            if FUSED[name] == "all_gather":
                size, products = first.nbytes * self._ranks, len(second)
            else:
                size, products = first.numel() // first.shape[-1] * second.shape[1] * first.itemsize, 1
            self.calls.append(Call(FUSED[name], self.phase, first.dtype, size, products))
        return function(*arguments, **named or {})


def shared(length: int, rows: int, model: Llama) -> tuple[RopeTable, DocumentMask]:
    """Return what all blocks share: RoPE's angles, and a mask of one document per row."""
    positions = torch.arange(length).expand(rows, -1)
    rope = model.rope(0)
    assert rope is not None
    return rope_table(positions, rope), document_mask(torch.zeros_like(positions))


def sharded_block(model: Llama, ranks: int, asynchronous: bool) -> torch.nn.Module:
    """Return the first block of a decoder on the meta device, sharded over `ranks`."""
    with torch.device("meta"):
        decoder = Decoder(model, 64 * ranks)
    mesh = Mesh.build(ParallelConfig(tensor=ranks), Runtime(0, ranks)).of("tensor")
    assert mesh is not None
    tensor.apply(decoder, mesh, asynchronous=asynchronous)
    return decoder.blocks[0]


def count(way: str, model: Llama, ranks: int, length: int, rows: int) -> list[Call]:
    """Return the collectives of one block in a forward and backward pass.

    Args:
        way: a key of `WAYS`.
        model: whose block it is.
        ranks: T.
        length: tokens of a row.
        rows: rows of the micro-batch.
    """
    whole_input = mock.patch.object(tensor, "_product_modules", return_value=[])
    with fake_ranks(ranks), whole_input if way == "gathers in fp32" else nullcontext():
        block = sharded_block(model, ranks, WAYS[way])
        with FakeTensorMode(allow_non_fake_inputs=True), Collectives(ranks) as collectives:
            block.to_empty(device="cpu")
            x = torch.zeros(rows, length // ranks, model.dim, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16):
                out = block(x, *shared(length, rows, model))
            collectives.phase = "backward"
            out.sum().backward()
    return collectives.calls


def row(way: str, calls: list[Call]) -> dict[str, str]:
    """Return a row of the table."""
    cells = {"": way}
    for phase in ("forward", "backward"):
        for kind in ("all_gather", "reduce_scatter"):
            chosen = [call for call in calls if (call.kind, call.phase) == (kind, phase)]
            dtypes = "/".join(sorted({str(call.dtype).removeprefix("torch.") for call in chosen}))
            cells[f"{kind}, {phase}"] = f"{sum(call.bytes for call in chosen) / 1e6:,.1f} MB {dtypes}"
    alone = sum(call.bytes for call in calls if not call.products)
    return {**cells, "not overlapped": f"{alone / 1e6:,.1f} MB", "fused operators": str(
        sum(call.products > 0 for call in calls)), "products in them": str(sum(call.products for call in calls))}


def overlapped_by_inductor(what: str) -> list[int]:
    """Return the number of fused operators that inductor's pass puts into each graph, forward and backward.

    Args:
        what: "matrices": a product of a gathered matrix, which the pass is made for; "fp32" or "bf16": our small block.
    """
    found: list[int] = []
    original = micro_pipeline_tp.micro_pipeline_tp_pass

    def counted(graph: torch.fx.Graph, *arguments: Any, **named: Any) -> None:
        original(graph, *arguments, **named)
        found.append(sum(str(node.target).startswith("symm_mem.fused") for node in graph.nodes))

    with fake_ranks(2), _searching(), mock.patch.object(post_grad, "micro_pipeline_tp_pass", counted):
        if what == "matrices":
            group = dist.group.WORLD
            assert group is not None
            matrix = torch.zeros(16, 64)
            torch.compile(lambda x: all_gather_tensor(x, 0, group) @ x.t())(matrix)
            return found
        model = build_config(Llama, {"preset": "debug"})
        block = sharded_block(model, 2, asynchronous=False).to_empty(device="cpu")
        with torch.autocast("cpu", torch.bfloat16, enabled=what == "bf16"):
            out = torch.compile(block)(torch.zeros(1, 32, model.dim, requires_grad=True), *shared(64, 1, model))
        out.sum().backward()
    return found


@contextmanager
def _searching() -> Iterator[None]:
    torch._dynamo.reset()
    # without NCCL, the pass does nothing
    with (on_cpu(), inductor.patch(_micro_pipeline_tp=True, force_disable_caches=True), symmetric_memory._test_mode(),
          mock.patch.object(dist, "is_nccl_available", return_value=True)):
        yield


def main() -> int:
    """Print the table; return 1 if a collective of the asynchronous block is not overlapped."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--preset", default="8b")
    arguments.add_argument("--ranks", type=int, default=8)
    arguments.add_argument("--length", type=int, default=4096)
    arguments.add_argument("--rows", type=int, default=1)
    arguments.add_argument("--pass", action="store_true", dest="search", help="count what inductor's own pass finds")
    options = arguments.parse_args()
    if options.search:
        for what in ("matrices", "fp32", "bf16"):
            print(f"{what}: fused operators in each compiled graph: {overlapped_by_inductor(what)}")
        return 0
    model = build_config(Llama, {"preset": options.preset, "num_layers": 1})
    calls = {way: count(way, model, options.ranks, options.length, options.rows) for way in WAYS}
    print_table([row(way, found) for way, found in calls.items()],
                title=f"{options.preset}, {options.ranks} ranks, {options.rows} x {options.length} tokens: collectives "
                      "of a block")
    return 0 if all(call.products for call in calls["async_tensor"]) else 1


if __name__ == "__main__":
    sys.exit(main())
