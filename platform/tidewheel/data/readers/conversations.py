"""Records of chat and preference data as documents: what they must look like, and the text that stages compare.

A conversation is a list of messages (`messages` says of which form). Its document's text is what was said, contents and
tool calls with blank lines between them: deduplication and decontamination work on that as on any text. The messages
themselves, and the tools that the assistant may call, stay in the document's `meta`, and are what is tokenized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidewheel.data.readers.messages import ASSISTANT, Message, UnusableError, checked, checked_tools, text_of

if TYPE_CHECKING:
    from tidewheel.data.read_config import ReadConfig

MESSAGES, TOOLS = "messages", "tools"
"""Where `meta` holds a conversation, and the tools of a conversation or pair."""
_PAIR = ("prompt", "chosen", "rejected")
_ALPACA = ("Below is an instruction that describes a task{more}. Write a response that appropriately completes the "
           "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:")
_ALPACA_MORE = ", paired with an input that provides further context"


def as_document(values: dict[str, Any], config: ReadConfig) -> None:
    """Turn a record into a document in place: its text is set, its messages go by canonical names.

    Chat: whichever layout the record has becomes "messages". Preferences: `config.prompt`, `config.chosen` and
    `config.rejected` become lists of messages; without a prompt it is what chosen and rejected begin with.

    Raises:
        UnusableError: what is wrong with the record.
    """
    tools = checked_tools(values.pop(config.tools, None), config.tools)
    said = _chat(values, config) if config.kind == "chat" else _preferences(values, config)
    if tools:
        values[TOOLS] = tools
    values[config.text_name] = text_of(said)


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
    """Take the messages out of a record, in the first of the layouts that it has."""
    for name in (config.messages, config.conversations):
        if values.get(name) is not None:
            messages = checked(values.pop(name), name)
            return messages if name == config.messages else _with_system(messages, values, config)
    if values.get(config.completion) is not None:
        spoken = [*_spoken(values.pop(config.prompt, None), "user"), *_spoken(values.pop(config.completion), ASSISTANT)]
        return checked(spoken, config.completion)
    if isinstance(values.get(config.instruction), str):
        if not isinstance(values.get(config.output), str):
            raise UnusableError("missing_messages", f"{config.instruction!r} without the text {config.output!r}")
        asked = _instruction(values, config)
        return _with_system(checked([*_spoken(asked, "user"), *_spoken(values.pop(config.output), ASSISTANT)],
                                    config.output), values, config)
    raise UnusableError("missing_messages", f"none of the fields {config.messages!r}, {config.conversations!r}, "
                                            f"{config.completion!r}, {config.instruction!r}")


def _instruction(values: dict[str, Any], config: ReadConfig) -> str:
    """Take out of an Alpaca record what the user says: its instruction, with the input if there is any."""
    instruction, more = values.pop(config.instruction), values.pop(config.input, None)
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
    """Put the record's system prompt, a field of its own in ShareGPT and Alpaca, before messages without one."""
    if messages[0]["role"] == "system" or values.get(config.system) is None:
        return messages
    return [*checked(_spoken(values.pop(config.system), "system"), config.system), *messages]


def _preferences(values: dict[str, Any], config: ReadConfig) -> list[Message]:
    names = (config.prompt, config.chosen, config.rejected)
    given = [_spoken(values.pop(name, None), role)
             for name, role in zip(names, ("user", ASSISTANT, ASSISTANT), strict=True)]
    chosen, rejected = checked(given[1], config.chosen), checked(given[2], config.rejected)
    prompt = given[0]
    if prompt == []:
        shared = 0
        while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
            shared += 1
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    prompt = checked(prompt, config.prompt)
    for name, part in zip(names[1:], (chosen, rejected), strict=True):
        if any(message["role"] != ASSISTANT for message in part):
            raise UnusableError("no_assistant_turn", f"{name} must hold turns of the assistant alone")
        if not all(message.get("weight", 1) for message in part):
            raise UnusableError("invalid_weight", f"a message of {name} has weight 0; answers are compared as a whole")
    prompt, chosen, rejected = map(_without_weights, (prompt, chosen, rejected))
    if chosen == rejected:
        raise UnusableError("no_preference", "chosen and rejected are the same")
    values |= dict(zip(_PAIR, (prompt, chosen, rejected), strict=True))
    return [*prompt, *chosen, *rejected]


def _without_weights(messages: list[Message]) -> list[Message]:
    return [{name: value for name, value in message.items() if name != "weight"} for message in messages]


def _spoken(value: Any, role: str) -> Any:
    """Plain text as one message of that role; None as no messages."""
    if value is None:
        return []
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def pair_of(meta: Mapping[str, Any]) -> tuple[list[Message], list[Message], list[Message]]:
    """(prompt, chosen, rejected) of a preference document's meta."""
    prompt, chosen, rejected = (meta[name] for name in _PAIR)
    return prompt, chosen, rejected
