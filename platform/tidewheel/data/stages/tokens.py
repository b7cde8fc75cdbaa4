"""Tokenize the documents of a partition: plain text, conversations with a loss mask, or preference pairs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data import verdicts
from tidewheel.data.readers.conversations import MARGIN, MESSAGES, STEPS, TOOLS, pair_of
from tidewheel.data.readers.messages import text_of
from tidewheel.data.tokenize import chat, preferences
from tidewheel.errors import InputError
from tidewheel.shards.tokenizer import Encoder
from tidewheel.versions import Version

VERSION = Version("tokenize")
"""Version of how text, conversations and preference pairs become tokens."""
NOTHING_LEARNT = "nothing_learnt"
"""Reason of a conversation of which no token would be learnt."""


@dataclass(frozen=True)
class Tokens:
    """Tokens of n documents.

    Args:
        ids: ids of the documents, string [n].
        tokens: tokens of all documents one after another, uint32 [t].
        sizes: number of tokens of each document, int64 [n].
        loss_mask: uint8 [t] of conversations; None for plain text.
        text_bytes: size of all texts that are tokenized.
        dropped: verdicts on conversations that the template refuses.
        heads: first characters of the dropped texts.
    """

    ids: pa.Array
    tokens: np.ndarray
    sizes: np.ndarray
    loss_mask: np.ndarray | None
    text_bytes: int
    dropped: pa.Table
    heads: pa.Table


@dataclass(frozen=True)
class PairRows:
    """Preference pairs of a partition (`shards.format.preference_schema`); the other fields are as in `Tokens`."""

    table: pa.Table
    text_bytes: int
    dropped: pa.Table
    heads: pa.Table


@lru_cache(maxsize=2)
def template_of(values: str, encoder: Encoder) -> chat.ChatTemplate:
    """Return the chat template of `Job.chat_template`."""
    return chat.ChatTemplate(values, tuple(encoder.special))


def encode(tables: Iterable[pa.Table], encoder: Encoder, template: str, loss: chat.Loss = "assistant") -> Tokens:
    """Tokenize documents.

    Args:
        tables: documents (`document.DOCUMENT_SCHEMA`).
        encoder: the tokenizer, with its policy on special tokens.
        template: chat template of conversations (`Job.chat_template`); "" for plain text.
        loss: which tokens of conversations are learnt, see `TokenizeStep`.

    Raises:
        InputError: the text of a conversation differs from its messages, because a step edited it.
    """
    ids: list[pa.Array] = []
    tokens = [np.zeros(0, np.uint32)]
    masks = [np.zeros(0, np.uint8)]
    sizes = [np.zeros(0, np.int64)]
    text_bytes = 0
    dropped = _Dropped()
    for table in tables:
        text_bytes += int(pc.sum(pc.binary_length(table["text"])).as_py())
        if template:
            flat, mask, offsets, kept = _conversations(table, encoder, template_of(template, encoder), loss, dropped)
            masks.append(mask)
            table = table.filter(pa.array(kept))
            own = np.diff(offsets)[kept]  # refused conversations have no tokens
        else:
            flat, offsets = encoder.encode(table["text"].to_pylist())
            own = np.diff(offsets)
        ids.append(table["id"].combine_chunks())
        tokens.append(flat)
        sizes.append(own)
    names = pa.chunked_array(ids, pa.string()).combine_chunks()
    return Tokens(names, np.concatenate(tokens), np.concatenate(sizes), np.concatenate(masks) if template else None,
                  text_bytes, dropped.verdicts(), dropped.heads())


def _conversations(table: pa.Table, encoder: Encoder, template: chat.ChatTemplate, loss: chat.Loss, dropped: _Dropped
                   ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens, loss mask, offsets, whether each was accepted) of the conversations in `table`."""
    metas = _metas(table, lambda meta: text_of(meta[MESSAGES]))
    encoded, refused = chat.encode(encoder, template, [meta[MESSAGES] for meta in metas],
                                   [meta.get(TOOLS) for meta in metas], loss)
    kept = dropped.take(table, {row: (NOTHING_LEARNT if why == chat.NOTHING_LEARNT else preferences.REFUSED, why)
                                for row, why in refused.items()})
    return encoded.tokens, encoded.loss_mask, encoded.offsets, kept


def encode_pairs(tables: Iterable[pa.Table], encoder: Encoder, template: str, *, sequence_length: int,
                 token_dtype: str, margins: bool = False, steps: bool = False) -> PairRows:
    """Tokenize preference pairs.

    Args:
        tables: documents (`document.DOCUMENT_SCHEMA`).
        encoder: the tokenizer.
        template: chat template (`Job.chat_template`).
        sequence_length: maximum number of tokens of a sequence.
        token_dtype: type of the tokens.
        margins: whether the pairs have margins.
        steps: whether answers have labels of their steps.

    Raises:
        InputError: as in `encode`.
    """
    rows = [preferences.preference_schema(token_dtype, margins, steps).empty_table()]
    text_bytes = 0
    dropped = _Dropped()
    for table in tables:
        metas = _metas(table, lambda meta: text_of(list(chain(*pair_of(meta)))))
        pairs = [pair_of(meta) for meta in metas]
        text_bytes += sum(len(text_of([*prompt, *answer]).encode()) for prompt, *answers in pairs for answer in answers)
        encoded = preferences.encode_pairs(encoder, template_of(template, encoder), table["id"].to_pylist(), pairs,
                                           [meta.get(TOOLS) for meta in metas], sequence_length=sequence_length,
                                           token_dtype=token_dtype,
                                           margins=[meta[MARGIN] for meta in metas] if margins else None,
                                           steps=[meta[STEPS] for meta in metas] if steps else None)
        dropped.take(table, encoded.dropped)
        rows.append(encoded.table)
    return PairRows(pa.concat_tables(rows), text_bytes, dropped.verdicts(), dropped.heads())


def _metas(table: pa.Table, text_in: Any) -> list[Mapping[str, Any]]:
    """Return the documents' metas, after checking that `text_in` a meta is the document's text."""
    metas = [json.loads(meta) for meta in table["meta"].to_pylist()]
    for identity, text, meta in zip(table["id"].to_pylist(), table["text"].to_pylist(), metas, strict=True):
        if text_in(meta) != text:
            raise InputError("a step changed the text of a conversation, but its unchanged messages would be "
                             "tokenized", where=f"document {identity!r}",
                             fix="leave out steps that edit text (filters that edit, dedup_lines, decontaminate with "
                                 "action cut), or let them drop or annotate")
    return metas


class _Dropped:
    """Collector of documents that cannot be tokenized."""

    def __init__(self) -> None:
        self._verdicts = [verdicts.VERDICT_SCHEMA.empty_table()]
        self._heads = [_NO_HEADS]

    def take(self, table: pa.Table, dropped: Mapping[int, tuple[str, str]]) -> np.ndarray:
        """Record the rows of `table` in `dropped` (reason, detail); return whether each row stays, bool [n]."""
        kept = np.ones(len(table), bool)
        rows = sorted(dropped)
        kept[rows] = False
        if rows:
            dropped_rows = table.take(pa.array(rows))
            self._verdicts.append(verdicts.drops(
                dropped_rows["id"].combine_chunks(), [dropped[row][0] for row in rows],
                details=[json.dumps({"told": dropped[row][1]}, sort_keys=True) for row in rows]))
            heads = [verdicts.head(text) for text in dropped_rows["text"].to_pylist()]
            self._heads.append(pa.table([dropped_rows["id"], pa.array(heads, pa.string())], schema=_NO_HEADS.schema))
        return kept

    def verdicts(self) -> pa.Table:
        """Return the verdicts, sorted by id."""
        return pa.concat_tables(self._verdicts).sort_by("id")

    def heads(self) -> pa.Table:
        """Return id and head of the dropped documents."""
        return pa.concat_tables(self._heads)


_NO_HEADS = pa.schema([("id", pa.string()), ("head", pa.string())]).empty_table()
