"""Preference pairs (prompt, chosen, rejected) to rows of a preference set: two token sequences that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tidewheel.data.tokenize.chat import ChatTemplate, Messages, Refused, Tools, encode_rendered
from tidewheel.shards.preferences import preference_schema
from tidewheel.shards.tokenizer import Encoder

TOO_LONG, REFUSED = "pair_too_long", "template_refused"
Pair = tuple[Messages, Messages, Messages]


@dataclass(frozen=True)
class Pairs:
    """table: rows of `preference_schema` in the order given; dropped: {pair: (reason, detail)} of the others."""

    table: pa.Table
    dropped: dict[int, tuple[str, str]]


def encode_pairs(encoder: Encoder, template: ChatTemplate, ids: Sequence[str], pairs: Sequence[Pair],
                 tools: Sequence[Tools] | None = None, *, sequence_length: int, token_dtype: str) -> Pairs:
    """Render and encode pairs (prompt, chosen, rejected).

    Both sequences are the whole conversation with one of the two answers, to the end of the last turn. A pair of which
    one is longer than `sequence_length` tokens is dropped: cut off, it would compare something else.

    Args:
        ids: document ids, n of them.
        pairs: messages, n of them.
        tools: of each pair, if any has some.
        sequence_length: most tokens of a sequence.
        token_dtype: "uint16" or "uint32".
    """
    texts: list[str] = []
    prompts: list[int] = []
    kept: list[int] = []
    dropped: dict[int, tuple[str, str]] = {}
    for number, pair in enumerate(pairs):
        try:
            chosen, rejected, prompt = _texts(template, *pair, tools[number] if tools else None)
        except Refused as error:
            dropped[number] = (REFUSED, str(error))
            continue
        texts += [chosen, rejected]
        prompts.append(prompt)
        kept.append(number)
    encoded = encode_rendered(encoder, template, texts)
    rows: dict[str, list] = {name: [] for name in preference_schema(token_dtype).names}
    for place, number in enumerate(kept):
        (chosen_ids, chosen_places), (rejected_ids, rejected_places) = encoded[2 * place : 2 * place + 2]
        longest = max(len(chosen_ids), len(rejected_ids))
        if longest > sequence_length:
            dropped[number] = (TOO_LONG, f"{longest} tokens, a row has {sequence_length}")
            continue
        shared = min(int(np.searchsorted(places[:, 1], prompts[place], side="right"))
                     for places in (chosen_places, rejected_places))
        rows["document_id"].append(ids[number])
        rows["prompt_length"].append(shared)
        rows["chosen"].append(chosen_ids)
        rows["rejected"].append(rejected_ids)
    return Pairs(pa.table(rows, schema=preference_schema(token_dtype)), dropped)


def _texts(template: ChatTemplate, prompt: Messages, chosen: Messages, rejected: Messages, tools: Tools
           ) -> tuple[str, str, int]:
    """(prompt and chosen, prompt and rejected, characters of the prompt with its generation prompt)."""
    begin = template.text(prompt, tools, add_generation_prompt=True)
    both = []
    for answer in (chosen, rejected):
        text = template.rendered([*prompt, *answer], tools).text
        if not text.startswith(begin):
            raise Refused("the template changes the prompt when an answer follows it")
        both.append(text[: template.turn_end(text, len(begin))])
    return both[0], both[1], len(begin)
