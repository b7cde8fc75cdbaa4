"""Optimizer state in a file on the node's disk, as ZeRO-Infinity has it (https://arxiv.org/abs/2104.07857).

State is cut into pieces of neighbouring parameters. An update goes from piece to piece: while one is updated, the next
is read and the previous one written. Between updates the state's tensors are views of the file, which a checkpoint
reads and fills like any other tensor; during an update, those of one piece point to memory.

An optimizer updates each parameter by itself, so pieces do not change a bit of the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tidewheel.train.memory.scratch_file import ScratchFile, Transfer, buffer, rounded
from tidewheel.train.optim.base import COUNT
from tidewheel.train.optim.disk_config import PIECE_BYTES, PIECES
from tidewheel.train.optim.some_parameters import only

LINE = 64
"""Tensors in a piece begin at a multiple of this many bytes, so that kernels for vectors read whole cache lines."""


@dataclass(frozen=True)
class _Held:
    """A tensor whose memory is in the file."""

    tensor: torch.Tensor
    start: int
    """Its first byte in the piece."""

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return self.tensor.numel() * self.tensor.element_size()

    def point_to(self, memory: torch.Tensor) -> None:
        """Let the tensor have its values in the memory of a piece, uint8 [n]."""
        tensor = self.tensor
        values = memory[self.start:self.start + self.size].view(tensor.dtype).view(tensor.shape)
        if isinstance(tensor, torch.nn.Parameter):
            tensor.data = values
        else:
            tensor.set_(values)  # type: ignore[call-overload]


@dataclass(frozen=True)
class _Piece:
    """Parameters that are updated together, and their state."""

    part: torch.optim.Optimizer
    parameters: tuple[torch.Tensor, ...]
    held: tuple[_Held, ...]
    size: int
    place: int = 0
    """First byte in the file."""

    def point_to(self, memory: torch.Tensor) -> None:
        """Let all state have its values in `memory`."""
        for item in self.held:
            item.point_to(memory)


class DiskState:
    """The state of a model's optimizers in a file.

    Args:
        folder: on a local disk.
        parts: the optimizers, with their state allocated in host memory, whose values are moved.
        masters: whether the parameters that they update belong to the state, as fp32 master weights do.
        piece_bytes: of a piece, unless one parameter has more.

    Raises:
        StorageError: the disk has not enough space.
    """

    def __init__(self, folder: Path, parts: Iterable[torch.optim.Optimizer], *, masters: bool = False,
                 piece_bytes: int = PIECE_BYTES) -> None:
        pieces = [piece for part in parts for piece in _cut(part, masters, piece_bytes)]
        self._pieces, place = [], 0
        for piece in pieces:
            self._pieces.append(dataclasses.replace(piece, place=place))
            place += piece.size
        self.bytes = place
        """Bytes of the file."""
        self._file = ScratchFile(folder, place) if place else None
        largest = max((piece.size for piece in pieces), default=0)
        count = min(PIECES, len([piece for piece in pieces if piece.size]))
        self._buffers = [buffer(largest) for _ in range(count)]
        self._ahead: Transfer | None = None
        self._keep()

    @property
    def direct(self) -> bool:
        """Return whether transfers pass the system's cache by."""
        return self._file is not None and self._file.direct

    @torch.no_grad()
    def _keep(self) -> None:
        """Move the state's values to the file."""
        for piece in self._pieces:
            for item in piece.held:
                values = item.tensor.detach()
                if self._file is not None and bool(values.any()):  # the file is zero, as most state is at first
                    self._view(piece)[item.start:item.start + item.size].view(values.dtype).copy_(values.reshape(-1))
            self._rest(piece)

    def step(self, part: torch.optim.Optimizer, after: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Update the parameters of one optimizer, piece by piece, and wait until its state is in the file.

        Args:
            part: the optimizer.
            after: called with the parameters of each piece when they are updated, with their state in memory.

        Raises:
            StorageError: the disk failed. The state is lost then, and the checkpoint holds.
        """
        pieces = [piece for piece in self._pieces if piece.part is part]
        stored = [piece for piece in pieces if piece.size]
        writes: list[Transfer | None] = [None] * len(self._buffers)
        reads: dict[int, Transfer] = {}

        def read(number: int) -> None:
            turn = number % len(self._buffers)
            if (before := writes[turn]) is not None:
                before.wait()
                writes[turn] = None
            reads[number] = self._read(stored[number], self._buffers[turn])

        try:
            if stored:
                ahead, self._ahead = self._ahead, None
                if ahead is not None and stored[0] is self._first:
                    reads[0] = ahead
                else:
                    read(0)
            number = 0
            for piece in pieces:
                if not piece.size:
                    self._update(piece, after)
                    continue
                if number + 1 < len(stored):
                    read(number + 1)
                reads.pop(number).wait()
                turn = number % len(self._buffers)
                memory = self._buffers[turn][:piece.size]
                piece.point_to(memory)
                self._update(piece, after)
                self._rest(piece)
                assert self._file is not None
                writes[turn] = self._file.write(piece.place, memory)
                number += 1
        finally:
            for transfer in (*reads.values(), *writes):
                if transfer is not None:
                    transfer.wait()

    def read_ahead(self) -> None:
        """Start to read what the next update needs first, while the passes before it compute."""
        if self._ahead is None and self._first is not None:
            self._ahead = self._read(self._first, self._buffers[0])

    def forget(self) -> None:
        """Drop what was read ahead: someone may change the state in the file."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.wait()

    def close(self) -> None:
        """Wait for all transfers; the space is free when no tensor uses it any more."""
        self.forget()
        if self._file is not None:
            self._file.close()

    @property
    def _first(self) -> _Piece | None:
        return next((piece for piece in self._pieces if piece.size), None)

    def _read(self, piece: _Piece, memory: torch.Tensor) -> Transfer:
        assert self._file is not None
        return self._file.read(piece.place, memory[:piece.size])

    def _view(self, piece: _Piece) -> torch.Tensor:
        assert self._file is not None
        return self._file.tensor[piece.place:piece.place + piece.size]

    def _rest(self, piece: _Piece) -> None:
        """Let the state of a piece be views of the file."""
        if piece.size:
            piece.point_to(self._view(piece))

    def _update(self, piece: _Piece, after: Callable[[Sequence[torch.Tensor]], None]) -> None:
        with only(piece.part, set(map(id, piece.parameters))):
            piece.part.step()
        after(piece.parameters)


def _cut(part: torch.optim.Optimizer, masters: bool, piece_bytes: int) -> list[_Piece]:
    """Return the pieces of one optimizer. All ranks cut alike, since an update may communicate."""
    pieces: list[_Piece] = []
    parameters: list[torch.Tensor] = []
    held: list[_Held] = []
    size, planned = 0, 0.0
    for group in part.param_groups:
        for parameter in group["params"]:
            tensors = _memory_of(part.state.get(parameter, {}))
            if masters:
                tensors.append(_local(parameter))
            share = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            # of the whole parameter, so that ranks with a row more do not cut elsewhere
            usual = share if not isinstance(parameter, DTensor) else _usual(parameter, tensors)
            if parameters and planned + usual > piece_bytes:
                pieces.append(_Piece(part, tuple(parameters), tuple(held), rounded(size)))
                parameters, held, size, planned = [], [], 0, 0.0
            parameters.append(parameter)
            planned += usual
            for tensor in tensors:
                if tensor.numel():
                    held.append(_Held(tensor, size))
                    size += -(-tensor.numel() * tensor.element_size() // LINE) * LINE
    if parameters:
        pieces.append(_Piece(part, tuple(parameters), tuple(held), rounded(size)))
    return pieces


def _usual(parameter: DTensor, tensors: Sequence[torch.Tensor]) -> float:
    """Return the bytes of state that a rank has on average, the same on all ranks."""
    widths = sum(tensor.element_size() for tensor in tensors)
    ranks = 1
    for dimension, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            ranks *= parameter.device_mesh.size(dimension)
    return parameter.numel() / ranks * widths


def _memory_of(state: dict[str, Any]) -> list[torch.Tensor]:
    """Return the plain tensors that hold the state of a parameter, except the count of updates."""
    tensors: list[torch.Tensor] = []
    for name, value in state.items():
        if name != COUNT and isinstance(value, torch.Tensor):
            part: Any = _local(value)
            # torchao's moments: codes and scales; the table of codes is the same for all
            inner = [part.codes, part.scale] if hasattr(part, "codes") else [part]
            tensors += inner
    return tensors


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part itself, not a view of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
