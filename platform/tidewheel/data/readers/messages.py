"""Convert the messages of conversations to one form, and check them.

    {"role": "user" | ..., "content": text, "tool_calls": [...], "weight": 0 | 1, ...}

ShareGPT's {"from", "value"}, OpenAI's content parts, and tool calls whose arguments are JSON text are converted to this
form. Null fields are removed, because a row of a Parquet file has every field and a JSON record only its own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
ASSISTANT = "assistant"
MARKS = ("\ufdd0", "\ufdd1", "\ufdd2")  # Unicode noncharacters that `chat` uses as marks in rendered text
_SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT,
                   ASSISTANT: ASSISTANT, "tool": "tool", "observation": "tool", "function_response": "tool"}
_SHAREGPT_CALL = "function_call"

Message = dict[str, Any]


class UnusableError(ValueError):
    """A record that cannot be used, with a `reason` of `quarantine.REASONS` and a `detail`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def checked(value: Any, name: str) -> list[Message]:
    """Return the messages of a field in the common form. Parse the value if it is JSON text.

    Raises:
        UnusableError: the value is not a list of messages, or a message cannot be used.
    """
    if value is None:
        raise UnusableError("missing_messages", f"no field {name!r}")
    value = parsed(value)
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise UnusableError("invalid_messages", f"{name!r} is no list of messages")
    if not value:
        raise UnusableError("empty_conversation", f"{name!r} holds no message")
    messages = [_message(message, f"message {index} of {name!r}") for index, message in enumerate(value)]
    if not any(_parts(message) for message in messages):
        raise UnusableError("empty_conversation", f"every message of {name!r} is empty")
    return messages


def checked_tools(value: Any, name: str) -> list[dict[str, Any]] | None:
    """Return the tools of a field as the JSON schemas that chat templates take; None if there are none.

    Raises:
        UnusableError: the value is not a list of schemas with names.
    """
    value = parsed(value)
    if value is None or value == [] or value == "":
        return None
    if not isinstance(value, list):
        raise UnusableError("invalid_tools", f"{name!r} is no list")
    for index, tool in enumerate(value):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not _is_name(function.get("name")):
            raise UnusableError("invalid_tools", f"tool {index} of {name!r} is no object with the name of a function")
    _check_characters(value, repr(name))
    return value


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a conversation's document: contents and tool calls, separated by blank lines."""
    return "\n\n".join(itertools.chain.from_iterable(map(_parts, messages)))


def parsed(value: Any) -> Any:
    """Return the value of JSON text; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _parts(message: Mapping[str, Any]) -> list[str]:
    """Return the content of a message, unless it is blank, and its tool calls as JSON."""
    content = message.get("content") or ""
    calls = [json.dumps(call.get("function", call), ensure_ascii=False, sort_keys=True)
             for call in message.get("tool_calls") or ()]
    return [*([content] if content.strip() else []), *calls]


def _message(given: Mapping[str, Any], where: str) -> Message:
    message = {name: value for name, value in given.items() if value is not None}
    if "from" in message and "role" not in message:
        message = _from_sharegpt(message, where)
    role = message.get("role")
    if role not in ROLES:
        raise UnusableError("unknown_role", f"{where} has the role {role!r}; known are {', '.join(ROLES)}"[:200])
    if "content" in message:
        message["content"] = _content(message["content"], where)
    if calls := message.get("tool_calls"):
        if role != ASSISTANT:
            raise UnusableError("invalid_tool_call", f"{where}, of the role {role}, calls tools")
        message["tool_calls"] = _tool_calls(calls, where)
    elif "content" not in message:
        raise UnusableError("invalid_messages", f"{where} has no content")
    if role == ASSISTANT and not _parts(message):
        raise UnusableError("empty_conversation", f"{where}, the assistant's, is empty")
    if "weight" in message:
        message["weight"] = _weight(message["weight"], role, where)
    _check_characters(message, where)
    return message


def _from_sharegpt(message: Mapping[str, Any], where: str) -> Message:
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    speaker = message["from"]
    value = message.get("value")
    if speaker == _SHAREGPT_CALL:
        calls = parsed(value)
        return {**others, "role": ASSISTANT, "tool_calls": calls if isinstance(calls, list) else [calls]}
    if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
        known = ", ".join([*_SHAREGPT_ROLES, _SHAREGPT_CALL])
        raise UnusableError("unknown_role", f"{where} is from {speaker!r}; known are {known}"[:200])
    return {**others, "role": _SHAREGPT_ROLES[speaker], **({} if value is None else {"content": value})}


def _content(content: Any, where: str) -> str:
    """Return the text of a message: a string, or the concatenated texts of its parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UnusableError("invalid_messages", f"the content of {where} is neither text nor a list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            problem = f"of the type {kind!r}" if kind is not None else "no object with a type"
            raise UnusableError("unsupported_content", f"part {index} of {where} is {problem}; only text is read"[:200])
        if not isinstance(part.get("text"), str):
            raise UnusableError("invalid_messages", f"part {index} of {where} holds no text")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise UnusableError("invalid_tool_call", f"the tool calls of {where} are no list")
    return [_tool_call(call, f"tool call {index} of {where}") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Return a call with its arguments as an object, as chat templates expect; OpenAI's are JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not _is_name(function.get("name")):
        raise UnusableError("invalid_tool_call", f"{where} is no object with the name of a function")
    arguments = function.get("arguments")
    arguments = {} if arguments is None or arguments == "" else parsed(arguments)
    if not isinstance(arguments, dict):
        raise UnusableError("invalid_tool_call", f"the arguments of {where} are no JSON object")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _weight(weight: Any, role: str, where: str) -> int:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight not in (0, 1):
        raise UnusableError("invalid_weight", f"the weight of {where} is {weight!r}, neither 0 nor 1"[:200])
    if weight == 1 and role != ASSISTANT:
        raise UnusableError("invalid_weight", f"{where}, of the role {role}, has weight 1, but only what the assistant "
                                              "says is learnt")
    return int(weight)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _check_characters(value: Any, where: str) -> None:
    written = json.dumps(value, ensure_ascii=False)
    if any(mark in written for mark in MARKS):
        raise UnusableError("invalid_unicode", f"{where} holds noncharacters (U+FDD0 to U+FDD2)")
    if not written.isascii() and any("\ud800" <= character <= "\udfff" for character in written):
        raise UnusableError("invalid_unicode", f"{where} holds lone surrogates")
