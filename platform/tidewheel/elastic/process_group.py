"""The process group of one generation, which a rank opens and breaks without the help of the other ranks.

The coordinator hosts its store, outside every rank. gloo cannot cancel a collective that waits for a stopped rank. But
the collective fails at once when its connections are closed, so a group remembers its connections.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tidewheel.elastic import reconfiguring

START_SECONDS = 300.0
"""Time limit of collectives until the guards set their own."""
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""torch.distributed's backend for each type of device."""


def serve_store(host: str) -> dist.TCPStore:
    """Return the store at which the ranks of all generations meet; this process serves it at its `port`."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class Connections:
    """TCP connections that this process opened while it made process groups."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: set[int] | None = None  # descriptors open before the group that is being made
        self._recorded: dict[int, int] = {}  # descriptor: inode
        self._broken = False

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the connections opened in the block as a group's.

        Other threads rarely open a connection meanwhile; if it is broken later, they must reconnect.

        Raises:
            RuntimeError: `shut_down` was called.
        """
        with self._lock:
            if self._broken:
                raise RuntimeError("the generation has ended")
            outermost = self._before is None
            if outermost:
                self._before = set(_sockets())
        try:
            yield
        finally:
            with self._lock:
                if outermost:
                    self._take()
                    self._before = None

    def shut_down(self) -> None:
        """Make everything that uses one of the connections fail, and refuse to record more. Call it from any thread."""
        with self._lock:
            self._broken = True
            self._take()
            now = _sockets()
            for descriptor, inode in self._recorded.items():
                if now.get(descriptor) == inode:  # otherwise it was closed, and its number used again
                    _shut_down(descriptor)

    def _take(self) -> None:
        if self._before is not None:
            self._recorded |= {fd: inode for fd, inode in _sockets().items() if fd not in self._before}


class GenerationGroup:
    """torch.distributed's default group for one generation, and every group made from it.

    Any thread may call `break_off` at any time, even before `open`.
    """

    def __init__(self) -> None:
        self._connections = Connections()
        self._store: Any = None
        self._restore: Callable[[], None] | None = None
        self._also: list[Callable[[], None]] = []
        self._usable = True  # in the next generation, if the default group lasts
        self.broken = False

    def open(self, store: tuple[str, int], generation: int, rank: int, world_size: int,
             device: torch.device | str) -> None:
        """Meet the other ranks. A single rank has nothing to do.

        Args:
            store: host and port of the store.
            generation: number of the generation.
            rank: rank of this process.
            world_size: number of ranks.
            device: this rank's device, which is the current device on CUDA.

        Raises:
            RuntimeError: another rank does not come, or `break_off` was called.
        """
        def connect() -> dist.Store:
            client = dist.TCPStore(*store, is_master=False, timeout=timedelta(seconds=START_SECONDS))
            return dist.PrefixStore(f"generation/{generation}", client)

        backend = BACKENDS[torch.device(device).type]
        if world_size == 1 or not reconfiguring.is_supported(backend):
            reconfiguring.discard()
            self._open(connect, rank, world_size, device)
            return
        self._restore = _recording(self._connections)
        with self._connections.recorded():
            self._store = connect()
        self._usable = False
        reconfiguring.connect(backend, store, self._store, generation, rank, world_size, seconds=START_SECONDS,
                              recorded=self._connections.recorded)
        self._usable = True

    def open_from_environment(self, rank: int, world_size: int, device: torch.device | str) -> None:
        """Meet the other ranks at the store of the launcher that started this process, such as torchrun.

        Args:
            rank: rank of this process.
            world_size: number of ranks.
            device: this rank's device, which is the current device on CUDA.

        Raises:
            RuntimeError: another rank does not come, or `break_off` was called.
        """
        def connect() -> dist.Store:
            store: dist.Store
            meeting = dist.rendezvous("env://", rank, world_size, timeout=timedelta(seconds=START_SECONDS))
            store, _, _ = next(iter(meeting))
            return store

        self._open(connect, rank, world_size, device)

    def _open(self, connect: Callable[[], dist.Store], rank: int, world_size: int, device: torch.device | str) -> None:
        if world_size == 1:
            return
        self._restore = _recording(self._connections)
        with self._connections.recorded():
            self._store = connect()
        device = torch.device(device)
        # torch names a group by the number of groups before it, and counts one whose opening has failed: the name would
        # differ from that of the ranks that did not try, and all would wait for each other
        distributed_c10d._world.group_count = 0
        # with a device, NCCL connects at once, and later groups split from this one instead of meeting again
        bound = device if device.type == "cuda" else None
        dist.init_process_group(BACKENDS[device.type], store=self._store, rank=rank, world_size=world_size,
                                timeout=timedelta(seconds=START_SECONDS), device_id=bound)

    def is_whole(self) -> bool:
        """Return whether no collective of the group was broken off.

        An aborted collective of NCCL raises nothing: it ends early and leaves any values in its output. So values that
        are read back from the device count only if the group is whole after that.
        """
        return not self.broken

    def also_break(self, function: Callable[[], None]) -> None:
        """Call `function` too when the group is broken off, for other code that may wait for ranks."""
        self._also.append(function)
        if self.broken:
            function()

    def break_off(self) -> None:
        """Make every present and later collective of this rank fail."""
        self.broken = True  # before the abort: who reads what it leaves must know
        if dist.is_initialized() and dist.get_backend() != "gloo":
            with contextlib.suppress(RuntimeError, ValueError):  # it is being torn down already
                distributed_c10d._abort_process_group()
        self._connections.shut_down()
        for function in list(self._also):
            function()

    def close(self) -> None:
        """Tear down the group. The process may open the next generation's after that."""
        if self._restore is not None:
            self._restore()
        if dist.is_initialized():
            if self.broken:
                self._connections.shut_down()
            if not reconfiguring.is_default():
                dist.destroy_process_group()
            elif self._usable:
                reconfiguring.release()
            else:
                reconfiguring.discard()
        self._store = None


def _recording(connections: Connections) -> Callable[[], None]:
    """Record the connections of every group made from now on; return a function that ends this."""
    module: Any = distributed_c10d
    original = module._new_process_group_helper

    def recorded(*arguments: Any, **named: Any) -> Any:
        with connections.recorded():
            return original(*arguments, **named)

    def restore() -> None:
        module._new_process_group_helper = original

    module._new_process_group_helper = recorded
    return restore


def _sockets() -> dict[int, int]:
    """Return descriptor and inode of every socket of this process. Without /proc there are none: time limits apply."""
    sockets: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    sockets[int(name)] = status.st_ino
    return sockets


def _shut_down(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=os.dup(descriptor))
        with connection:
            internet = connection.family in (socket.AF_INET, socket.AF_INET6)
            # gloo ends the process when its listening socket is shut down
            if internet and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)
