"""Conversations to tokens, and a mask of the tokens that the assistant says.

`chat_template` gives the text and which parts of it the assistant says. A special token spelled out in a message stays
plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tidewheel.data.tokenize.chat_template import (
    PLAIN,
    ChatTemplate,
    Messages,
    Refused,
    Rendered,
    Tools,
    read_template,
)
from tidewheel.errors import InputError
from tidewheel.shards.tokenizer import Encoder
from tidewheel.shards.tokenizer.huggingface import HuggingFace

__all__ = ["ChatTemplate", "Encoded", "Messages", "Refused", "Tools", "encode", "encode_rendered", "read_template"]

_BATCH = 512  # conversations a call, so that memory stays bounded


@dataclass(frozen=True)
class Encoded:
    """n conversations in a row: tokens uint32 [t], loss_mask uint8 [t], offsets int64 [n+1]."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray


def encode(encoder: Encoder, template: ChatTemplate, conversations: Sequence[Messages],
           tools: Sequence[Tools] | None = None) -> tuple[Encoded, dict[int, str]]:
    """Tokens and loss mask of conversations; of one that the template refuses nothing, and why.

    A token is the assistant's when one of its characters is. No BOS or EOS is added: the template says it all.

    Args:
        tools: those of each conversation, if any has some.

    Raises:
        InputError: the tokenizer is no tokenizer.json, or the template asks for a date that is not given.
    """
    refused: dict[int, str] = {}
    found: list[Rendered] = []
    for number, messages in enumerate(conversations):
        try:
            found.append(template.rendered(messages, tools[number] if tools else None))
        except Refused as error:
            refused[number] = str(error)
            found.append(Rendered("", ()))
    tokens, masks = [np.zeros(0, np.uint32)], [np.zeros(0, np.uint8)]
    offsets = np.zeros(len(found) + 1, np.int64)
    for number, (rendered, (ids, places)) in enumerate(zip(found, encode_rendered(
            encoder, template, [each.text for each in found]), strict=True), 1):
        tokens.append(ids)
        masks.append(_mask(places, rendered.spans))
        offsets[number] = len(ids)
    return Encoded(np.concatenate(tokens), np.concatenate(masks), np.cumsum(offsets)), refused


def encode_rendered(encoder: Encoder, template: ChatTemplate, texts: Sequence[str]
                    ) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each rendered text its tokens uint32 [t] and their characters int64 [t, 2], begin and end."""
    if not isinstance(encoder, HuggingFace):
        raise InputError(f"chat templates need a Hugging Face tokenizer.json, this is a {encoder.format} file",
                         where="tokenizer", fix="convert the tokenizer, or give the model's tokenizer.json")
    found = []
    for first in range(0, len(texts), _BATCH):
        batch = list(texts[first : first + _BATCH])
        encodings = encoder.with_control_tokens.encode_batch(batch, add_special_tokens=False)
        for text, encoding in zip(batch, encodings, strict=True):
            found.append(_said_plainly(encoder, template, text) if PLAIN in text else (
                np.array(encoding.ids, np.uint32), np.array(encoding.offsets, np.int64).reshape(-1, 2)))
    return found


def _said_plainly(encoder: HuggingFace, template: ChatTemplate, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Of a text with `PLAIN` in it: control tokens by name, and what is between them without the marks, as text."""
    ids: list[int] = []
    places: list[tuple[int, int]] = []
    begin = 0
    for control in [*template.special.finditer(text), None]:
        end = len(text) if control is None else control.start()
        kept = [place for place in range(begin, end) if text[place] != PLAIN]
        encoding = encoder.as_text.encode("".join(text[place] for place in kept), add_special_tokens=False)
        ids += encoding.ids
        places += [(kept[first], kept[last - 1] + 1) if last > first else (begin, begin)
                   for first, last in encoding.offsets]
        if control is not None:
            ids.append(encoder.special[control[0]])
            places.append(control.span())
            begin = control.end()
    return np.array(ids, np.uint32), np.array(places, np.int64).reshape(-1, 2)


def _mask(places: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    mask = np.zeros(len(places), np.uint8)
    for begin, end in spans:
        if end > begin:
            mask[np.searchsorted(places[:, 1], begin, side="right") : np.searchsorted(places[:, 0], end)] = 1
    return mask
