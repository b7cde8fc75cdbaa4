"""The most likely tokens of a teacher at each position of packed sequences, made once and durably; see `columns`."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from tidewheel import storage
from tidewheel.errors import ConfigError
from tidewheel.inference import columns
from tidewheel.inference.columns import ColumnKind, FrozenModel, Made, Progress
from tidewheel.shards.columns import SHOWN, Head
from tidewheel.shards.manifest import Manifest, ShardInfo
from tidewheel.shards.reader import ShardSet
from tidewheel.shards.teachers import ROWS, VERSION, schema
from tidewheel.storage import Stamp, Writer
from tidewheel.train.distillation.divergences import top_and_rest
from tidewheel.train.objective import Outputs
from tidewheel.train.step import MicroBatch

CHUNK_TOKENS = 1024
"""Tokens whose logits are in memory at once."""


class TeacherKind(ColumnKind[ShardSet]):
    """K most likely tokens at each position, and the log-probabilities of these and of all others together.

    Args:
        model: the teacher.
        top_k: K.
        temperature: by which logits are divided.

    Raises:
        ConfigError: the model has no more tokens than K.
    """

    def __init__(self, model: FrozenModel, top_k: int, temperature: float) -> None:
        if not 0 < top_k < model.vocabulary_size:
            raise ConfigError(f"top_k {top_k} of a vocabulary of {model.vocabulary_size} tokens", where="--top-k",
                              fix=f"give a number from 1 to {model.vocabulary_size - 1}")
        self._model, self._top_k, self._temperature = model, top_k, float(temperature)

    def folder(self) -> str:
        """Return the name of the folder of the columns."""
        return f"{self._model.digest[:SHOWN]}-k{self._top_k}-t{self._temperature!r}"

    def enough(self, head: Head) -> bool:
        return (head.top_k, head.temperature, head.version, head.precision) == (
            self._top_k, self._temperature, VERSION.number, self._model.precision)

    def head(self, manifest: Manifest, files: tuple[Stamp, ...]) -> Head:
        model = self._model
        return Head(manifest.hash, model.digest, model.checkpoint, model.precision, VERSION.number, files,
                    top_k=self._top_k, temperature=self._temperature, vocabulary_size=model.vocabulary_size)

    def beginning(self, info: ShardInfo) -> str:
        name = info.name.removesuffix(".arrow")
        return f"{name}-{self._model.precision}-k{self._top_k}-t{self._temperature!r}-v{VERSION.number}-"

    def ending(self) -> str:
        return ".arrow"

    def open(self, uri: str, manifest: Manifest) -> ShardSet:
        return ShardSet.open(uri, manifest=manifest)

    def write(self, opened: ShardSet, index: int, sink: Writer) -> None:
        manifest, count = opened.manifest, opened.manifest.shards[index].rows
        of_file = schema(manifest.sequence_length, self._top_k, manifest.token_dtype)
        with pa.ipc.new_file(sink, of_file) as writer:
            for rows in np.split(np.arange(count), range(ROWS, count, ROWS)):
                found = self._model.compute(opened.rows(np.full(len(rows), index), rows), self._most_likely)
                tokens, values = found.cpu().split((self._top_k, self._top_k + 1), dim=-1)
                flat = (tokens.numpy().astype(manifest.token_dtype).ravel(), values.float().numpy().ravel())
                arrays = [pa.FixedSizeListArray.from_arrays(pa.array(part), field.type.list_size)
                          for part, field in zip(flat, of_file)]
                writer.write_batch(pa.record_batch(arrays, schema=of_file))

    def _most_likely(self, outputs: Outputs, micro: MicroBatch) -> torch.Tensor:
        """Return the tokens and the log-probabilities, fp64 [B, L, 2 K + 1], which holds both exactly."""
        parts = []
        for hidden in outputs.hidden.flatten(0, 1).split(CHUNK_TOKENS):
            logits = outputs.make_logits(hidden[None])[0]
            top = logits.topk(self._top_k, dim=1).indices
            parts.append(torch.cat((top.double(), top_and_rest(logits, top, self._temperature).double()), dim=1))
        return torch.cat(parts).view(*micro.tokens.shape, -1)


def make(model: FrozenModel, sets: list[str], output: str, *, top_k: int, temperature: float = 1.0,
         on_progress: Progress = lambda done, total: None) -> Made:
    """Make the columns of some packed sets under one teacher. What exists is kept.

    Args:
        model: the teacher.
        sets: URIs of sets of packed sequences.
        output: folder; the columns are below it, in a folder named by the model's digest, `top_k` and `temperature`.
        top_k: number of most likely tokens of each position.
        temperature: by which logits are divided.
        on_progress: called with the rows done so far and their total.

    Raises:
        ConfigError: the model has fewer tokens than a set or than `top_k`, or another tokenizer.
        ShardError: a set is missing or damaged, or not of packed sequences.
    """
    kind = TeacherKind(model, top_k, temperature)
    return columns.make(model, kind, sets, storage.join(output, kind.folder()), on_progress)
