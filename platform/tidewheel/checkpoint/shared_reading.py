"""Read a checkpoint once for several ranks: each file by one rank, which hashes it and passes it on piece by piece.

Ranks handle the pieces in one order, so that none waits for another in a circle. A rank that fails goes on passing
pieces on, and says so at the end. If one dies, its connections close and the others fail too: nobody hangs.
"""

from __future__ import annotations

import contextlib
import contextvars
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from blake3 import blake3

from tidewheel.checkpoint.agreement import own_box
from tidewheel.checkpoint.filling import Request
from tidewheel.checkpoint.manifest import CheckpointManifest
from tidewheel.checkpoint.peers import Peers
from tidewheel.checkpoint.pieces import OverlappingParts, Piece, blank, pieces_of
from tidewheel.checkpoint.read_plan import Hop, Needs, Scope, Stream, covers, hop, plan, ranges_of
from tidewheel.checkpoint.reading import read_bytes
from tidewheel.checkpoint.staging import local
from tidewheel.checkpoint.verify import damage
from tidewheel.errors import CheckpointError, StorageError
from tidewheel.storage import Store, content_hash

AHEAD = 6
"""Pieces that a rank reads ahead. With the ones that it receives and sends, it holds at most two more."""


@dataclass(frozen=True)
class Sharing:
    """How the workers of a run share reads of a checkpoint in storage."""

    scope: Scope = "all"
    node: str = field(default_factory=socket.gethostname)
    """Name of this worker's node."""


class _Item(NamedTuple):
    """One piece that this rank has a part in. Ranks handle items in ascending order of (piece, stream)."""

    piece: int
    stream: int


def read_shared(store: Store, name: str, manifest: CheckpointManifest, flat: Mapping[str, torch.Tensor], peers: Peers,
                sharing: Sharing) -> list[str] | None:
    """Fill this rank's part of each tensor in place, and compare the hash of every file; all ranks call this together.

    Until the result is known, the tensors hold bytes that nobody has verified.

    Args:
        store: the run's `checkpoints` folder.
        name: the checkpoint.
        manifest: its manifest, which has every tensor in its shape.
        flat: tensors by path, see `staging.flatten`; converted from the dtypes of the checkpoint.
        peers: the ranks, more than one.
        sharing: who shares reads.

    Returns:
        a line for each damaged file, the same on all ranks; None: nothing was read, because the files cannot be cut.

    Raises:
        CheckpointError: a rank cannot use what it received.
        StorageError: the store does not answer, which says nothing about the files.
        RuntimeError: another rank is gone, or the generation has ended.
    """
    cutter = _Cutter(manifest)
    own: Needs = {}
    try:
        own = _needs(manifest, flat, cutter)
        # equal tables, as of ranks that have everything, are sent once
        digest: str | Exception = content_hash(repr(sorted(own.items())).encode())
    except (CheckpointError, OverlappingParts) as error:  # the other ranks wait for this rank's answer
        digest = error
    nodes, digests = zip(*peers.all((sharing.node, digest)))
    errors = [answer for answer in digests if isinstance(answer, Exception)]
    damaged = [answer for answer in errors if isinstance(answer, CheckpointError)]
    if damaged:
        raise damaged[0]
    if errors:
        return None
    needs = [own] * peers.size if len(set(digests)) == 1 else peers.all(own)
    streams = plan([file.bytes for file in manifest.files], needs, nodes, sharing.scope)
    exchange = _Exchange(store, name, manifest, flat, peers, nodes, streams, cutter)
    exchange.run()
    problems: list[str] = []
    for lines, failure in peers.all((exchange.problems, exchange.error)):
        if failure is not None:
            raise failure
        problems += lines
    return list(dict.fromkeys(problems))  # several nodes may have read one file


class _Cutter:
    """The pieces of the files that this rank reads or needs."""

    def __init__(self, manifest: CheckpointManifest) -> None:
        self._manifest = manifest
        self._known: dict[int, list[Piece]] = {}

    def pieces(self, file: int) -> list[Piece]:
        """Return the pieces of a file."""
        if file not in self._known:
            self._known[file] = pieces_of(self._manifest, file)
        return self._known[file]

    def of(self, stream: Stream) -> list[Piece]:
        """Return the pieces of a stream. One that nobody needs is only hashed, so its parts do not matter."""
        if stream.needed_by:
            return self.pieces(stream.file)
        return blank(0, self._manifest.files[stream.file].bytes)


def _needs(manifest: CheckpointManifest, flat: Mapping[str, torch.Tensor], cutter: _Cutter) -> Needs:
    """Return which pieces this rank needs."""
    boxes = {path: own_box(tensor) for path, tensor in flat.items()}
    files = {chunk.file for path, box in boxes.items() for chunk in manifest.chunks(path, box)}
    needs: Needs = {}
    for file in sorted(files):
        needs[file] = ranges_of([
            index for index, piece in enumerate(cutter.pieces(file))
            if any(part.name in boxes and part.box.common(boxes[part.name]) is not None for part in piece.parts)])
    return needs


class _Exchange:
    """Reads, receives, passes on and uses the pieces of one rank."""

    def __init__(self, store: Store, name: str, manifest: CheckpointManifest, flat: Mapping[str, torch.Tensor],
                 peers: Peers, nodes: Sequence[str], streams: Sequence[Stream], cutter: _Cutter) -> None:
        self._store, self._name, self._manifest, self._flat = store, name, manifest, flat
        self._peers, self._nodes, self._streams, self._cutter = peers, nodes, streams, cutter
        self._hops: dict[tuple[int, tuple[int, ...]], Hop] = {}
        self._hashes: dict[int, Any] = {}
        self._damaged: dict[int, str] = {}
        self.error: Exception | None = None
        """The first error that is not damage."""

    @property
    def problems(self) -> list[str]:
        """A line for each damaged file that this rank has read."""
        return [f"{self._manifest.files[file].key}: {problem}" for file, problem in sorted(self._damaged.items())]

    def run(self) -> None:
        """Handle all pieces that this rank has a part in."""
        items = sorted(self._items())
        reads = _ReadAhead(self._read, [item for item in items if self._reads(item)])
        with contextlib.closing(reads):
            for item in items:
                self._handle(item, reads)
        for file, digest in self._hashes.items():
            if file not in self._damaged and f"blake3-{digest.hexdigest()}" != self._manifest.files[file].hash:
                self._damaged[file] = "hash differs: the content has changed"

    def _items(self) -> Iterator[_Item]:
        rank = self._peers.rank
        for number, stream in enumerate(self._streams):
            if stream.reader == rank:
                self._hashes[stream.file] = blake3()
                yield from (_Item(piece, number) for piece in range(len(self._cutter.of(stream))))
            else:
                yield from (_Item(piece, number) for first, last in stream.needed_by.get(rank, ())
                            for piece in range(first, last))

    def _reads(self, item: _Item) -> bool:
        return self._streams[item.stream].reader == self._peers.rank

    def _handle(self, item: _Item, reads: _ReadAhead) -> None:
        stream = self._streams[item.stream]
        piece = self._cutter.of(stream)[item.piece]
        way = self._hop(stream, item.piece)
        if way.source is None:
            data = self._take(stream.file, piece, reads.next())
        else:
            data = torch.empty(piece.bytes, dtype=torch.uint8)
            dist.recv(data, group=self._peers.group, group_src=way.source)
        sent = [dist.isend(data, group=self._peers.group, group_dst=target) for target in way.targets]
        if self.error is None and covers(stream.needed_by.get(self._peers.rank, ()), item.piece):
            try:
                self._fill(piece, data)
            except Exception as error:  # the other ranks wait for what this one passes on
                self.error = CheckpointError(f"cannot be used: {type(error).__name__}: {error}",
                                             where=self._store.at(self._name), fix="start again")
        for work in sent:
            if work is not None:
                work.wait()

    def _hop(self, stream: Stream, piece: int) -> Hop:
        receivers = stream.receivers(piece)
        key = stream.reader, receivers
        if key not in self._hops:
            self._hops[key] = hop(self._peers.rank, stream.reader, receivers, self._nodes)
        return self._hops[key]

    def _read(self, item: _Item) -> torch.Tensor:
        """Return a piece as the store has it: uint8 [bytes]. A thread of its own calls this."""
        stream = self._streams[item.stream]
        file = self._manifest.files[stream.file]
        key = f"{self._name}/{file.key}"
        piece = self._cutter.of(stream)[item.piece]
        if not item.piece and (size := self._store.size(key)) != file.bytes:
            raise CheckpointError(f"{size} bytes, expected {file.bytes}", where=self._store.at(key), fix="none")
        return read_bytes(self._store, key, piece.start, piece.bytes)

    def _take(self, file: int, piece: Piece, read: Future[torch.Tensor]) -> torch.Tensor:
        """Return a piece that was read, or zeros in its place if it cannot be read."""
        try:
            data = read.result()
        except FileNotFoundError:
            self._damaged[file] = "missing"
        except CheckpointError as error:
            self._damaged.setdefault(file, error.what)
        except StorageError as error:
            try:
                self._damaged.setdefault(file, damage(self._store, error))
            except StorageError as away:
                self.error = self.error or away
        except Exception as error:  # the other ranks wait for the piece
            self.error = self.error or error
        else:
            self._hashes[file].update(data.numpy())
            return data
        return torch.zeros(piece.bytes, dtype=torch.uint8)

    def _fill(self, piece: Piece, data: torch.Tensor) -> None:
        for part in piece.parts:
            tensor = self._flat.get(part.name)
            if tensor is None:
                continue
            dtype = getattr(torch, self._manifest.tensors[part.name].dtype)
            request = Request.of(local(tensor), own_box(tensor), part.box, dtype, part.start - piece.start)
            if request is not None:
                request.fill(data[request.start:request.end])


class _ReadAhead:
    """Reads pieces in threads, a few ahead of the one that is used next."""

    def __init__(self, read: Callable[[_Item], torch.Tensor], items: Sequence[_Item]) -> None:
        self._read = read
        self._left = deque(items)
        self._started: deque[Future[torch.Tensor]] = deque()
        self._pool = ThreadPoolExecutor(AHEAD, thread_name_prefix="checkpoint")
        for _ in range(AHEAD):
            self._start()

    def _start(self) -> None:
        if self._left:  # in this thread's context, which has the time limit of its work
            self._started.append(self._pool.submit(contextvars.copy_context().run, self._read, self._left.popleft()))

    def next(self) -> Future[torch.Tensor]:
        """Return the next piece's read, once it is done, and start another."""
        future = self._started.popleft()
        future.exception()
        self._start()
        return future

    def close(self) -> None:
        """Start no more reads; those under way end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)
