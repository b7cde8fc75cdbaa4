"""What every tokenizer here can do: a batch of texts to one flat array of tokens, and tokens back to text.

Text is only ever text: a special token spelled out in a document ("<|endoftext|>") is encoded as the characters it is
written with. Control tokens come from the policy (BOS, EOS) and from chat templates alone.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np

from tidewheel.errors import InputError
from tidewheel.shards.manifest import VOCABULARY_MULTIPLE

Policy = Literal["none", "document"]
_BOS_NAMES = ("<|bos|>", "<|begin_of_text|>", "<bos>", "<s>", "[BOS]", "<|startoftext|>")
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|eos|>", "<eos>", "</s>", "[EOS]")
_PAD_NAMES = ("<|pad|>", "<pad>", "<|finetune_right_pad_id|>", "[PAD]")
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 512, 2 << 20


def batches(texts: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """(place of the first, texts) of batches for one call of a library, so that memory stays bounded: what libraries
    give back takes more than a hundred bytes a token. A longer text is a batch of its own."""
    first, size, batch = 0, 0, list[str]()
    for place, text in enumerate(texts):
        text = str(text)
        if batch and (len(batch) == _BATCH_DOCUMENTS or size + len(text) > _BATCH_CHARACTERS):
            yield first, batch
            first, size, batch = place, 0, []
        batch.append(text)
        size += len(text)
    if batch:
        yield first, batch


@dataclass(frozen=True)
class Settings:
    """What a tokenizer's file leaves open. With the file's bytes they make the encoder, wherever it is needed.

    Args:
        bos, eos: "document" puts the token before or behind each document.
        bos_token, eos_token, pad_token: their names (or ids), where the usual ones do not fit.
        vocabulary_multiple: the vocabulary is padded to a multiple of this, for tensor cores.
        encoding: of a tiktoken file: whose pattern and special tokens it goes with ("gpt2", "cl100k_base", ...).
        pattern: of a tiktoken file: the regular expression that cuts text before merging, instead of `encoding`.
        special_tokens: of a tiktoken file: names and ids of the special tokens, beside those of `encoding`.
    """

    bos: Policy = "none"
    eos: Policy = "document"
    bos_token: str | int | None = None
    eos_token: str | int | None = None
    pad_token: str | int | None = None
    vocabulary_multiple: int = VOCABULARY_MULTIPLE
    encoding: str | None = None
    pattern: str | None = None
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    def canonical(self) -> dict[str, Any]:
        """JSON values of what differs from the defaults."""
        default = asdict(Settings())
        return {name: value for name, value in asdict(self).items() if value != default[name]}


class Encoder(ABC):
    """A tokenizer with its policy; picklable by its file's bytes and settings.

    Attributes: settings; special (name -> id of every special token); vocabulary_size (largest id + 1); padded_size
    (next multiple of `settings.vocabulary_multiple`); bos (None where the tokenizer has none), eos and pad (ids; pad
    is eos where the tokenizer has none).

    Raises:
        InputError: the bytes are no such file, or a token that the settings ask for is not there.
    """

    format: ClassVar[str]
    file: ClassVar[str]
    """Name of the file in a shard set."""

    def __init__(self, data: bytes, settings: Settings) -> None:
        self.data, self.settings = bytes(data), settings
        self.special, size = self._open()
        self.vocabulary_size = size
        self.padded_size = -(-size // settings.vocabulary_multiple) * settings.vocabulary_multiple
        self.bos = self._mark("bos", _BOS_NAMES)
        eos = self._mark("eos", _EOS_NAMES)
        if self.bos is None and settings.bos == "document":
            raise InputError(f"the tokenizer has no begin-of-text token; looked for {', '.join(_BOS_NAMES)}",
                             where="tokenizer", mend="name it with tokenize.bos_token, or set tokenize.bos to none")
        if eos is None:
            raise InputError(f"the tokenizer has no end-of-text token; looked for {', '.join(_EOS_NAMES)}",
                             where="tokenizer", mend="name it with tokenize.eos_token, or add one of these as a "
                                                     "special token")
        self.eos: int = eos
        pad = self._mark("pad", _PAD_NAMES)
        self.pad: int = eos if pad is None else pad

    def __reduce__(self) -> tuple[type[Encoder], tuple[bytes, Settings]]:
        return type(self), (self.data, self.settings)

    def _mark(self, kind: Literal["bos", "eos", "pad"], names: Sequence[str]) -> int | None:
        """Id of the BOS, EOS or padding token: the one of the settings, of the file, or of the usual names."""
        wanted = {"bos": self.settings.bos_token, "eos": self.settings.eos_token, "pad": self.settings.pad_token}[kind]
        if wanted is None:
            own = self._own_mark(kind)
            found = (self._id(name) for name in names)
            return own if own is not None else next((number for number in found if number is not None), None)
        known = wanted if isinstance(wanted, int) else self._id(wanted)
        if known is None or not 0 <= known < self.vocabulary_size:
            raise InputError(f"the tokenizer has no token {wanted!r}", where="tokenizer",
                             mend=f"correct tokenize.{kind}_token; there are: {', '.join(list(self.special)[:12])}")
        return known

    def _id(self, name: str) -> int | None:
        """Id of a special token."""
        return self.special.get(name)

    def _own_mark(self, kind: str) -> int | None:
        """What the file itself says is the token."""
        return None

    @abstractmethod
    def _open(self) -> tuple[dict[str, int], int]:
        """Read `data`: (special tokens, largest token id + 1)."""

    @abstractmethod
    def encode_plain(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(tokens uint32 [t], offsets int64 [n+1]): the texts in a row, nothing added."""

    @abstractmethod
    def decode(self, tokens: np.ndarray | Sequence[int]) -> str:
        """The text of tokens; special tokens are left out, broken UTF-8 at the edges becomes U+FFFD."""

    @abstractmethod
    def _token_bytes(self) -> Iterable[tuple[int, int]]:
        """(id, UTF-8 bytes of text) of the tokens that stand for text."""

    def byte_lengths(self) -> np.ndarray:
        """[padded_size] int64: bytes of UTF-8 text that each token stands for; special tokens and padding have none.

        Over the tokens of a text they add up to its bytes, where the tokenizer neither normalises text nor adds to it
        (SentencePiece usually puts a space in front).
        """
        found = np.zeros(self.padded_size, np.int64)
        for token, size in self._token_bytes():
            found[token] = size
        return found

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(tokens uint32 [t], offsets int64 [n+1]): documents in a row, each with BOS and EOS as the policy says."""
        tokens, offsets = self.encode_plain(texts)
        before, after = self.settings.bos == "document", self.settings.eos == "document"
        if not (before or after):
            return tokens, offsets
        count = len(offsets) - 1
        grown = offsets + (before + after) * np.arange(count + 1)
        result = np.empty(grown[-1], np.uint32)
        plain = np.ones(len(result), bool)
        if before:
            result[grown[:-1]], plain[grown[:-1]] = self.bos, False
        if after:
            result[grown[1:] - 1], plain[grown[1:] - 1] = self.eos, False
        result[plain] = tokens
        return result, grown

    def manifest(self, hash: str) -> dict[str, Any]:
        """The value `tokenizer` of a shard set's manifest; `files.of_manifest` makes the encoder from it."""
        return {"file": self.file, "hash": hash, "eos": self.eos, "pad": self.pad, "bos": self.bos,
                "format": self.format, "vocabulary": self.vocabulary_size,
                "vocabulary_multiple": self.settings.vocabulary_multiple, "settings": self.settings.canonical()}

    def with_policy(self, bos: Policy, eos: Policy) -> Encoder:
        """The same tokenizer under another policy."""
        return type(self)(self.data, replace(self.settings, bos=bos, eos=eos))


def piece_bytes(piece: str) -> int:
    """Bytes of text of a piece in SentencePiece's spelling: "▁" is a space, "<0x0A>" one byte."""
    return 1 if _BYTE_PIECE.fullmatch(piece) else len(piece.replace("▁", " ").encode())


def joined(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens uint32, offsets int64) of per-text tokens."""
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return (np.concatenate(parts).astype(np.uint32, copy=False) if parts else np.zeros(0, np.uint32)), offsets
