"""Convert records of chat and preference data into documents.

A conversation is a list of messages (for their form see `messages`). The text of its document consists of the contents
and tool calls, separated by blank lines; deduplication and decontamination use it like any other text. The messages
themselves, and the tools that the assistant may call, stay in the document's `meta`, from which they are tokenized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidewheel.data.readers.messages import ASSISTANT, Message, UnusableError, checked, checked_tools, text_of

if TYPE_CHECKING:
    from tidewheel.data.read_config import ReadConfig

MESSAGES, TOOLS = "messages", "tools"
"""Fields of `meta` for the messages of a conversation, and for the tools of a conversation or pair."""
MARGIN = "_margin"
"""Field of `meta` for the margin of a pair."""
STEPS = "_steps"
"""Field of `meta` for the steps of an answer: [end of the step in the answer's text, whether it is right]."""
_PAIR = ("prompt", "chosen", "rejected")
_ALPACA = ("Below is an instruction that describes a task{more}. Write a response that appropriately completes the "
           "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:")
_ALPACA_MORE = ", paired with an input that provides further context"


def as_document(values: dict[str, Any], config: ReadConfig) -> None:
    """Convert a record into a document in place: set its text, and move its messages to canonical names.

    Chat data: convert any layout of the record to "messages". Preferences: convert `config.prompt`, `config.chosen` and
    `config.rejected` to lists of messages; if there is no prompt, use the messages that both answers begin with.

    Raises:
        UnusableError: the record cannot be used.
    """
    tools = checked_tools(values.pop(config.tools, None), config.tools)
    if config.kind == "chat":
        messages = _chat(values, config)
    else:
        single = _labelled if config.label else _with_steps if config.step_labels else _preferences
        messages = single(values, config)
    if tools:
        values[TOOLS] = tools
    values[config.text_name] = text_of(messages)


def _chat(values: dict[str, Any], config: ReadConfig) -> list[Message]:
    messages = _conversation(values, config)
    own = [message for message in messages if message["role"] == ASSISTANT]
    if not own:
        raise UnusableError("no_assistant_turn",
                            f"the roles are {', '.join(message['role'] for message in messages[:8])}")
    if not any(message.get("weight", 1) for message in own):
        raise UnusableError("no_assistant_turn", "every message of the assistant has weight 0")
    values[MESSAGES] = messages
    return messages


def _conversation(values: dict[str, Any], config: ReadConfig) -> list[Message]:
    """Remove the messages from a record and return them. If it has several layouts, use the first."""
    for name in (config.messages, config.conversations):
        if values.get(name) is not None:
            messages = checked(values.pop(name), name)
            return messages if name == config.messages else _with_system(messages, values, config)
    if values.get(config.completion) is not None:
        prompt = _as_messages(values.pop(config.prompt, None), "user")
        completion = _as_messages(values.pop(config.completion), ASSISTANT)
        return checked([*prompt, *completion], config.completion)
    if isinstance(values.get(config.instruction), str):
        if not isinstance(values.get(config.output), str):
            raise UnusableError("missing_messages", f"{config.instruction!r} without the text {config.output!r}")
        instruction = _as_messages(_instruction(values, config), "user")
        output = _as_messages(values.pop(config.output), ASSISTANT)
        return _with_system(checked([*instruction, *output], config.output), values, config)
    raise UnusableError("missing_messages", f"none of the fields {config.messages!r}, {config.conversations!r}, "
                                            f"{config.completion!r}, {config.instruction!r}")


def _instruction(values: dict[str, Any], config: ReadConfig) -> str:
    """Remove the instruction and the optional input from an Alpaca record, and return them as the user's prompt."""
    instruction = values.pop(config.instruction)
    more = values.pop(config.input, None)
    if not (more is None or isinstance(more, str)):
        raise UnusableError("invalid_messages", f"{config.input!r} is no text")
    if not instruction.strip():
        raise UnusableError("empty_conversation", f"{config.instruction!r} is empty")
    more = more if more and more.strip() else ""
    if config.alpaca_prompt == "plain":
        return f"{instruction}\n\n{more}" if more else str(instruction)
    return _ALPACA.format(more=_ALPACA_MORE if more else "", instruction=instruction,
                          input=f"### Input:\n{more}\n\n" if more else "")


def _with_system(messages: list[Message], values: dict[str, Any], config: ReadConfig) -> list[Message]:
    """Prepend the record's system prompt, a separate field in ShareGPT and Alpaca, unless the messages have one."""
    if messages[0]["role"] == "system" or values.get(config.system) is None:
        return messages
    return [*checked(_as_messages(values.pop(config.system), "system"), config.system), *messages]


def _preferences(values: dict[str, Any], config: ReadConfig) -> list[Message]:
    names = (config.prompt, config.chosen, config.rejected)
    if config.margin:
        values[MARGIN] = _margin(values.pop(config.margin, None), config.margin)
    prompt = _as_messages(values.pop(config.prompt, None), "user")
    given_chosen = _as_messages(values.pop(config.chosen, None), ASSISTANT)
    given_rejected = _as_messages(values.pop(config.rejected, None), ASSISTANT)
    chosen = checked(given_chosen, config.chosen)
    rejected = checked(given_rejected, config.rejected)
    if prompt == []:
        shared = 0
        while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
            shared += 1
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    prompt = checked(prompt, config.prompt)
    for name, part in zip(names[1:], (chosen, rejected), strict=True):
        _check_answer(name, part)
    prompt, chosen, rejected = map(_without_weights, (prompt, chosen, rejected))
    if chosen == rejected:
        raise UnusableError("no_preference", "chosen and rejected are the same")
    values |= dict(zip(_PAIR, (prompt, chosen, rejected), strict=True))
    return [*prompt, *chosen, *rejected]


def _labelled(values: dict[str, Any], config: ReadConfig) -> list[Message]:
    """Convert a prompt, an answer and a label to a pair without its other answer."""
    label = values.pop(config.label, None)
    if not isinstance(label, bool):
        raise UnusableError("invalid_label", f"{config.label} is {label!r}, not true or false"[:100])
    prompt = _without_weights(checked(_as_messages(values.pop(config.prompt, None), "user"), config.prompt))
    answer = checked(_as_messages(values.pop(config.completion, None), ASSISTANT), config.completion)
    _check_answer(config.completion, answer)
    answer = _without_weights(answer)
    values |= dict(zip(_PAIR, (prompt, answer, []) if label else (prompt, [], answer), strict=True))
    return [*prompt, *answer]


def _with_steps(values: dict[str, Any], config: ReadConfig) -> list[Message]:
    """Convert a prompt and the steps of an answer to a pair without its other answer."""
    labels, steps = values.pop(config.step_labels, None), values.pop(config.completion, None)
    are_steps = isinstance(steps, list) and steps and all(isinstance(step, str) and step.strip() for step in steps)
    are_labels = isinstance(labels, list) and all(isinstance(label, bool) for label in labels)
    if not (are_steps and are_labels) or len(steps) != len(labels):
        raise UnusableError("invalid_steps", f"{config.completion} and {config.step_labels} are not a list of texts "
                                             "and a list of as many true or false")
    separated = [step + config.step_separator for step in steps[:-1]] + steps[-1:]
    ends = [sum(map(len, separated[:index + 1])) for index in range(len(steps))]
    values[STEPS] = list(zip(ends, labels))
    prompt = _without_weights(checked(_as_messages(values.pop(config.prompt, None), "user"), config.prompt))
    answer = checked(_as_messages("".join(separated), ASSISTANT), config.completion)
    values |= dict(zip(_PAIR, (prompt, answer, []), strict=True))
    return [*prompt, *answer]


def _check_answer(name: str, answer: list[Message]) -> None:
    if any(message["role"] != ASSISTANT for message in answer):
        raise UnusableError("no_assistant_turn", f"{name} must hold turns of the assistant alone")
    if not all(message.get("weight", 1) for message in answer):
        raise UnusableError("invalid_weight", f"a message of {name} has weight 0; answers are compared as a whole")


def _margin(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise UnusableError("invalid_margin", f"{name} is {value!r}, not a number"[:100])
    return float(value)


def _without_weights(messages: list[Message]) -> list[Message]:
    return [{name: value for name, value in message.items() if name != "weight"} for message in messages]


def _as_messages(value: Any, role: str) -> Any:
    """Return plain text as one message of this role, and None as no messages."""
    if value is None:
        return []
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def pair_of(meta: Mapping[str, Any]) -> tuple[list[Message], list[Message], list[Message]]:
    """Return (prompt, chosen, rejected) from the meta of a preference document."""
    prompt, chosen, rejected = (meta[name] for name in _PAIR)
    return prompt, chosen, rejected
