"""Tokenization of preference pairs (prompt, chosen, rejected): two token sequences with a common beginning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tidewheel.data.tokenize.chat import ChatTemplate, Messages, Refused, Tools, encode_rendered
from tidewheel.shards.preferences import preference_schema
from tidewheel.shards.tokenizer import Encoder

TOO_LONG, REFUSED, EQUAL = "pair_too_long", "template_refused", "equal_answers"
Pair = tuple[Messages, Messages, Messages]
Steps = Sequence[tuple[int, bool]]
"""Of each step of an answer, its end in the text and whether it is right."""


@dataclass(frozen=True)
class Pairs:
    """Encoded pairs.

    Args:
        table: rows of `preference_schema`, in the order of the pairs.
        dropped: {index of the pair: (reason, detail)} of pairs that have no row.
    """

    table: pa.Table
    dropped: dict[int, tuple[str, str]]


def encode_pairs(encoder: Encoder, template: ChatTemplate, ids: Sequence[str], pairs: Sequence[Pair],
                 tools: Sequence[Tools] | None = None, *, sequence_length: int, token_dtype: str,
                 margins: Sequence[float] | None = None, steps: Sequence[Steps] | None = None) -> Pairs:
    """Render and encode pairs (prompt, chosen, rejected).

    Each sequence is the whole conversation with one of the two answers, up to the end of the last turn. A pair with a
    sequence of more than `sequence_length` tokens is dropped, because truncation would change what is compared. Where
    one of the answers has no messages, its sequence is the prompt.

    Args:
        encoder: a Hugging Face tokenizer.
        template: the chat template.
        ids: document ids of n pairs.
        pairs: messages of n pairs.
        tools: tools of each pair; None if no pair has tools.
        sequence_length: maximum number of tokens of a sequence.
        token_dtype: "uint16" or "uint32".
        margins: by how much the chosen answer of each pair is better; None: not known.
        steps: of the single answer of each pair; None: they have no labels.
    """
    schema = preference_schema(token_dtype, margins is not None, steps is not None)
    texts: list[str] = []
    prompts: list[int] = []
    kept: list[int] = []
    dropped: dict[int, tuple[str, str]] = {}
    for index, pair in enumerate(pairs):
        try:
            chosen, rejected, prompt = _texts(template, *pair, tools[index] if tools else None)
        except Refused as error:
            dropped[index] = (REFUSED, str(error))
            continue
        texts += [chosen, rejected]
        prompts.append(prompt)
        kept.append(index)
    encoded = encode_rendered(encoder, template, texts)
    rows: dict[str, list] = {name: [] for name in schema.names}
    for position, index in enumerate(kept):
        (chosen_ids, chosen_spans), (rejected_ids, rejected_spans) = encoded[2 * position : 2 * position + 2]
        longest = max(len(chosen_ids), len(rejected_ids))
        if longest > sequence_length:
            dropped[index] = (TOO_LONG, f"{longest} tokens, a row has {sequence_length}")
            continue
        if not (pairs[index][1] and pairs[index][2]):  # a single answer: the other sequence is the prompt
            answer, spans = (chosen_ids, chosen_spans) if pairs[index][1] else (rejected_ids, rejected_spans)
            begin = answer[:int(np.searchsorted(spans[:, 1], prompts[position], side="right"))]
            if len(begin) == len(answer):
                dropped[index] = (REFUSED, "the template leaves the answer out")
                continue
            chosen_ids, rejected_ids = (answer, begin) if pairs[index][1] else (begin, answer)
            chosen_spans = rejected_spans = spans
        elif np.array_equal(chosen_ids, rejected_ids):
            dropped[index] = (EQUAL, "the template makes both answers the same tokens")
            continue
        shared = min(int(np.searchsorted(spans[:, 1], prompts[position], side="right"))
                     for spans in (chosen_spans, rejected_spans))
        if steps is not None:
            labels = _step_labels(texts[2 * position][prompts[position]:], pairs[index][1], steps[index],
                                  chosen_spans[:, 1] - prompts[position], shared)
            if isinstance(labels, str):
                dropped[index] = (REFUSED, labels)
                continue
            rows["step_labels"].append(labels)
        rows["document_id"].append(ids[index])
        rows["prompt_length"].append(shared)
        rows["chosen"].append(chosen_ids)
        rows["rejected"].append(rejected_ids)
        if margins is not None:
            rows["margin"].append(margins[index])
    return Pairs(pa.table(rows, schema=schema), dropped)


def _step_labels(text: str, answer: Messages, steps: Steps, ends: np.ndarray, prompt: int) -> np.ndarray | str:
    """Return the column step_labels of a row, or why it has none. The last step ends with the last token.

    Args:
        text: the rendered answer.
        answer: its message.
        steps: of the message.
        ends: end of each token of the row, in characters from the beginning of `text`.
        prompt: number of tokens of the prompt.
    """
    begin = text.find(str(answer[0]["content"]))
    if begin < 0:
        return "the template changes the text of the answer, whose steps have labels"
    labels = np.full(len(ends), -1, dtype=np.int8)
    tokens = [*np.searchsorted(ends, [begin + end for end, _ in steps[:-1]]), len(ends) - 1]
    if len(set(tokens)) < len(tokens):
        return "two steps end in one token"
    labels[tokens] = [label for _, label in steps]
    return labels[prompt:]


def _texts(template: ChatTemplate, prompt: Messages, chosen: Messages, rejected: Messages, tools: Tools
           ) -> tuple[str, str, int]:
    """Return (prompt and chosen, prompt and rejected, length of the prompt), where prompts have a generation prompt."""
    begin = template.text(prompt, tools, add_generation_prompt=True)
    texts = []
    for answer in (chosen, rejected):
        if not answer:
            texts.append(begin)
            continue
        text = template.rendered([*prompt, *answer], tools).text
        if not text.startswith(begin):
            raise Refused("the template changes the prompt when an answer follows")
        texts.append(text[: template.turn_end(text, len(begin))])
    return texts[0], texts[1], len(begin)
