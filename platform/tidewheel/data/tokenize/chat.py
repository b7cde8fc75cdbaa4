"""Tokenization of conversations, with a mask of the assistant's tokens.

`chat_template` renders the text and the spans that the assistant says. A special token that is spelled out in a message
remains plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tidewheel.data.tokenize.chat_template import (
    PLAIN,
    ChatTemplate,
    Loss,
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

NOTHING_LEARNT = "no token of the conversation would be learnt"
_BATCH = 512  # conversations per call, to limit memory


@dataclass(frozen=True)
class Encoded:
    """Tokens of n conversations, one after another.

    Args:
        tokens: uint32 [t].
        loss_mask: 1 for the tokens that a model learns to predict, uint8 [t].
        offsets: conversation i has the tokens [offsets[i], offsets[i + 1]), int64 [n + 1].
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray


def encode(encoder: Encoder, template: ChatTemplate, conversations: Sequence[Messages],
           tools: Sequence[Tools] | None = None, loss: Loss = "assistant") -> tuple[Encoded, dict[int, str]]:
    """Render and tokenize conversations.

    A token is learnt if at least one of its characters is. No BOS or EOS is added, because the
    template renders them.

    Args:
        encoder: a Hugging Face tokenizer.
        template: the chat template.
        conversations: messages of each conversation.
        tools: tools of each conversation; None if no conversation has tools.
        loss: which tokens are learnt, see `TokenizeStep`.

    Returns:
        (tokens and loss masks, {index: reason} of the conversations that are refused: by the template, or because no
        token would be learnt). A refused conversation has no tokens.

    Raises:
        InputError: the tokenizer is not a tokenizer.json, or the template needs a date and none is set.
    """
    refused: dict[int, str] = {}
    rendered: list[Rendered] = []
    for index, messages in enumerate(conversations):
        try:
            rendered.append(template.rendered(messages, tools[index] if tools else None, loss))
        except Refused as error:
            refused[index] = str(error)
            rendered.append(Rendered("", ()))
    encoded = encode_rendered(encoder, template, [conversation.text for conversation in rendered])
    tokens = [np.zeros(0, np.uint32)]
    masks = [np.zeros(0, np.uint8)]
    offsets = np.zeros(len(rendered) + 1, np.int64)
    for index, (conversation, (ids, characters)) in enumerate(zip(rendered, encoded, strict=True)):
        mask = _mask(characters, conversation.spans)
        if not mask.any() and index not in refused:
            refused[index] = NOTHING_LEARNT
        if index not in refused:
            tokens.append(ids)
            masks.append(mask)
            offsets[index + 1] = len(ids)
    return Encoded(np.concatenate(tokens), np.concatenate(masks), np.cumsum(offsets)), refused


def encode_rendered(encoder: Encoder, template: ChatTemplate, texts: Sequence[str]
                    ) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the tokens of each rendered text, uint32 [t], and the span of characters of each token, int64 [t, 2].

    Args:
        encoder: a Hugging Face tokenizer.
        template: the template that rendered the texts.
        texts: rendered texts.

    Raises:
        InputError: the tokenizer is not a tokenizer.json.
    """
    if not isinstance(encoder, HuggingFace):
        raise InputError(f"chat templates need a Hugging Face tokenizer.json; this is a {encoder.format} file",
                         where="tokenizer", fix="convert the tokenizer, or give the model's tokenizer.json")
    encoded = []
    for first in range(0, len(texts), _BATCH):
        batch = list(texts[first : first + _BATCH])
        encodings = encoder.with_control_tokens.encode_batch(batch, add_special_tokens=False)
        for text, encoding in zip(batch, encodings, strict=True):
            if PLAIN in text:
                encoded.append(_encode_marked(encoder, template, text))
            else:
                characters = np.array(encoding.offsets, np.int64).reshape(-1, 2)
                encoded.append((np.array(encoding.ids, np.uint32), characters))
    return encoded


def _encode_marked(encoder: HuggingFace, template: ChatTemplate, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Encode a text that contains `PLAIN`: control tokens by name, the text between them as text, without the marks."""
    ids: list[int] = []
    characters: list[tuple[int, int]] = []
    begin = 0
    for control in [*template.special.finditer(text), None]:
        end = len(text) if control is None else control.start()
        kept = [position for position in range(begin, end) if text[position] != PLAIN]
        encoding = encoder.as_text.encode("".join(text[position] for position in kept), add_special_tokens=False)
        ids += encoding.ids
        characters += [(kept[first], kept[last - 1] + 1) if last > first else (begin, begin)
                       for first, last in encoding.offsets]
        if control is not None:
            ids.append(encoder.special[control[0]])
            characters.append(control.span())
            begin = control.end()
    return np.array(ids, np.uint32), np.array(characters, np.int64).reshape(-1, 2)


def _mask(characters: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return 1 for the tokens that overlap a span of the assistant, uint8 [t]."""
    mask = np.zeros(len(characters), np.uint8)
    for begin, end in spans:
        if end > begin:
            first = np.searchsorted(characters[:, 1], begin, side="right")
            last = np.searchsorted(characters[:, 0], end)
            mask[first:last] = 1
    return mask
