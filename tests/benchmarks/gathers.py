"""Count the bytes that FSDP2 gathers and reduces in a micro-batch, by unit.

    python -m tests.benchmarks.gathers [--preset 8b] [--ranks 8] [--data zero3] [--tied] [--reduce-dtype fp32|bf16]

The model is parallelized as training on CUDA does (bf16 products, fp32 parameters) for the first of N ranks. One
forward and one backward pass run on torch's fake tensors and fake process group. Shapes, dtypes and the order of
collectives are real; values and the other ranks are not. A collective counts with the bytes of its whole result.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule

from tests.benchmarks.memory_table import fake_ranks
from tidewheel.config import build as build_config
from tidewheel.console import print_table
from tidewheel.models.decoder import Decoder
from tidewheel.train import precision
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import building
from tidewheel.train.parallel.building import parallelize
from tidewheel.train.parallel.mesh import Mesh
from tidewheel.train.runtime import Runtime

VOCABULARY = 128_256
"""Rows of the embedding, of Llama 3."""


@dataclass(frozen=True)
class Call:
    """One collective."""

    unit: str
    """Name of the first module that is gathered; "" for the root."""
    kind: str
    """all_gather or reduce_scatter; compute: the unit's forward pass has ended."""
    phase: str
    """forward or backward."""
    dtype: torch.dtype
    bytes: int
    """Of the whole result."""


class Counter:
    """Records the collectives of a model's FSDP units, with the pass in which they start.

    Args:
        model: a sharded decoder.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.calls: list[Call] = []
        self.phase = "forward"
        seen = set()
        for name, module in model.named_modules():
            group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            if group is None or group in seen:
                continue
            seen.add(group)
            module.set_custom_all_gather(_Counted(self, name, "all_gather", group._all_gather_comm))
            module.register_forward_hook(self._ended(name))
            module.set_custom_reduce_scatter(_Counted(self, name, "reduce_scatter", group._reduce_scatter_comm))

    def _ended(self, unit: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            self.calls.append(Call(unit, "compute", self.phase, torch.float32, 0))

        return hook

    def total(self, kind: str, phase: str) -> int:
        """Return the bytes of all collectives of a kind in a pass."""
        return sum(call.bytes for call in self.calls if (call.kind, call.phase) == (kind, phase))


class _Counted:
    """A collective of FSDP2 that counts and then does its work."""

    def __init__(self, counter: Counter, unit: str, kind: str, inner: Any) -> None:
        self._counter, self._unit, self._kind, self._inner = counter, unit, kind, inner

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._inner.allocate(*args, **kwargs)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        whole = output_tensor if self._kind == "all_gather" else input_tensor
        self._counter.calls.append(Call(self._unit, self._kind, self._counter.phase, whole.dtype, whole.nbytes))
        return self._inner(output_tensor, input_tensor, *args, **kwargs)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Give FSDP2 the mixed-precision policy of CUDA on any device."""
    original = precision.sharded_precision

    def policy(kind: precision.Precision, device: torch.device, *args: Any) -> Any:
        return original(kind, torch.device("cuda"), *args)

    with mock.patch.object(building, "sharded_precision", policy):
        yield


def settings(shape: Mapping[str, object], ranks: int, **parallel: object) -> TrainConfig:
    """Return the configuration of a bf16 run with one micro-batch per rank.

    Args:
        shape: settings of the model.
        ranks: number of data-parallel ranks.
        parallel: settings of the layout.
    """
    return build_config(TrainConfig, {
        "model": dict(shape), "parallel": parallel, "precision": "bf16",
        "batch": {"virtual_ranks": ranks, "global_sequences": ranks, "micro_sequences": 1},
        "elastic": {"min_workers": ranks, "max_workers": ranks}})


def count(config: TrainConfig, vocabulary: int, ranks: int) -> Counter:
    """Return the collectives of one micro-batch of rank 0.

    Args:
        config: of the run.
        vocabulary: rows of the embedding.
        ranks: number of ranks.
    """
    device = torch.device("cpu")
    low = torch.autocast("cpu", torch.bfloat16) if config.precision != "fp32" else nullcontext()
    with fake_ranks(ranks), as_on_cuda():
        mesh = Mesh.build(config.parallel, Runtime(0, ranks))
        with torch.device("meta"):
            decoder = Decoder(config.model, vocabulary, config.objective.token_loss())
        parameters = sum(parameter.numel() for parameter in decoder.parameters())
        with FakeTensorMode(allow_non_fake_inputs=True):
            layout = parallelize(decoder, config, mesh, device, parameters)
            layout.zero_grad()
            counter = Counter(decoder)
            layout.begin(0, 1)
            tokens = torch.zeros(1, 16, dtype=torch.int64, device=device)
            with low:
                loss = decoder(tokens, tokens, tokens, tokens)
            counter.phase = "backward"
            loss.backward()
    return counter


def rows(counter: Counter) -> list[dict[str, Any]]:
    """Return a row of the table for each unit; equal blocks share a row."""
    units: dict[str, list[Call]] = {}
    for call in counter.calls:
        units.setdefault(call.unit, []).append(call)
    table: dict[tuple[Any, ...], dict[str, Any]] = {}
    for unit, calls in units.items():
        kind = "each block" if unit.startswith("blocks.") else unit or "root"
        cells = {"unit": kind, "number": 0, **{f"{what}, {phase}": _cell(calls, what, phase) for what, phase in (
            ("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward"))}}
        table.setdefault(tuple(cells.values()), cells)["number"] += 1
    return list(table.values())


def _cell(calls: Sequence[Call], kind: str, phase: str) -> str:
    chosen = [call for call in calls if (call.kind, call.phase) == (kind, phase)]
    if not chosen:
        return "-"
    dtypes = "/".join(sorted({str(call.dtype).removeprefix("torch.") for call in chosen}))
    return f"{sum(call.bytes for call in chosen) / 1e6:,.1f} MB {dtypes}"


def main() -> int:
    """Print the table of one layout."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--preset", default="8b")
    arguments.add_argument("--ranks", type=int, default=8)
    arguments.add_argument("--data", default="zero3", choices=("zero2", "zero3"))
    arguments.add_argument("--tied", action="store_true", help="tie the embeddings")
    arguments.add_argument("--reduce-dtype", default="fp32", choices=("fp32", "bf16"))
    options = arguments.parse_args()
    shape = {"preset": options.preset, **({"tie_embeddings": True} if options.tied else {})}
    reduced = {} if options.reduce_dtype == "fp32" else {"reduce_dtype": options.reduce_dtype}
    counter = count(settings(shape, options.ranks, data=options.data, **reduced), VOCABULARY, options.ranks)
    print_table(rows(counter), title=f"{options.preset}, {options.data} over {options.ranks} ranks: bytes of a "
                                     "micro-batch's collectives, by unit")
    for kind, phase in (("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward")):
        print(f"{kind} in the {phase} pass: {counter.total(kind, phase) / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
