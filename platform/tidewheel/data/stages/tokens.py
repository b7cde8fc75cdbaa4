"""Documents of a partition to tokens: plain text, conversations with a loss mask, or preference pairs."""

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
from tidewheel.data.readers.conversations import MESSAGES, TOOLS, pair_of
from tidewheel.data.readers.messages import text_of
from tidewheel.data.tokenize import chat, preferences
from tidewheel.errors import InputError
from tidewheel.shards.tokenizer import Encoder
from tidewheel.versions import Version

VERSION = Version("tokenize")
"""How text, conversations and preference pairs become tokens."""


@dataclass(frozen=True)
class Tokens:
    """n documents of a partition.

    ids string [n]; tokens uint32 [t]; sizes int64 [n]: tokens of each; loss_mask uint8 [t], of conversations;
    text_bytes: of all texts that are tokenized; dropped, heads: verdict rows of what a template refused, and how these
    texts begin.
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
    """Rows of `shards.format.preference_schema` of a partition; the other fields as in `Tokens`."""

    table: pa.Table
    text_bytes: int
    dropped: pa.Table
    heads: pa.Table


@lru_cache(maxsize=2)
def template_of(values: str, encoder: Encoder) -> chat.ChatTemplate:
    """The chat template in `Job.chat_template`."""
    return chat.ChatTemplate(values, tuple(encoder.special))


def encode(tables: Iterable[pa.Table], encoder: Encoder, template: str) -> Tokens:
    """Tokens of documents (`document.DOCUMENT_SCHEMA`), with the tokenizer's policy; of conversations with `template`.

    Raises:
        InputError: the text of a conversation's document is not what its messages say.
    """
    ids: list[pa.Array] = []
    tokens, masks, sizes = [np.zeros(0, np.uint32)], [np.zeros(0, np.uint8)], [np.zeros(0, np.int64)]
    text_bytes, gone = 0, _Dropped()
    for table in tables:
        text_bytes += int(pc.sum(pc.binary_length(table["text"])).as_py())
        if template:
            flat, mask, offsets, kept = _conversations(table, encoder, template_of(template, encoder), gone)
            masks.append(mask)
            table, own = table.filter(pa.array(kept)), np.diff(offsets)[kept]  # the others have no tokens
        else:
            flat, offsets = encoder.encode(table["text"].to_pylist())
            own = np.diff(offsets)
        ids.append(table["id"].combine_chunks())
        tokens.append(flat)
        sizes.append(own)
    names = pa.chunked_array(ids, pa.string()).combine_chunks()
    return Tokens(names, np.concatenate(tokens), np.concatenate(sizes), np.concatenate(masks) if template else None,
                  text_bytes, gone.verdicts(), gone.heads())


def _conversations(table: pa.Table, encoder: Encoder, template: chat.ChatTemplate, gone: _Dropped
                   ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, loss mask, offsets, which were not refused) of the conversations in `table`."""
    metas = _metas(table, lambda meta: text_of(meta[MESSAGES]))
    encoded, refused = chat.encode(encoder, template, [meta[MESSAGES] for meta in metas],
                                   [meta.get(TOOLS) for meta in metas])
    kept = gone.take(table, {row: (preferences.REFUSED, why) for row, why in refused.items()})
    return encoded.tokens, encoded.loss_mask, encoded.offsets, kept


def encode_pairs(tables: Iterable[pa.Table], encoder: Encoder, template: str, *, sequence_length: int,
                 token_dtype: str) -> PairRows:
    """Rows of the preference pairs of documents; InputError as `encode`."""
    found = [preferences.preference_schema(token_dtype).empty_table()]
    text_bytes, gone = 0, _Dropped()
    for table in tables:
        metas = _metas(table, lambda meta: text_of(list(chain(*pair_of(meta)))))
        pairs = [pair_of(meta) for meta in metas]
        text_bytes += sum(len(text_of([*prompt, *answer]).encode()) for prompt, *answers in pairs for answer in answers)
        encoded = preferences.encode_pairs(encoder, template_of(template, encoder), table["id"].to_pylist(), pairs,
                                           [meta.get(TOOLS) for meta in metas], sequence_length=sequence_length,
                                           token_dtype=token_dtype)
        gone.take(table, encoded.dropped)
        found.append(encoded.table)
    return PairRows(pa.concat_tables(found), text_bytes, gone.verdicts(), gone.heads())


def _metas(table: pa.Table, said: Any) -> list[Mapping[str, Any]]:
    metas = [json.loads(meta) for meta in table["meta"].to_pylist()]
    for identity, text, meta in zip(table["id"].to_pylist(), table["text"].to_pylist(), metas, strict=True):
        if said(meta) != text:
            raise InputError("a step changed the text of a conversation, and its messages would be tokenized as they "
                             "were", where=f"document {identity!r}",
                             mend="leave out steps that edit text (filters that edit, dedup_lines, decontaminate with "
                                  "action cut), or let them drop or annotate")
    return metas


class _Dropped:
    """Documents that cannot be tokenized."""

    def __init__(self) -> None:
        self._verdicts, self._heads = [verdicts.VERDICT_SCHEMA.empty_table()], [_NO_HEADS]

    def take(self, table: pa.Table, dropped: Mapping[int, tuple[str, str]]) -> np.ndarray:
        """Note the rows of `table` in `dropped` (reason, detail); True for the others, bool [n]."""
        kept = np.ones(len(table), bool)
        rows = sorted(dropped)
        kept[rows] = False
        if rows:
            gone = table.take(pa.array(rows))
            self._verdicts.append(verdicts.drops(
                gone["id"].combine_chunks(), [dropped[row][0] for row in rows],
                details=[json.dumps({"told": dropped[row][1]}, sort_keys=True) for row in rows]))
            heads = [verdicts.head(text) for text in gone["text"].to_pylist()]
            self._heads.append(pa.table([gone["id"], pa.array(heads, pa.string())], schema=_NO_HEADS.schema))
        return kept

    def verdicts(self) -> pa.Table:
        """Verdict rows, sorted by id."""
        return pa.concat_tables(self._verdicts).sort_by("id")

    def heads(self) -> pa.Table:
        """id and head of the dropped documents."""
        return pa.concat_tables(self._heads)


_NO_HEADS = pa.schema([("id", pa.string()), ("head", pa.string())]).empty_table()
