"""Rendering of conversations with the Jinja template of a model's `tokenizer_config.json`, as in `transformers`.

The template gets the same variables as from `apply_chat_template`. It runs in a sandbox that limits its work
(`template_work`) and has no clock (`template_date`). The text between `{% generation %}` and `{% endgeneration %}` is
the assistant's. In a template without these marks, the assistant's text is what a turn adds to the conversation and
generation prompt before it, up to the last control token (the end of the turn). A message with weight 0 is not learnt.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal

from tidewheel.data.readers.messages import ASSISTANT, MARKS
from tidewheel.data.tokenize.template_date import strftime_of
from tidewheel.errors import InputError

PLAIN, BEGIN, END = MARKS
_ESCAPED_PLAIN = json.dumps(PLAIN).strip('"')
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_TRIALS = ([{"role": "user", "content": "a"}],
           [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}])
_BLOCKS = re.compile(f"([{BEGIN}{END}])")
_ANSWER = "answer"
_ANSWERED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None
Loss = Literal["assistant", "all", "last_turn"]
_REASONING = ("reasoning_content", "thinking", "reasoning")  # transformers' names for one field


class Refused(Exception):
    """Refusal of a conversation by the template, with the reason."""


@dataclass(frozen=True)
class Rendered:
    """Conversation as text with control tokens.

    Args:
        text: the text. `PLAIN` marks a control token that a message spells out, which is plain text.
        spans: [begin, end) of the characters that the assistant says, in order.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


def read_template(config: bytes | None, template: bytes | None, *, where: str, date: datetime | None = None) -> str:
    """Read a chat template and return it as JSON text for `ChatTemplate`.

    The text has the keys "template" and "tokens". If known, it also has "tool_template", for conversations with tools,
    and "date".

    Args:
        config: bytes of tokenizer_config.json, or None.
        template: bytes of a Jinja file that overrides the configuration's `chat_template`, or None.
        where: name of the files, for errors.
        date: value of `strftime_now`.

    Raises:
        InputError: there is no template, it is not valid Jinja, it needs a date and none is set, or the configuration
            is not a JSON object.
    """
    try:
        values = json.loads(config) if config is not None else {}
        source = template.decode("utf-8") if template is not None else values.get("chat_template")
        more = {} if date is None else {"date": date.isoformat()}
        if isinstance(source, list):  # several named templates
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
            more |= {"tool_template": named["tool_use"]} if isinstance(named.get("tool_use"), str) else {}
        tokens = {name: values[name] for name in _TOKENS if values.get(name)}
        tokens = {name: value["content"] if isinstance(value, dict) else str(value) for name, value in tokens.items()}
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise InputError(f"not a tokenizer_config.json ({str(error)[:150]})", where=where,
                         fix="give the file that belongs to the tokenizer") from None
    if not isinstance(source, str):
        raise InputError("no chat template", where=where,
                         fix="put tokenizer_config.json with a chat_template beside the tokenizer, or name a Jinja "
                             "file in tokenize.chat_template")
    values = json.dumps({"template": source, "tokens": tokens, **more}, sort_keys=True)
    _try(ChatTemplate(values, ()), where)
    return values


def _try(template: ChatTemplate, where: str) -> None:
    """Raise InputError if the template does too much work even for simple conversations."""
    from tidewheel.data.tokenize.template_work import TooMuchWork

    for messages in _TRIALS:
        try:
            template.text(messages, add_generation_prompt=True)
        except Refused as error:  # a template may require other roles
            if isinstance(error.__cause__, TooMuchWork):
                raise InputError(f"the chat template is not usable: {error.__cause__}", where=where,
                                 fix="take the template from the model's own tokenizer_config.json") from None
        except InputError as error:
            raise InputError(error.what, where=where, fix=error.fix) from None


@dataclass(frozen=True)
class _Program:
    """Compiled template; `is_marked` if it marks what the assistant says."""

    template: Any
    is_marked: bool

    @classmethod
    def of(cls, source: str) -> _Program:
        return cls(_compiled(source), re.search(r"\{%-?\s*generation\b", source) is not None)


class ChatTemplate:
    """Renderer of conversations.

    Args:
        values: result of `read_template`.
        special: all special tokens of the tokenizer.
    """

    def __init__(self, values: str, special: Sequence[str]) -> None:
        parsed = json.loads(values)
        self.source = values
        self._tokens = parsed["tokens"]
        self._program = _Program.of(parsed["template"])
        self._tool_program = _Program.of(parsed.get("tool_template", parsed["template"]))
        date = parsed.get("date")
        self._strftime_now = strftime_of(datetime.fromisoformat(date) if date else None)
        names = sorted((re.escape(name) for name in special), key=len, reverse=True)
        self.special = re.compile("|".join(names) or r"(?!)")

    def text(self, messages: Messages, tools: Tools = None, *, add_generation_prompt: bool = False) -> str:
        """Return the template's output, with `MARKS` in it.

        Args:
            messages: the conversation.
            tools: its tools.
            add_generation_prompt: let the template append the beginning of a turn of the assistant.

        Raises:
            Refused: the template does not accept the conversation.
            InputError: it needs a date, and the date is not set.
        """
        from jinja2 import TemplateError

        from tidewheel.data.tokenize.template_work import WORK, WORK_OF_INPUT, rendered, size, work_limit

        safe = [self._message(message) for message in messages]
        safe_tools = self._guarded(list(tools)) if tools else None
        program = self._tool_program if tools else self._program
        try:
            with work_limit(WORK + WORK_OF_INPUT * size([safe, safe_tools], sys.maxsize)):
                return rendered(program.template, messages=safe, tools=safe_tools, documents=None,
                                add_generation_prompt=add_generation_prompt, strftime_now=self._strftime_now,
                                **self._tokens)
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError,
                RecursionError) as error:
            raise Refused(f"{type(error).__name__}: {error}"[:200]) from error

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message for the template. The reader has checked its role, so it has no marks."""
        return {name: value if name == "role" else self._guarded(value)
                for name, value in _as_transformers(message).items()}

    def _guarded(self, value: Any) -> Any:
        """Return `value` with `PLAIN` inside every special token that its strings spell out."""
        if isinstance(value, str):
            return self.special.sub(lambda match: match[0][0] + PLAIN + match[0][1:], value)
        if isinstance(value, Mapping):
            return {name: self._guarded(inner) for name, inner in value.items()}
        return [self._guarded(inner) for inner in value] if isinstance(value, list) else value

    def rendered(self, messages: Messages, tools: Tools = None, loss: Loss = "assistant") -> Rendered:
        """Return the conversation as text, with the spans that are learnt.

        Args:
            messages: the conversation.
            tools: its tools.
            loss: setting of `TokenizeStep`.

        Raises:
            Refused: the template does not accept the conversation, or the spans are ambiguous.
        """
        if loss == "all":
            return self._all(messages, tools)
        if loss == "last_turn":
            messages = _without_earlier(messages)
        text = self.text(messages, tools)
        if not (self._tool_program if tools else self._program).is_marked:
            return Rendered(text, tuple(self._turn(messages, tools, index, text)
                                        for index, message in enumerate(messages)
                                        if message["role"] == ASSISTANT and message.get("weight", 1)))
        parts = _BLOCKS.split(text)
        spans: list[tuple[int, int]] = []
        position = 0
        for part in parts:
            if part == BEGIN:
                spans.append((position, position))
            elif part == END:
                spans[-1] = (spans[-1][0], position)
            else:
                position += len(part)
        return Rendered("".join(part for part in parts if part not in (BEGIN, END)), _weighted(spans, messages))

    def _all(self, messages: Messages, tools: Tools) -> Rendered:
        """Return the conversation with the spans between the messages of weight 0."""
        text = _BLOCKS.sub("", self.text(messages, tools))
        spans: list[tuple[int, int]] = []
        position = 0
        for index, message in enumerate(messages):
            if message.get("weight", 1):
                continue
            begin, end = (len(part) for part in self._around(messages, tools, index, text))
            spans.append((position, begin))
            position = end
        return Rendered(text, (*spans, (position, len(text))))

    def _around(self, messages: Messages, tools: Tools, index: int, text: str) -> tuple[str, str]:
        """Return `text` before message `index`, and up to its end."""
        before = _BLOCKS.sub("", self.text(messages[:index], tools)) if index else ""
        after = _BLOCKS.sub("", self.text(messages[: index + 1], tools)) if index + 1 < len(messages) else text
        if not (text.startswith(after) and after.startswith(before)):
            raise Refused("the template changes earlier messages, so the tokens of one with weight 0 are ambiguous")
        return before, after

    def _turn(self, messages: Messages, tools: Tools, index: int, text: str) -> tuple[int, int]:
        """Return the span of the turn of one message."""
        before = self.text(messages[:index], tools, add_generation_prompt=True)
        after = text if index + 1 == len(messages) else self.text(messages[: index + 1], tools)
        if not (text.startswith(after) and after.startswith(before)):
            raise Refused("the template changes earlier turns, so the tokens of a turn are ambiguous; mark them with "
                          "{% generation %} and {% endgeneration %}")
        return len(before), self.turn_end(after, len(before))

    def learns(self, loss: Loss) -> bool:
        """Return whether the answer of a simple conversation is learnt; True if the template does not accept one.

        Args:
            loss: setting of `TokenizeStep`.
        """
        try:
            rendered = self.rendered(_ANSWERED, loss=loss)
        except Refused:
            return True
        return any(_ANSWER in rendered.text[begin:end] for begin, end in rendered.spans)

    def turn_token(self) -> str | None:
        """Return the special token that ends a turn of the assistant; None if the template writes none."""
        try:
            text = self.text(_ANSWERED)
        except Refused:
            return None
        answer = text.rfind(_ANSWER)
        found = self.special.search(text, answer + len(_ANSWER)) if answer >= 0 else None
        return found[0] if found else None

    def turn_end(self, text: str, begin: int) -> int:
        """Return the end of the turn that begins at `begin`.

        It is the end of the last control token if only white space follows, and the end of the text otherwise.
        """
        ends = [match.end() for match in self.special.finditer(text, begin)]
        return ends[-1] if ends and not text[ends[-1] :].strip() else len(text)


def _as_transformers(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as `apply_chat_template` passes it to a template, without the weight."""
    fields = {name: value for name, value in message.items() if value is not None and name != "weight"}
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _without_earlier(messages: Messages) -> Messages:
    """Return the messages with weight 0 for all of the assistant's before the user's last one."""
    last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return [{**message, "weight": 0} if index < last and message["role"] == ASSISTANT else message
            for index, message in enumerate(messages)]


def _weighted(spans: Sequence[tuple[int, int]], messages: Messages) -> tuple[tuple[int, int], ...]:
    """Return the spans of the assistant's messages whose weight is not 0."""
    weights = [message.get("weight", 1) for message in messages if message["role"] == ASSISTANT]
    if all(weights):
        return tuple(spans)
    if len(spans) != len(weights):
        raise Refused(f"the template has {len(spans)} {{% generation %}} blocks for {len(weights)} messages of the "
                      "assistant, so their weights are ambiguous")
    return tuple(span for span, weight in zip(spans, weights, strict=True) if weight)


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    try:
        import jinja2.ext
    except ImportError:
        raise InputError("the package jinja2, which runs chat templates, is not installed", where="tokenizer",
                         fix="pip install 'tidewheel[tokenizers]'") from None

    class Generation(jinja2.ext.Extension):
        """Tag `{% generation %}`, which encloses its body in `BEGIN` and `END`."""

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
        raise InputError(f"the chat template is not valid Jinja ({str(error)[:150]})", where="tokenizer",
                         fix="correct the template") from None


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
            sort_keys: bool = False) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(_ESCAPED_PLAIN, PLAIN) if ensure_ascii else text


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
