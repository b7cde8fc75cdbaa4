"""The places for inputs of blocks: pinned host memory, and a file on a local disk."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from tidewheel.train.memory.inputs_config import AHEAD_OF_DISK, AHEAD_OF_HOST, BUFFERS
from tidewheel.train.memory.kept_inputs import Kept
from tidewheel.train.memory.scratch_file import DirectFile, Transfer, buffer, rounded
from tidewheel.train.memory.side_stream import Arriving, SideStream


class _Buffer:
    """Host memory for one input.

    Args:
        size: in bytes.
        pinned: for a GPU.
    """

    def __init__(self, size: int, pinned: bool) -> None:
        self.memory = buffer(rounded(size), pinned)
        self.pinned = pinned
        self.users: list[Callable[[], None]] = []
        """Each returns when a transfer from or into this memory is done."""
        self.holds: weakref.ref[Kept] | None = None

    def of(self, kept: Kept) -> torch.Tensor:
        """Return the part that holds an input, with its shape."""
        return self.memory[:kept.bytes].view(kept.dtype).view(kept.shape)

    def pages(self, kept: Kept) -> torch.Tensor:
        """Return the same, in whole `ALIGNMENT`s."""
        return self.memory[:rounded(kept.bytes)]

    def settle(self) -> None:
        """Wait until no transfer uses this memory.

        Raises:
            StorageError: one failed.
        """
        for wait in self.users:
            wait()
        self.users.clear()

    def resize(self, size: int) -> None:
        """Hold at least `size` bytes."""
        if len(self.memory) < size:
            self.memory = buffer(rounded(size), self.pinned)


class HostStore:
    """Keeps a GPU's inputs in pinned host memory.

    Args:
        device: the GPU.
    """

    ahead = AHEAD_OF_HOST

    def __init__(self, device: torch.device) -> None:
        self._copies = SideStream(device)
        self._free: list[_Buffer] = []
        self._held: weakref.WeakKeyDictionary[Kept, _Buffer] = weakref.WeakKeyDictionary()
        self._arriving: weakref.WeakKeyDictionary[Kept, Arriving] = weakref.WeakKeyDictionary()

    def put(self, kept: Kept, x: torch.Tensor) -> None:
        """Begin to copy an input there. One stream copies in both directions, so memory can be used again at once."""
        memory = self._free.pop() if self._free else _Buffer(kept.bytes, pinned=True)
        memory.resize(kept.bytes)
        self._held[kept] = memory
        weakref.finalize(kept, self._free.append, memory).atexit = False
        self._copies.away(kept, x, memory.of(kept))

    def fetch(self, kept: Kept) -> None:
        """Begin to copy an input back."""
        if kept not in self._arriving and self._copies.here(kept) is None:
            self._arriving[kept] = self._copies.back(kept, self._held[kept].of(kept))

    def take(self, kept: Kept) -> torch.Tensor:
        """Return an input on the GPU."""
        if (x := self._copies.here(kept)) is not None:
            return x
        self.fetch(kept)
        return self._copies.arrived(self._arriving.pop(kept))


class _Slot:
    """Space in a file.

    Args:
        place: its first byte.
        size: in bytes.
    """

    def __init__(self, place: int, size: int) -> None:
        self.place, self.size = place, size
        self.written = Transfer(())
        """The last write."""


class DiskStore:
    """Keeps inputs in a file on a local disk, with those that were written last also in host memory.

    The file has no name, so it is gone with the process. It is created by the first input and grows as needed.

    Args:
        folder: on the disk.
        device: whose inputs these are.

    Attributes:
        file: None: there is none yet.
    """

    ahead = AHEAD_OF_DISK

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._copies = SideStream(device) if device.type == "cuda" else None
        self.file: DirectFile | None = None
        self._end, self._used = 0, 0
        self._free: list[_Slot] = []
        self._buffers: list[_Buffer] = []
        self._slots: weakref.WeakKeyDictionary[Kept, _Slot] = weakref.WeakKeyDictionary()
        self._held: weakref.WeakKeyDictionary[Kept, _Buffer] = weakref.WeakKeyDictionary()
        self._reads: weakref.WeakKeyDictionary[Kept, Transfer] = weakref.WeakKeyDictionary()
        self._arriving: weakref.WeakKeyDictionary[Kept, Arriving] = weakref.WeakKeyDictionary()

    def put(self, kept: Kept, x: torch.Tensor) -> None:
        """Begin to write an input.

        Raises:
            StorageError: the disk is full, or an earlier write failed.
        """
        memory, slot = self._buffer(kept), self._slot(rounded(kept.bytes))
        assert self.file is not None
        self._slots[kept] = slot
        weakref.finalize(kept, self._release, slot).atexit = False
        after = None
        if self._copies is None:
            memory.of(kept).copy_(x)
        else:
            after = self._copies.away(kept, x, memory.of(kept)).synchronize
        slot.written = self.file.write(slot.place, memory.pages(kept), after)
        memory.users.append(slot.written.wait)

    def fetch(self, kept: Kept) -> None:
        """Begin to read an input; if it has been read, to copy it to the GPU.

        Raises:
            StorageError: an earlier write failed.
        """
        if self._here(kept) is not None or kept in self._arriving:
            return
        if kept not in self._held:
            memory = self._buffer(kept)
            assert self.file is not None
            self._reads[kept] = self.file.read(self._slots[kept].place, memory.pages(kept))
            memory.users.append(self._reads[kept].wait)
        elif self._copies is not None and (kept not in self._reads or self._reads[kept].done()):
            self._send(kept, self._copies)

    def take(self, kept: Kept) -> torch.Tensor:
        """Return an input on its device.

        Raises:
            StorageError: it cannot be read.
        """
        if (x := self._here(kept)) is not None:
            return x
        self.fetch(kept)
        if kept in self._reads:
            self._reads[kept].wait()
        if self._copies is None:
            return self._held[kept].of(kept).clone()  # the buffer takes others, the graph needs this for a while
        if kept not in self._arriving:
            self._send(kept, self._copies)
        return self._copies.arrived(self._arriving.pop(kept))

    def _here(self, kept: Kept) -> torch.Tensor | None:
        return None if self._copies is None else self._copies.here(kept)

    def _send(self, kept: Kept, copies: SideStream) -> None:
        memory = self._held[kept]
        self._arriving[kept] = copies.back(kept, memory.of(kept))
        memory.users.append(self._arriving[kept].copied.synchronize)

    def _buffer(self, kept: Kept) -> _Buffer:
        """Return a buffer for an input: one whose input is gone, a new one, or the one that was filled first."""
        gone = [memory for memory in self._buffers if memory.holds is not None and memory.holds() is None]
        if gone:
            memory = gone[0]
        elif len(self._buffers) < BUFFERS:
            memory = _Buffer(kept.bytes, pinned=self._copies is not None)
            self._buffers.append(memory)
        else:
            memory = self._buffers[0]
        memory.settle()
        before = None if memory.holds is None else memory.holds()
        if before is not None:
            del self._held[before]
            self._reads.pop(before, None)
        memory.resize(kept.bytes)
        memory.holds = weakref.ref(kept)
        self._held[kept] = memory
        self._buffers.remove(memory)
        self._buffers.append(memory)
        return memory

    def _slot(self, size: int) -> _Slot:
        """Return space for an input, in which no write is under way.

        Args:
            size: in bytes, a multiple of `ALIGNMENT`.
        """
        fitting = [slot for slot in self._free if slot.size >= size]
        if fitting:
            slot = min(fitting, key=lambda slot: slot.size)
            self._free.remove(slot)
            slot.written.wait()
        else:
            if not self._used:  # longer rows than before: divide the file anew
                for free in self._free:
                    free.written.wait()
                self._free.clear()
                self._end = 0
            slot = _Slot(self._end, size)
            if self.file is None:
                self.file = DirectFile(self._folder, size)
            self.file.grow(slot.place + size)
            self._end += size
        self._used += 1
        return slot

    def _release(self, slot: _Slot) -> None:
        self._used -= 1
        self._free.append(slot)

