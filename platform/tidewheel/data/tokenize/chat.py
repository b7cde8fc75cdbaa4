"""Conversations to tokens: the tokenizer's chat template, and a mask of the tokens that the assistant says.

The template is the Jinja program of a model's `tokenizer_config.json`, run in a sandbox as `transformers` runs it, with
a limit on its work (`template_work`). What the assistant says is what stands between `{% generation %}` and
`{% endgeneration %}`; in a template without these marks it is what a turn of the assistant adds to the conversation
before it, the generation prompt aside, up to the last control token (the end of the turn). A special token spelled out
in a message stays plain text.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tidewheel.data.readers.conversations import ASSISTANT, MARKS
from tidewheel.errors import InputError
from tidewheel.shards.tokenizer import Encoder
from tidewheel.shards.tokenizer.huggingface import HuggingFace

PLAIN, BEGIN, END = MARKS
_BATCH = 512  # conversations a call, so that memory stays bounded
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_TRIALS = ([{"role": "user", "content": "a"}],
           [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}])

Messages = Sequence[Mapping[str, Any]]


class Refused(Exception):
    """The template does not take this conversation; its text is the reason."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text with its control tokens.

    text: `PLAIN` stands inside what looks like a control token but was said; spans: [begin, end) of characters that
    the assistant says, in order.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Encoded:
    """n conversations in a row: tokens uint32 [t], loss_mask uint8 [t], offsets int64 [n+1]."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray


def read_template(config: bytes | None, template: bytes | None, *, where: str) -> str:
    """JSON text of {"template", "tokens"} for `ChatTemplate`, from a tokenizer_config.json and a Jinja file.

    Args:
        config: bytes of tokenizer_config.json, None where there is none.
        template: bytes of a Jinja file that goes before the configuration's `chat_template`.
        where: for messages.

    Raises:
        InputError: there is no template, it is no Jinja, or the configuration is no JSON object.
    """
    try:
        values = json.loads(config) if config is not None else {}
        source = template.decode("utf-8") if template is not None else values.get("chat_template")
        if isinstance(source, list):  # several by name
            source = {each["name"]: each["template"] for each in source}.get("default")
        tokens = {name: values[name] for name in _TOKENS if values.get(name)}
        tokens = {name: value["content"] if isinstance(value, dict) else str(value) for name, value in tokens.items()}
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise InputError(f"not a tokenizer_config.json ({str(error)[:150]})", where=where,
                         mend="give the file that belongs to the tokenizer") from None
    if not isinstance(source, str):
        raise InputError("no chat template", where=where,
                         mend="put tokenizer_config.json with a chat_template beside the tokenizer, or name a Jinja "
                              "file with tokenize.chat_template")
    found = json.dumps({"template": source, "tokens": tokens}, sort_keys=True)
    _try(ChatTemplate(found, ()), where)
    return found


def _try(template: ChatTemplate, where: str) -> None:
    """Raise InputError when the template does too much work with any conversation, not only with a hostile one."""
    from tidewheel.data.tokenize.template_work import TooMuchWork

    for messages in _TRIALS:
        try:
            template.text(messages, add_generation_prompt=True)
        except Refused as error:  # a template may want other roles
            if isinstance(error.__cause__, TooMuchWork):
                raise InputError(f"the chat template is not usable: {error.__cause__}", where=where,
                                 mend="take the template from the model's own tokenizer_config.json") from None


class ChatTemplate:
    """Renders conversations.

    Args:
        values: what `read_template` gave.
        special: every special token of the tokenizer.
    """

    def __init__(self, values: str, special: Sequence[str]) -> None:
        parsed = json.loads(values)
        self._tokens, self._template = parsed["tokens"], _compiled(parsed["template"])
        self._marked = re.search(r"\{%-?\s*generation\b", parsed["template"]) is not None
        names = sorted((re.escape(name) for name in special), key=len, reverse=True)
        self.special = re.compile("|".join(names) or r"(?!)")

    def text(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        """The template's output, `MARKS` in it.

        Raises:
            Refused: the template does not take such a conversation.
        """
        from jinja2 import TemplateError

        from tidewheel.data.tokenize.template_work import WORK, WORK_OF_INPUT, rendered, size, work_limit

        safe = [self._guarded(message) for message in messages]
        try:
            with work_limit(WORK + WORK_OF_INPUT * size(safe, sys.maxsize)):
                return rendered(self._template, messages=safe, add_generation_prompt=add_generation_prompt, tools=None,
                                documents=None, **self._tokens)
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError,
                RecursionError) as error:
            raise Refused(f"{type(error).__name__}: {error}"[:200]) from error

    def _guarded(self, value: Any, key: str = "") -> Any:
        """`value` with `PLAIN` inside every special token that its strings spell out."""
        if isinstance(value, str):
            return value if key == "role" else self.special.sub(
                lambda found: found[0][0] + PLAIN + found[0][1:], value)
        if isinstance(value, Mapping):
            return {name: self._guarded(inner, name) for name, inner in value.items()}
        return [self._guarded(inner) for inner in value] if isinstance(value, list) else value

    def rendered(self, messages: Messages) -> Rendered:
        """The conversation and what the assistant says in it; `Refused` where that cannot be told."""
        text = self.text(messages)
        if not self._marked:
            return Rendered(text, tuple(self._turn(messages, number, text) for number, message in enumerate(messages)
                                        if message["role"] == ASSISTANT))
        parts, spans, place = re.split(f"([{BEGIN}{END}])", text), [], 0
        for part in parts:
            if part == BEGIN:
                spans.append((place, place))
            elif part == END:
                spans[-1] = (spans[-1][0], place)
            else:
                place += len(part)
        return Rendered("".join(part for part in parts if part not in (BEGIN, END)), tuple(spans))

    def _turn(self, messages: Messages, number: int, text: str) -> tuple[int, int]:
        before = self.text(messages[:number], add_generation_prompt=True)
        after = text if number + 1 == len(messages) else self.text(messages[: number + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise Refused("the template changes earlier turns, so that a turn's tokens cannot be told; mark them with "
                          "{% generation %} and {% endgeneration %}")
        return len(before), self.turn_end(after, len(before))

    def turn_end(self, text: str, begin: int) -> int:
        """End of a turn that begins at `begin`: behind its last control token where only white space follows that."""
        ends = [found.end() for found in self.special.finditer(text, begin)]
        return ends[-1] if ends and not text[ends[-1] :].strip() else len(text)


def encode(encoder: Encoder, template: ChatTemplate, conversations: Sequence[Messages]
           ) -> tuple[Encoded, dict[int, str]]:
    """Tokens and loss mask of conversations; of one that the template refuses nothing, and why.

    A token is the assistant's when one of its characters is. No BOS or EOS is added: the template says it all.

    Raises:
        InputError: the tokenizer is no tokenizer.json.
    """
    refused: dict[int, str] = {}
    found: list[Rendered] = []
    for number, messages in enumerate(conversations):
        try:
            found.append(template.rendered(messages))
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
                         where="tokenizer", mend="convert the tokenizer, or give the model's tokenizer.json")
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


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    try:
        import jinja2.ext
    except ImportError:
        raise InputError("the package that runs chat templates is missing", where="tokenizer",
                         mend="pip install 'tidewheel[tokenizers]'") from None

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`: what is between is set between `BEGIN` and `END`."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return BEGIN + caller() + END

    from tidewheel.data.tokenize.template_work import bounded_environment

    environment = bounded_environment({"tojson": _tojson}, [Generation])
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise InputError(f"the chat template is no valid Jinja ({str(error)[:150]})", where="tokenizer",
                         mend="correct the template") from None


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
            sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
