"""Make columns of shard sets with a frozen model, once and durably.

Each shard's values are a file of their own, whose name holds its content's hash. A command that was killed finds the
files that are whole, and computes only the others. Neighbouring rows of a shard are computed together, always the same
ones, so the bytes depend on nothing but the model, the set, the precision and the machine's arithmetic.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from tidewheel import storage
from tidewheel.checkpoint import conversion, tokenizer_files
from tidewheel.checkpoint.digest import digest
from tidewheel.checkpoint.manifest import read_manifest as read_checkpoint
from tidewheel.checkpoint.verify import locate
from tidewheel.errors import ConfigError
from tidewheel.models.decoder import Decoder
from tidewheel.shards.columns import Head, folder_of, read_head, write_head
from tidewheel.shards.manifest import Manifest, ShardInfo, read_manifest
from tidewheel.shards.opened import OpenedSet, Rows
from tidewheel.storage import CHUNK_BYTES, HashingWriter, Stamp, Store, Writer
from tidewheel.train.batches import joint_batch
from tidewheel.train.local_device import local_device
from tidewheel.train.objective import Outputs
from tidewheel.train.precision import Precision, fp32_products, precision_context
from tidewheel.train.step import MicroBatch

logger = logging.getLogger(__name__)
IN_MEMORY = 64 << 20
"""Bytes of a file that are held in memory; a larger one is in a temporary file until it is published."""
Opened = TypeVar("Opened", bound=OpenedSet)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Made:
    """What `make` did."""

    uri: str
    """Folder of the model's columns: what `data.reference` or `data.teacher` is to be."""
    rows: int
    """Rows of all sets."""
    computed: int
    """Rows computed now; the others were there."""


class FrozenModel:
    """A decoder with frozen weights on one device.

    Args:
        uri: a run, or one of its checkpoints.
        device: default: the first GPU if there is one, else the CPU.
        precision: type of the matrix products.

    Attributes:
        checkpoint: URI of the checkpoint.
        digest: SHA-256 of its parameters.
        tokenizer: hash of its tokenizer's file; "" if it is not known.

    Raises:
        CheckpointError: there is no complete checkpoint, it is damaged, or it is not of a decoder.
    """

    def __init__(self, uri: str, *, device: str = "", precision: Precision = "fp32") -> None:
        run, checkpoints, name = locate(uri)
        manifest = read_checkpoint(checkpoints, name)
        config, self.vocabulary_size = conversion.model_of(manifest, checkpoints.at(name))
        self.checkpoint, self.digest = checkpoints.at(name), digest(checkpoints.at(name)).groups["model"]
        self.tokenizer = tokenizer_files.hash_of_run(run)
        with torch.device("meta"):
            self._model = Decoder(config, self.vocabulary_size)
        names = [parameter for parameter, _ in self._model.named_parameters()]
        self._model.load_state_dict(conversion.read_weights(checkpoints, name, manifest, names), assign=True)
        self._device, self.precision = local_device(device), precision
        self._model.to(self._device).requires_grad_(False)

    @torch.no_grad()
    def compute(self, rows: Rows, of: Callable[[Outputs, MicroBatch], torch.Tensor]) -> torch.Tensor:
        """Return a function of the model's outputs for some rows."""
        micro = joint_batch(rows, slice(None), 0, self._device)
        with precision_context(self._device, self.precision), fp32_products(self._device, False):
            result: torch.Tensor = self._model(
                micro.tokens, micro.positions, micro.segment_ids, micro.targets,
                lambda hidden, make_logits: of(Outputs(hidden, make_logits), micro), micro.documents)
            return result


class ColumnKind(Generic[Opened]):
    """A kind of column: which files it has, and how they are computed. A column of a model has one kind."""

    def begin(self, manifest: Manifest) -> None:
        """Begin with the set that has this manifest."""

    def enough(self, head: Head) -> bool:
        """Return whether a complete column has what this one would have."""
        raise NotImplementedError

    def head(self, manifest: Manifest, files: tuple[Stamp, ...]) -> Head:
        """Return the head of a column of the set with this manifest."""
        raise NotImplementedError

    def beginning(self, info: ShardInfo) -> str:
        """Return the name of a shard's file up to the hash of its content."""
        raise NotImplementedError

    def ending(self) -> str:
        """Return the end of the names."""
        raise NotImplementedError

    def open(self, uri: str, manifest: Manifest) -> Opened:
        """Open a set for reading."""
        raise NotImplementedError

    def write(self, opened: Opened, index: int, sink: Writer) -> None:
        """Write the content of a shard's file.

        Args:
            opened: the set.
            index: of the shard.
            sink: takes the bytes.
        """
        raise NotImplementedError


def make(model: FrozenModel, kind: ColumnKind[Opened], sets: list[str], folder: str,
         on_progress: Progress = lambda done, total: None) -> Made:
    """Make the columns of some sets under one model. What exists is kept.

    Args:
        model: the model.
        kind: of the columns.
        sets: URIs of shard sets.
        folder: of the model's columns.
        on_progress: called with the rows done so far and their total.

    Raises:
        ConfigError: the model has fewer tokens than a set, or another tokenizer.
        ShardError: a set is missing or damaged, or of another kind than the column needs.
    """
    manifests = {uri: read_manifest(storage.store(uri)) for uri in sets}
    total, done, computed = sum(manifest.rows for manifest in manifests.values()), 0, 0
    for uri, manifest in manifests.items():
        _fits(model, uri, manifest)
        kind.begin(manifest)
        target = storage.store(folder_of(folder, manifest))
        head = read_head(target)
        if head is not None and kind.enough(head):
            done += manifest.rows
            on_progress(done, total)
            continue
        files = []
        for stamp, new in _files(kind, kind.open(uri, manifest), target):
            files.append(stamp)
            rows = manifest.shards[len(files) - 1].rows
            done += rows
            computed += rows if new else 0
            on_progress(done, total)
        write_head(target, kind.head(manifest, tuple(files)))
        logger.info("wrote the columns of %s to %s", uri, target.uri)
    return Made(storage.store(folder).uri, total, computed)


def _fits(model: FrozenModel, uri: str, manifest: Manifest) -> None:
    if manifest.vocabulary_size > model.vocabulary_size:
        raise ConfigError(f"the set has a vocabulary of {manifest.vocabulary_size}, the model of "
                          f"{model.vocabulary_size}", where=uri, fix="give a model of the set's tokenizer")
    if model.tokenizer and model.tokenizer != manifest.tokenizer["hash"]:
        raise ConfigError(f"the set was made with the tokenizer {manifest.tokenizer['hash'][:23]}, the model "
                          f"{model.checkpoint} with {model.tokenizer[:23]}", where=uri,
                          fix="give a model of the set's tokenizer, or tokenize the set with the model's")


def _files(kind: ColumnKind[Opened], opened: Opened, target: Store) -> Iterator[tuple[Stamp, bool]]:
    """Yield each shard's file, and whether it was computed now."""
    present = [entry.key for entry in target.list()]
    for index, info in enumerate(opened.manifest.shards):
        beginning = kind.beginning(info)
        whole = [key for key in present if key.startswith(beginning) and _is_whole(target, key, kind, beginning)]
        if whole:
            yield Stamp(whole[0], target.size(whole[0]), target.hash(whole[0])), False
        else:
            yield _written(kind, opened, index, target, beginning), True
    opened.close()


def _is_whole(target: Store, key: str, kind: ColumnKind[Opened], beginning: str) -> bool:
    """Return whether the content of a file is what its name says."""
    return key == _key(beginning, target.hash(key), kind)


def _written(kind: ColumnKind[Opened], opened: Opened, index: int, target: Store, beginning: str) -> Stamp:
    """Compute a shard's file and publish it under its hash."""
    with tempfile.SpooledTemporaryFile(IN_MEMORY) as spool:
        hashing = HashingWriter("", spool)
        kind.write(opened, index, hashing)
        opened.settle()  # nothing is published that was computed from a damaged shard
        spool.seek(0)
        with target.writer(_key(beginning, hashing.stamp.hash, kind)) as sink:
            while chunk := spool.read(CHUNK_BYTES):
                sink.write(chunk)
        return sink.stamp


def _key(beginning: str, digest: str, kind: ColumnKind[Opened]) -> str:
    """Return the name of a shard's file, which holds the hash of its content."""
    return f"{beginning}{digest.removeprefix('blake3-')[:32]}{kind.ending()}"
