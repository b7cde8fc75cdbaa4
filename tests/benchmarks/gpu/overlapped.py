"""Async tensor parallelism on two ranks of one GPU: whether it runs, and whether it trains as without it.

The ranks copy within one device, so their times say nothing about two GPUs, and the row has none.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch

from tests.benchmarks.gpu.case import Case
from tests.benchmarks.gpu.ours import Ours
from tests.benchmarks.gpu.pair import PAIR_SECONDS, RANKS, NotPossibleError, on_ranks, shared_device
from tests.benchmarks.gpu.timing import learning
from tests.symmetric_memory import on_cpu
from tidewheel.train.parallel.async_tensor import NOT_SHARED
from tidewheel.train.runtime import Runtime

TOLERANCE = 2e-3
"""Of a loss, relative: the products' operands and partial sums are bf16 on both sides, in another order."""


def train(case: Case) -> dict[str, Any]:
    """Train the same steps with and without overlapped collectives, and compare the losses.

    Raises:
        NotPossibleError: two ranks cannot share the device, or its memory.
    """
    with shared_device(case.device) as way:
        try:
            figures = on_ranks(_both, case.device, case, seconds=PAIR_SECONDS)
        except RuntimeError as error:
            if NOT_SHARED in str(error):
                raise NotPossibleError(str(error)) from error
            raise
    return {**figures, "rows": case.rows, "length": case.length, "note": f"two ranks on one device: {way}; no times"}


def _both(rank: int, device: str, case: Case) -> dict[str, Any]:
    runtime = Runtime(rank=rank, world_size=RANKS, device=torch.device(device))
    losses = {}
    with on_cpu() if device == "cpu" else contextlib.nullcontext():
        for overlapped in (False, True):
            layout = {"data": "ddp", "tensor": RANKS, "async_tensor": overlapped}
            settings = {**case.settings, "parallel": layout, "elastic": {"max_workers": RANKS}}
            model = Ours(replace(case, settings=settings), runtime)
            losses[overlapped] = [model.step(index) for index in range(case.warm + case.steps)]
    difference = max(abs(ours / theirs - 1) for ours, theirs in zip(losses[True], losses[False]))
    figures = learning(losses[True])
    return {**figures, "valid": figures["valid"] and difference < TOLERANCE, "largest_difference": difference}
