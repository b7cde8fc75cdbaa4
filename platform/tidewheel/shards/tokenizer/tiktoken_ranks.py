"""tiktoken rank files: a token in base64 and its rank on each line. The file has no pattern and no special tokens."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from tidewheel.errors import InputError
from tidewheel.shards.tokenizer.encoder import Encoder, joined

_GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_CL100K = (r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"""
           r"""|\s++$|\s*[\r\n]|\s+(?!\S)|\s""")
_O200K = "|".join([
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""", r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""", r"""\s*[\r\n]+""", r"""\s+(?!\S)""", r"""\s+"""])
#: OpenAI's published encodings: pattern, special tokens.
ENCODINGS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": (_GPT2, {"<|endoftext|>": 50256}),
    "r50k_base": (_GPT2, {"<|endoftext|>": 50256}),
    "p50k_base": (_GPT2, {"<|endoftext|>": 50256}),
    "cl100k_base": (_CL100K, {"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259,
                              "<|fim_suffix|>": 100260, "<|endofprompt|>": 100276}),
    "o200k_base": (_O200K, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}
_BY_RANKS = {50256: "gpt2", 50280: "p50k_base", 100256: "cl100k_base", 199998: "o200k_base"}
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d{1,9}")


class Tiktoken(Encoder):
    """Encoder of a rank file. The settings name the encoding, or give its pattern and special tokens."""

    format = "tiktoken"
    file = "tokenizer.tiktoken"

    def _open(self) -> tuple[dict[str, int], int]:
        try:
            import tiktoken
        except ImportError:
            raise InputError("this is a tiktoken file, and the package that reads it is missing", where="tokenizer",
                             fix="pip install 'tidewheel[tokenizers]'") from None
        ranks = read_ranks(self.data)
        pattern, special = self._encoding(len(ranks))
        taken = set(ranks.values())
        if clash := [name for name, token_id in special.items() if token_id in taken or token_id < 0]:
            raise InputError(f"the special tokens {', '.join(clash)} have ids that the file gives to others",
                             where="tokenizer", fix="correct tokenize.encoding or tokenize.special_tokens")
        try:
            self._encoding_of_file: Any = tiktoken.Encoding("tidewheel", pat_str=pattern, mergeable_ranks=ranks,
                                                            special_tokens=special)
        except (ValueError, KeyError) as error:
            raise InputError(f"tiktoken does not take the pattern ({str(error)[:150]})", where="tokenizer",
                             fix="correct tokenize.pattern") from None
        self._special_ids = set(special.values())
        self._known = taken | self._special_ids
        return special, max(self._known) + 1

    def _encoding(self, ranks: int) -> tuple[str, dict[str, int]]:
        """Return (pattern, ids of special tokens by name) for a file with this many ranks."""
        settings = self.settings
        name = settings.encoding or (None if settings.pattern else _BY_RANKS.get(ranks))
        if name is None and settings.pattern is None:
            raise InputError(f"{ranks} ranks: not one of the encodings known here", where="tokenizer",
                             fix=f"set tokenize.encoding to one of {', '.join(ENCODINGS)}, or give tokenize.pattern "
                                 "and tokenize.special_tokens")
        if name is not None and name not in ENCODINGS:
            raise InputError(f"no encoding {name!r}", where="tokenizer", fix=f"there are: {', '.join(ENCODINGS)}")
        pattern, special = ENCODINGS[name] if name else ("", {})
        return settings.pattern or pattern, {**special, **settings.special_tokens}

    def encode_plain(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if len(texts) < 2:
            return joined([self._numpy(text) for text in texts])
        with ThreadPoolExecutor(int(os.environ.get("RAYON_NUM_THREADS", 0)) or os.cpu_count()) as pool:
            return joined(list(pool.map(self._numpy, texts)))

    def _numpy(self, text: str) -> np.ndarray:
        return self._encoding_of_file.encode_to_numpy(str(text), disallowed_special=())

    def _token_bytes(self) -> Iterable[tuple[int, int]]:
        return ((token, len(text)) for text, token in read_ranks(self.data).items())

    def decode(self, tokens: np.ndarray | Sequence[int]) -> str:
        ids = [int(token) for token in tokens]
        return self._encoding_of_file.decode([token for token in ids
                                              if token in self._known and token not in self._special_ids])


def looks_like_ranks(data: bytes) -> bool:
    """Return whether the first line is a token and a rank."""
    return _LINE.fullmatch(data[:4096].split(b"\n", 1)[0].rstrip(b"\r")) is not None


def read_ranks(data: bytes) -> dict[bytes, int]:
    """Return {token: rank} of a rank file.

    Raises:
        InputError: a line is wrong, a rank occurs twice, or a single byte has no token.
    """
    ranks: dict[bytes, int] = {}
    for line_number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            if _LINE.fullmatch(line) is None:
                raise ValueError
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise _wrong(f"line {line_number} is not a token and a rank: {line[:60]!r}") from None
    if len(set(ranks.values())) != len(ranks):
        raise _wrong("a rank occurs twice")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise _wrong(f"{len(missing)} single bytes are missing, the first is {missing[0]:#04x}")
    return ranks


def from_gpt2(merges: bytes, vocabulary: bytes) -> bytes:
    """Return the rank file with the content of GPT-2's `vocab.bpe` and `encoder.json`.

    Args:
        merges: content of `vocab.bpe`.
        vocabulary: content of `encoder.json`.

    Raises:
        InputError: a file is damaged, or the two do not belong together.
    """
    names = {**{chr(byte): byte for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}}
    other_bytes = [byte for byte in range(256) if chr(byte) not in names]
    names |= {chr(256 + index): byte for index, byte in enumerate(other_bytes)}
    try:
        ids = json.loads(vocabulary)
        lines = [line.split(" ") for line in merges.decode("utf-8").split("\n")[1:] if line]
        tokens = [*names, *(first + second for first, second in lines)]
        ranks = {bytes(names[character] for character in token): ids[token] for token in tokens}
        if list(ranks.values()) != list(range(len(tokens))):
            raise ValueError("ids of encoder.json are not in the order of the merges")
    except (ValueError, KeyError, TypeError) as error:
        raise _wrong(f"vocab.bpe and encoder.json do not belong together ({str(error)[:150]})") from None
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def _wrong(what: str) -> InputError:
    return InputError(what, where="tokenizer", fix="give the file as it was published")
