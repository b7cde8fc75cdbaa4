"""Count what a step costs a GPU and its host, without a GPU.

The meta device takes the GPU's place: its tensors have shapes but no values, and everything that is not on the CPU must
be treated in the same way.

    with device_that_counts() as counters:
        ...  # prepare
        with counters:
            ...
    counters.syncs, counters.kernels
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.optim import adam
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tidewheel.train.optimizers.rules import on_device

DEVICE = torch.device("meta")
CPU = torch.device("cpu")
aten = torch.ops.aten
READS_VALUES = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
"""Operators whose result the host must wait for."""


@dataclass
class Kernel:
    """A launch, or the launches of one foreach operator."""

    name: str
    read: dict[int, int] = field(default_factory=dict)
    """Bytes read from each storage."""
    written: dict[int, int] = field(default_factory=dict)


class Counters(TorchDispatchMode):
    """Counts waits of the host for the device, and the kernels of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: list[str] = []
        """Operators for which the host waits."""
        self.kernels: list[Kernel] = []
        self._fused: Kernel | None = None
        self._pinned: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        if function is aten._pin_memory.default:
            copy = arguments[0].clone()
            self._pinned.add(_storage(copy))
            return copy
        if function is aten.is_pinned.default:
            return _storage(arguments[0]) in self._pinned
        if self._waits(function, arguments, named):
            self.syncs.append(str(function))
        if _on_device(arguments[:1]) and function is aten._local_scalar_dense.default:
            return 0.0  # the device has no values
        if _on_device(arguments[:1]) and function is aten._to_copy.default and named.get("device") == CPU:
            return torch.zeros(arguments[0].shape, dtype=named.get("dtype") or arguments[0].dtype)
        result = function(*arguments, **named)
        self._count(function, arguments, named, result)
        return result

    def _waits(self, function: Any, arguments: Any, named: dict[str, Any]) -> bool:
        if function in READS_VALUES:
            return _on_device(arguments[:1])
        if function is aten._to_copy.default:
            source, target = arguments[0], named.get("device") or arguments[0].device
            non_blocking = named.get("non_blocking", False)
        elif function is aten.copy_.default:
            source, target = arguments[1], arguments[0].device
            non_blocking = named.get("non_blocking", len(arguments) > 2 and arguments[2])
        else:
            return False
        if source.device.type == torch.device(target).type or (source.ndim == 0 and source.device.type == "cpu"):
            return False
        return not non_blocking or (source.device.type == "cpu" and _storage(source) not in self._pinned)

    def _count(self, function: Any, arguments: Any, named: dict[str, Any], result: Any) -> None:
        if getattr(function, "is_view", False) or function.namespace != "aten":
            return
        kernel = Kernel(str(function))
        for position, argument in enumerate(function._schema.arguments):
            value = named.get(argument.name, arguments[position] if position < len(arguments) else None)
            changes = argument.alias_info is not None and argument.alias_info.is_write
            if function is aten._fused_adamw_.default and argument.name == "grads":
                changes = named.get("grad_scale") is not None  # the kernel stores what it has divided
            if not (changes and function is aten.copy_.default):
                _add(kernel.read, value)
            if changes:
                _add(kernel.written, value)
        if not kernel.written:
            _add(kernel.written, result)
        if not kernel.read and not kernel.written:
            return
        if self._fused is None:
            self.kernels.append(kernel)
            return
        for storage, size in kernel.read.items():
            self._fused.read.setdefault(storage, size)
        self._fused.written |= kernel.written

    def as_one(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts as one kernel, as after compilation; only its arguments use memory."""
        def run(*arguments: Any, **named: Any) -> Any:
            self._fused = Kernel(function.__name__)
            result = function(*arguments, **named)
            fused, self._fused = self._fused, None
            held = {_storage(part) for tensor in tree_leaves((arguments, named)) if isinstance(tensor, torch.Tensor)
                    for part in _plain(tensor)}
            self.kernels.append(Kernel(fused.name, *({storage: size for storage, size in part.items()
                                                      if storage in held} for part in (fused.read, fused.written))))
            return result

        return run

    def passes(self, tensors: Sequence[torch.Tensor]) -> tuple[float, float]:
        """Return how often the kernels have read and written all of `tensors`."""
        storages, size = {_storage(tensor) for tensor in tensors}, sum(tensor.nbytes for tensor in tensors)
        read, written = (sum(bytes_ for kernel in self.kernels for storage, bytes_ in getattr(kernel, part).items()
                             if storage in storages) for part in ("read", "written"))
        return read / size, written / size

    @property
    def bytes_moved(self) -> int:
        """Bytes that the kernels have read and written."""
        return sum(sum(kernel.read.values()) + sum(kernel.written.values()) for kernel in self.kernels)


def _on_device(arguments: Sequence[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.device == DEVICE for value in arguments)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that a tensor subclass holds."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def _add(sizes: dict[int, int], value: Any) -> None:
    """Add the bytes of the device's tensors in `value`, without scalars."""
    for tensor in tree_leaves(value):
        if isinstance(tensor, torch.Tensor) and tensor.device == DEVICE and tensor.ndim:
            for part in _plain(tensor):
                sizes[_storage(part)] = sizes.get(_storage(part), 0) + part.nbytes


@contextmanager
def device_that_counts() -> Iterator[Counters]:
    """Let torch's fused optimizers and compiled functions work on `DEVICE`, and yield counters."""
    counters = Counters()

    def compiled(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        return counters.as_one(function)

    with mock.patch.object(on_device, "_compiled", compiled), mock.patch.object(torch, "compile", compiled), \
            mock.patch.object(adam, "_device_dtype_check_for_fused"):
        yield counters
