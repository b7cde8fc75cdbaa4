"""Log-probabilities of a preference set's answers under a reference model, made once and durably; see `columns`."""

from __future__ import annotations

import numpy as np

from tidewheel import storage
from tidewheel.inference import columns
from tidewheel.inference.columns import ColumnKind, FrozenModel, Made, Progress
from tidewheel.shards.columns import SHOWN, Head
from tidewheel.shards.manifest import PARTS, WITH_MISMATCHED, Manifest, ShardInfo
from tidewheel.shards.opened import Rows
from tidewheel.shards.pairs import PairSet
from tidewheel.shards.references import VERSION, as_bytes
from tidewheel.storage import Stamp, Writer
from tidewheel.train.length_groups import cut, longest, padded_length
from tidewheel.train.preferences.log_probabilities import answers

CHUNK_TOKENS = 1024
"""Tokens whose logits are in memory at once."""
PAIRS = 8
"""Pairs computed together."""
PADDED = 64
"""Their rows are padded to a multiple of this many tokens."""


class ReferenceModel(FrozenModel):
    """A model whose log-probabilities of answers are computed; see `FrozenModel`."""

    def log_probabilities(self, rows: Rows) -> np.ndarray:
        """Return the log-probabilities of the answers of B rows of pairs, fp32 [B, parts]."""
        rows = cut(rows, slice(None), padded_length(longest(rows), PADDED, rows.width))
        found = self.compute(rows, lambda outputs, micro: answers(outputs, micro, CHUNK_TOKENS).sums)
        return found.float().cpu().numpy()


class ReferenceKind(ColumnKind[PairSet]):
    """Log-probabilities of the answers of pairs, fp32 [rows, parts].

    Args:
        model: the reference model.
        parts: sequences of each pair; a row of an unpaired set has one fewer.
    """

    def __init__(self, model: ReferenceModel, parts: int) -> None:
        self._model, self._most = model, parts
        self._parts = parts

    def enough(self, head: Head) -> bool:
        return head.parts >= self._parts and head.version == VERSION.number and head.precision == self._model.precision

    def head(self, manifest: Manifest, files: tuple[Stamp, ...]) -> Head:
        model = self._model
        return Head(manifest.hash, model.digest, model.checkpoint, model.precision, VERSION.number, files, self._parts)

    def beginning(self, info: ShardInfo) -> str:
        return f"{info.name.removesuffix('.arrow')}-{self._model.precision}-{self._parts}-v{VERSION.number}-"

    def ending(self) -> str:
        return ".f32"

    def begin(self, manifest: Manifest) -> None:
        self._parts = self._most - manifest.unpaired

    def open(self, uri: str, manifest: Manifest) -> PairSet:
        return PairSet.open(uri, manifest=manifest).reading(self._most)

    def write(self, opened: PairSet, index: int, sink: Writer) -> None:
        count = opened.manifest.shards[index].rows
        for rows in np.split(np.arange(count), range(PAIRS, count, PAIRS)):
            sink.write(as_bytes(self._model.log_probabilities(opened.rows(np.full(len(rows), index), rows))))


def make(model: ReferenceModel, sets: list[str], output: str, *, mismatched: bool = False,
         on_progress: Progress = lambda done, total: None) -> Made:
    """Make the columns of some preference sets under one model. What exists is kept.

    Args:
        model: the reference model.
        sets: URIs of preference sets.
        output: folder; the columns are below it, in a folder with the model's digest as its name.
        mismatched: add the log-probabilities of mismatched answers, which KTO needs.
        on_progress: called with the pairs done so far and their total.

    Raises:
        ConfigError: the model has fewer tokens than a set, or another tokenizer.
        ShardError: a set is missing or damaged, or both answers of a pair are equal.
    """
    kind = ReferenceKind(model, WITH_MISMATCHED if mismatched else PARTS)
    return columns.make(model, kind, sets, storage.join(output, model.digest[:SHOWN]), on_progress)
