"""The interface of all tokenizers: encode a batch of texts into one flat array of tokens, and decode tokens.

Text is never interpreted: a special token spelled out in a document ("<|endoftext|>") is encoded as its characters.
Only the policy (BOS, EOS) and chat templates produce control tokens.
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
    """Yield (index of the first text, texts) of batches for one library call.

    Batches bound the memory, because libraries return more than a hundred bytes per token. A text longer than a batch
    is a batch of its own.
    """
    first, size, batch = 0, 0, list[str]()
    for index, text in enumerate(texts):
        text = str(text)
        if batch and (len(batch) == _BATCH_DOCUMENTS or size + len(text) > _BATCH_CHARACTERS):
            yield first, batch
            first, size, batch = index, 0, []
        batch.append(text)
        size += len(text)
    if batch:
        yield first, batch


@dataclass(frozen=True)
class Settings:
    """The settings of an encoder that are not in the tokenizer's file.

    Args:
        bos: "document" puts the BOS token before each document.
        eos: "document" puts the EOS token after each document.
        bos_token: name or id of the token, unless it has a usual name.
        eos_token: name or id of the token, unless it has a usual name.
        pad_token: name or id of the token, unless it has a usual name.
        vocabulary_multiple: the vocabulary is padded to a multiple of this, for tensor cores.
        encoding: for a tiktoken file: the encoding with its pattern and special tokens ("gpt2", "cl100k_base", ...).
        pattern: for a tiktoken file: the regular expression that splits text before merging, instead of `encoding`.
        special_tokens: for a tiktoken file: ids of special tokens by name, in addition to those of `encoding`.
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
        """Return the JSON values of the settings that differ from their defaults."""
        default = asdict(Settings())
        return {name: value for name, value in asdict(self).items() if value != default[name]}


class Encoder(ABC):
    """A tokenizer with its policy. It is pickled as its file's bytes and settings.

    Args:
        data: content of the tokenizer's file.
        settings: what is not in the file.

    Attributes:
        settings: as given.
        special: id of every special token, by name.
        vocabulary_size: largest id + 1.
        padded_size: vocabulary_size padded to a multiple of `settings.vocabulary_multiple`.
        bos: id of the BOS token; None if there is none.
        eos: id of the EOS token.
        pad: id of the padding token; that of EOS if there is none.

    Raises:
        InputError: the bytes are not such a file, or the tokenizer lacks a token that the settings need.
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
                             where="tokenizer", fix="name it with tokenize.bos_token, or set tokenize.bos to none")
        if eos is None:
            raise InputError(f"the tokenizer has no end-of-text token; looked for {', '.join(_EOS_NAMES)}",
                             where="tokenizer", fix="name it with tokenize.eos_token, or add one of these as a "
                                                    "special token")
        self.eos: int = eos
        pad = self._mark("pad", _PAD_NAMES)
        self.pad: int = eos if pad is None else pad

    def __reduce__(self) -> tuple[type[Encoder], tuple[bytes, Settings]]:
        return type(self), (self.data, self.settings)

    def _mark(self, kind: Literal["bos", "eos", "pad"], names: Sequence[str]) -> int | None:
        """Return the id of the BOS, EOS or padding token: from the settings, the file, or usual names."""
        settings = self.settings
        requested = {"bos": settings.bos_token, "eos": settings.eos_token, "pad": settings.pad_token}[kind]
        if requested is None:
            own = self._own_mark(kind)
            ids = (self._id(name) for name in names)
            return own if own is not None else next((token for token in ids if token is not None), None)
        token = requested if isinstance(requested, int) else self._id(requested)
        if token is None or not 0 <= token < self.vocabulary_size:
            raise InputError(f"the tokenizer has no token {requested!r}", where="tokenizer",
                             fix=f"correct tokenize.{kind}_token; there are: {', '.join(list(self.special)[:12])}")
        return token

    def _id(self, name: str) -> int | None:
        """Return the id of a special token; None if there is none of that name."""
        return self.special.get(name)

    def _own_mark(self, kind: str) -> int | None:
        """Return the id that the file itself gives for the token; None if it gives none."""
        return None

    @abstractmethod
    def _open(self) -> tuple[dict[str, int], int]:
        """Read `data` and return (ids of special tokens by name, largest token id + 1)."""

    @abstractmethod
    def encode_plain(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts without BOS and EOS; return (tokens uint32 [t], offsets int64 [n + 1])."""

    @abstractmethod
    def decode(self, tokens: np.ndarray | Sequence[int]) -> str:
        """Return the text of tokens, without special tokens. Incomplete UTF-8 at the ends becomes U+FFFD."""

    @abstractmethod
    def _token_bytes(self) -> Iterable[tuple[int, int]]:
        """Return (id, number of UTF-8 bytes) of the tokens that stand for text."""

    def byte_lengths(self) -> np.ndarray:
        """Return the number of UTF-8 bytes that each token stands for: int64 [padded_size]; 0 for special tokens.

        Over the tokens of a text, these add up to its bytes if the tokenizer neither normalises text nor adds to it
        (SentencePiece usually prepends a space).
        """
        lengths = np.zeros(self.padded_size, np.int64)
        for token, size in self._token_bytes():
            lengths[token] = size
        return lengths

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode documents with BOS and EOS by the policy; return (tokens uint32 [t], offsets int64 [n + 1])."""
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
        """Return the value `tokenizer` of a shard set's manifest, from which `files.of_manifest` makes the encoder."""
        return {"file": self.file, "hash": hash, "eos": self.eos, "pad": self.pad, "bos": self.bos,
                "format": self.format, "vocabulary": self.vocabulary_size,
                "vocabulary_multiple": self.settings.vocabulary_multiple, "settings": self.settings.canonical()}

    def with_policy(self, bos: Policy, eos: Policy) -> Encoder:
        """Return the same tokenizer with another policy."""
        return type(self)(self.data, replace(self.settings, bos=bos, eos=eos))


def piece_bytes(piece: str) -> int:
    """Return the UTF-8 bytes of a piece in SentencePiece's spelling: "▁" is a space, "<0x0A>" one byte."""
    return 1 if _BYTE_PIECE.fullmatch(piece) else len(piece.replace("▁", " ").encode())


def joined(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate the tokens of several texts; return (tokens uint32 [t], offsets int64 [n + 1])."""
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return (np.concatenate(parts).astype(np.uint32, copy=False) if parts else np.zeros(0, np.uint32)), offsets
