"""Two ranks on one GPU: whether NCCL allows them, and what reproducible mode costs on them.

NCCL refuses two ranks on a device, unless NCCL_MULTI_RANK_GPU_ENABLE is 1 (from NCCL 2.30 on). NVIDIA's multi-process
service (MPS) lets two processes compute at the same time on a device. The ways are tried in turn.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.gpu.case import Case
from tests.benchmarks.gpu.ours import Ours
from tests.benchmarks.gpu.timing import learning, wait
from tidewheel.elastic.process_group import serve_store
from tidewheel.train.cuda_environment import prepare_environment
from tidewheel.train.precision import fp32_products
from tidewheel.train.reproducible.kernels import deterministic_kernels
from tidewheel.train.runtime import Runtime

RANKS = 2
MEETING_SECONDS, PAIR_SECONDS = 45.0, 150.0
PAIRS = 12
MULTI_RANK = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


class NotPossibleError(RuntimeError):
    """NCCL does not let two ranks share this device. The text has a reason for each way that was tried."""


@dataclass(frozen=True)
class Way:
    """A way to let two ranks share a device."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the ranks."""
    mps: bool = False
    """NVIDIA's multi-process service runs."""


WAYS = (Way("NCCL as it is"), Way("NCCL_MULTI_RANK_GPU_ENABLE=1", MULTI_RANK),
        Way("MPS and NCCL_MULTI_RANK_GPU_ENABLE=1", MULTI_RANK, mps=True))


@contextlib.contextmanager
def shared_device(device: str) -> Iterator[str]:
    """Let processes that start inside the block share the device as ranks; yield how. A CPU needs nothing.

    Args:
        device: "cuda" or "cpu".

    Raises:
        NotPossibleError: no way works here.
    """
    if device == "cpu":
        yield "gloo on the CPU"
        return
    refusals = []
    for way in WAYS:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(_environment(way.environment))
                if way.mps:
                    stack.enter_context(_environment(stack.enter_context(_service())))
                on_ranks(_meet, device, seconds=MEETING_SECONDS)
            except (RuntimeError, OSError) as error:
                refusals.append(f"{way.name}: {_short(error)}")
                continue
            yield way.name
            return
    raise NotPossibleError("; ".join(refusals))


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Duplicate GPU" in line or "NCCL" in line]
    return (telling or lines or [type(error).__name__])[-1][:200]


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, which later processes inherit, for the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _service() -> Iterator[dict[str, str]]:
    """Run the multi-process service for the block; yield the variables that lead to it.

    Raises:
        RuntimeError: it is not installed, or ends at once.
    """
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        raise RuntimeError("nvidia-cuda-mps-control is not installed")
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        control = subprocess.Popen([program, "-f"], env={**os.environ, **variables}, stdin=subprocess.DEVNULL)
        try:
            until = time.monotonic() + 10
            while not (Path(folder) / "control").exists() and control.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            if control.poll() is not None:
                raise RuntimeError(f"nvidia-cuda-mps-control ended with code {control.returncode}")
            yield variables
        finally:
            control.terminate()
            try:
                control.wait(10)
            except subprocess.TimeoutExpired:
                control.kill()


def on_ranks(function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
    """Call `function(rank, *arguments)` on two ranks of a process group, and return what rank 0 returns.

    Args:
        function: module-level function.
        arguments: of the function; the first is the device.
        seconds: time limit.

    Raises:
        RuntimeError: a rank failed, or the time is over.
    """
    context = multiprocessing.get_context("spawn")
    store, answers = serve_store("127.0.0.1"), context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, store.port, answers, function, *arguments), daemon=True)
             for rank in range(RANKS)]
    for process in ranks:
        process.start()
    until, results = time.monotonic() + seconds, dict[int, Any]()
    try:
        while len(results) < RANKS:
            rank, error, result = answers.get(timeout=max(0.1, until - time.monotonic()))
            if error:
                raise RuntimeError(error)
            results[rank] = result
    except queue.Empty:
        raise RuntimeError(f"no answer from the ranks in {seconds:.0f} s") from None
    finally:
        for process in ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
    return results[0]


def _rank(rank: int, port: int, answers: Any, function: Callable[..., Any], device: str, *arguments: Any) -> None:
    try:
        prepare_environment()
        store = dist.PrefixStore("pair", dist.TCPStore("127.0.0.1", port, is_master=False))
        if device == "cuda":
            torch.cuda.set_device(0)
        bound = torch.device("cuda", 0) if device == "cuda" else None
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=RANKS,
                                timeout=timedelta(seconds=MEETING_SECONDS), device_id=bound)
        result = function(rank, device, *arguments)
        dist.destroy_process_group()
        answers.put((rank, "", result))
    except Exception as error:  # the parent reports it
        answers.put((rank, f"{type(error).__name__}: {error}", None))


def _meet(rank: int, device: str) -> float:
    """Reduce a tensor.

    Raises:
        RuntimeError: the sum is wrong.
    """
    values = torch.full((1 << 20,), float(rank + 1), device=device)
    dist.all_reduce(values)
    total = float(values.mean())
    if total != 3.0:
        raise RuntimeError(f"an all-reduce of 1 and 2 gave {total}")
    return total


def reproducible(case: Case) -> dict[str, Any]:
    """Measure how much slower steps of two ranks are in reproducible mode.

    Each pair of steps has one in each mode, in alternating order; the cost is the median of the pairs' ratios. Both
    modes run with cuBLAS's fixed workspace, since it is set for a process.
    """
    settings = {"parallel": {"data": "zero2"}, "elastic": {"max_workers": RANKS}}
    case = replace(case, virtual_ranks=RANKS, settings={**case.settings, **settings})
    with shared_device(case.device) as way:
        figures = on_ranks(_alternate, case.device, case, PAIRS if case.device == "cuda" else 2, seconds=PAIR_SECONDS)
    return {**figures, "rows": case.rows, "length": case.length, "note": f"two ranks on one device: {way}"}


def _alternate(rank: int, device: str, case: Case, pairs: int) -> dict[str, Any]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    runtime = Runtime(rank=rank, world_size=RANKS, device=torch.device(device))
    cases = [replace(case, settings={**case.settings, "reproducible": mode}) for mode in (False, True)]
    modes = [Ours(item, runtime) for item in cases]
    seconds: list[list[float]] = [[], []]
    losses: list[list[float]] = [[], []]
    for pair in range(case.warm + pairs):
        for mode in ((0, 1), (1, 0))[pair % 2]:
            with deterministic_kernels() if mode else fp32_products(torch.device(device), True):
                wait(device)
                began = time.perf_counter()
                losses[mode].append(modes[mode].step(pair))
                wait(device)
                seconds[mode].append(time.perf_counter() - began)
    fast, ordered = (times[case.warm:] for times in seconds)
    ratio = statistics.median(slow / quick for quick, slow in zip(fast, ordered))
    return {"ms": 1000 * statistics.median(ordered), "fast_ms": 1000 * statistics.median(fast), "slower": ratio - 1,
            **learning(losses[1])}
