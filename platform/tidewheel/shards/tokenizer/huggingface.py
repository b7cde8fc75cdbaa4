"""tokenizer.json files, read by Hugging Face `tokenizers`."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tidewheel.errors import InputError
from tidewheel.shards.tokenizer.encoder import Encoder, batches, piece_bytes


class HuggingFace(Encoder):
    """Encoder of a tokenizer.json."""

    format = "huggingface"
    file = "tokenizer.json"

    def _open(self) -> tuple[dict[str, int], int]:
        self._tokenizer = self._parse()
        # "<|endoftext|>" inside a document is plain text: only the policy may end a document
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: token_id for token_id, token in sorted(added.items()) if token.special}
        return special, max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def _id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(name)  # also a token that is in the vocabulary without being marked special

    def _parse(self) -> Any:
        from tokenizers import Tokenizer

        try:
            json.loads(self.data)
            tokenizer = Tokenizer.from_str(self.data.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"not a tokenizer.json ({str(error)[:200]})", where="tokenizer",
                             fix="give the tokenizer.json file of a Hugging Face fast tokenizer") from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    @cached_property
    def with_control_tokens(self) -> Any:
        """Return a `tokenizers.Tokenizer` that interprets special tokens in a text; for chat templates only."""
        tokenizer = self._parse()
        tokenizer.encode_special_tokens = False
        return tokenizer

    @property
    def as_text(self) -> Any:
        """A `tokenizers.Tokenizer` that encodes special tokens in a text as plain text."""
        return self._tokenizer

    def encode_plain(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        parts = array("I")  # converts a list of ints twice as fast as numpy
        lengths = np.zeros(len(texts) + 1, np.int64)
        for first, batch in batches(texts):
            encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            for index, encoding in enumerate(encodings, first + 1):
                parts.fromlist(encoding.ids)
                lengths[index] = len(encoding)
        return np.frombuffer(parts, np.uint32) if parts else np.zeros(0, np.uint32), np.cumsum(lengths)

    def _token_bytes(self) -> Iterable[tuple[int, int]]:
        added = self._tokenizer.get_added_tokens_decoder()
        byte_level = '"ByteLevel"' in json.dumps(json.loads(self.data).get("decoder") or {})
        for piece, token in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if token in added:
                yield token, 0 if added[token].special else len(piece.encode())
            elif byte_level:
                yield token, len(piece)  # each character is spelled for one byte
            else:
                yield token, piece_bytes(piece.removeprefix("##"))

    def decode(self, tokens: np.ndarray | Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)
