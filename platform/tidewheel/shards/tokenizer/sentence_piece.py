"""SentencePiece models. They normalise text as they did in training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from tidewheel.errors import InputError
from tidewheel.shards.tokenizer.encoder import Encoder, batches, piece_bytes


class SentencePiece(Encoder):
    """Encoder of a SentencePiece `.model`; its control symbols ("</s>") in a text are plain text."""

    format = "sentencepiece"
    file = "tokenizer.model"

    def _open(self) -> tuple[dict[str, int], int]:
        self._model = _load(self.data)
        size = self._model.get_piece_size()
        special = {self._model.id_to_piece(token_id): token_id
                   for token_id in range(size) if self._model.is_control(token_id)}
        return special, size

    def _own_mark(self, kind: str) -> int | None:
        token_id = {"bos": self._model.bos_id, "eos": self._model.eos_id, "pad": self._model.pad_id}[kind]()
        return token_id if token_id >= 0 else None

    def encode_plain(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        lengths, parts = np.zeros(len(texts) + 1, np.int64), [np.zeros(0, np.uint32)]
        for first, batch in batches(texts):
            encoded = self._model.encode(batch, num_threads=-1)
            sizes = [len(ids) for ids in encoded]
            lengths[first + 1 : first + 1 + len(sizes)] = sizes
            parts.append(np.fromiter(chain.from_iterable(encoded), np.uint32, sum(sizes)))
        return np.concatenate(parts), np.cumsum(lengths)

    def _token_bytes(self) -> Iterable[tuple[int, int]]:
        model = self._model
        return ((token, piece_bytes(model.id_to_piece(token))) for token in range(self.vocabulary_size)
                if not (model.is_control(token) or model.is_unknown(token) or model.is_unused(token)))

    def decode(self, tokens: np.ndarray | Sequence[int]) -> str:
        known = [int(token) for token in tokens if int(token) < self.vocabulary_size]
        return self._model.decode([token for token in known if not self._model.is_control(token)])


def _load(data: bytes) -> Any:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise InputError("this is a SentencePiece model, and the package that reads it is missing", where="tokenizer",
                         fix="pip install 'tidewheel[tokenizers]'") from None
    model = SentencePieceProcessor()
    try:
        model.load_from_serialized_proto(data)
        size = model.get_piece_size()
    except (RuntimeError, ValueError, TypeError) as error:
        raise InputError(f"neither a tokenizer.json nor a SentencePiece model nor a tiktoken file "
                         f"({str(error).splitlines()[0][:150] if str(error) else type(error).__name__})",
                         where="tokenizer", fix="give the file that the tokenizer's library wrote") from None
    if size < 1:
        raise InputError("a SentencePiece model without pieces", where="tokenizer", fix="give another file")
    return model
