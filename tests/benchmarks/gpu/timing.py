"""Measure the steps of one side."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.benchmarks.gpu.case import SHAPES, Case
from tidewheel.config import build
from tidewheel.models.families import Llama
from tidewheel.train.metrics.gpu_peaks import peak_of_device

Step = Callable[[int], Any]
"""Do the optimizer step with this index and return its mean loss, as a number or a tensor."""


def wait(device: str) -> None:
    """Return when the device has done all its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def device_name(device: str) -> str:
    """Return the product."""
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def flops_per_token(case: Case) -> int:
    """Return 6 N + 12 layers x heads x head width x L, as `metrics.jsonl` counts them."""
    return build(Llama, SHAPES[case.shape]).flops_per_token(case.vocabulary, case.length)


def measure(step: Step, case: Case) -> dict[str, Any]:
    """Do the warm-up steps and the measured ones, and return a row's figures.

    A step's time is from its start to the start of the next on the device, by events that the host does not wait for.
    Tokens per second come from all measured steps between two synchronisations.
    """
    cuda = case.device == "cuda"
    began = time.perf_counter()
    losses = [step(0)]
    wait(case.device)
    first = time.perf_counter() - began
    losses += [step(index) for index in range(1, case.warm)]
    wait(case.device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    marks = [_mark(cuda)]
    for index in range(case.warm, case.warm + case.steps):
        losses.append(step(index))
        marks.append(_mark(cuda))
    wait(case.device)
    seconds = (time.perf_counter() - began) / case.steps
    milliseconds = sorted(_milliseconds(before, after) for before, after in itertools.pairwise(marks))
    return {"rows": case.rows, "length": case.length, "ms": statistics.median(milliseconds), "ms_low": milliseconds[0],
            "ms_high": milliseconds[-1], "first_step_seconds": first, **speed(case, seconds), **learning(losses),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None}


def speed(case: Case, seconds: float) -> dict[str, Any]:
    """Return tokens per second and MFU.

    Args:
        case: the model and batch.
        seconds: of a step.
    """
    tokens_per_second = case.tokens / seconds
    peak = peak_of_device(device_name(case.device))
    mfu = tokens_per_second * flops_per_token(case) / peak if peak else None
    return {"tokens_per_second": tokens_per_second, "mfu": mfu}


def learning(losses: list[Any]) -> dict[str, Any]:
    """Return the first loss, the last one, and whether the loss fell: a row counts only then."""
    values = [float(loss) for loss in losses]
    last = statistics.mean(values[-2:])
    return {"loss_first": values[0], "loss_last": values[-1],
            "valid": all(math.isfinite(value) for value in values) and last < values[0]}


def _mark(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(before: Any, after: Any) -> float:
    return (after - before) * 1000 if isinstance(before, float) else before.elapsed_time(after)
