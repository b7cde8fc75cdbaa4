"""A backend of torch.distributed that fails as NCCL does, on CPU: a process group in Python over gloo.

What it copies from ProcessGroupNCCL (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp):

- Collectives of a group run one after the other beside the program, as kernels of a stream do.
- A collective whose peer is gone raises nothing. It hangs, as its kernel would.
- `abort` ends what hangs. The outputs hold garbage after that, and nothing raises.
- A watchdog notices the failure. Unless TORCH_NCCL_ASYNC_ERROR_HANDLING is 0, it ends the process.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from tidewheel.elastic import process_group
from tidewheel.train.cuda_environment import ERROR_HANDLING

NAME = "nccl_like"
EXIT_CODE = 134
"""Of a process that the watchdog ends: SIGABRT's, as with NCCL."""
GARBAGE = 1e30
"""What an aborted collective leaves in its outputs: finite, so that no check for NaN finds it."""
COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base", "all_gather_single",
    "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "gather", "scatter", "reduce", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "barrier")
"""Methods of a process group, with the names of all versions of torch that are supported."""
TO_A_PEER = ("send", "recv")


class Stream:
    """Runs functions one after the other in a thread."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="nccl-like stream", daemon=True).start()

    def add(self, function: Callable[[], None]) -> None:
        self._work.put(function)

    def _run(self) -> None:
        while True:
            self._work.get()()


class NcclLike(dist.ProcessGroup):
    """The process group; see the module."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._gloo = dist.ProcessGroup(store, rank, size)
        never = timedelta(days=1)  # a kernel of NCCL has no time limit
        self._gloo._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, size, never))
        self._gloo._set_default_backend(kind)
        self._streams: dict[Any, Stream] = {}
        self._aborted = threading.Event()
        self._begun = 0

    @classmethod
    def create(cls, store: dist.Store, rank: int, size: int, timeout: timedelta) -> NcclLike:
        return cls(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name  # the base class asks a backend in C++

    def abort(self) -> None:
        self._aborted.set()

    def shutdown(self) -> None:
        self._aborted.set()

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    def _set_sequence_number_for_group(self) -> None:
        return

    def _begin(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any], stream: Any) -> Any:
        """Start a collective on a stream; return its work."""
        self._begun += 1
        outputs = arguments[0] if arguments else []
        future: Future[Any] = Future()

        def run() -> None:
            try:
                if self._aborted.is_set():
                    raise RuntimeError("aborted before it began")
                work = getattr(self._gloo, name)(*arguments, **named)
                work.wait()
            except RuntimeError as error:
                self._watchdog(error)
                self._aborted.wait()
                fill(outputs)
            future.set_result(outputs)

        self._streams.setdefault(stream, Stream()).add(run)
        return _create_work_from_future(future)

    def _watchdog(self, error: RuntimeError) -> None:
        if os.environ.get(ERROR_HANDLING, "3") != "0" and not self._aborted.is_set():
            print(f"NCCL-like watchdog: {error}; taking the entire process down", file=sys.stderr, flush=True)
            os._exit(EXIT_CODE)


def fill(outputs: Any) -> None:
    """Write garbage into all tensors of nested lists."""
    if isinstance(outputs, torch.Tensor):
        outputs.detach().fill_(GARBAGE if outputs.is_floating_point() else 7)
    elif isinstance(outputs, (list, tuple)):
        for output in outputs:
            fill(output)


def _method(name: str) -> Callable[..., Any]:
    def collective(self: NcclLike, *arguments: Any, **named: Any) -> Any:
        return self._begin(name, arguments, named, "collectives")

    def to_a_peer(self: NcclLike, *arguments: Any) -> Any:
        return self._begin(name, arguments, {}, (name, arguments[1]))

    return to_a_peer if name in TO_A_PEER else collective


for _name in (*COLLECTIVES, *TO_A_PEER):
    if hasattr(dist.ProcessGroup, _name):
        setattr(NcclLike, _name, _method(_name))


def install() -> None:
    """Let generations on CPU use this backend in this process."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, NcclLike.create, devices=["cpu"])
    process_group.BACKENDS["cpu"] = NAME
