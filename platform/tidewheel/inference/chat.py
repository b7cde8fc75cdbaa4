"""Conversations with a model: its own chat template, one turn of the assistant at a time."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tidewheel import storage
from tidewheel.data.readers.messages import ASSISTANT, Message, UnusableError, checked, checked_tools
from tidewheel.data.tokenize.chat import ChatTemplate, Refused, encode_rendered
from tidewheel.errors import ConfigError, InputError
from tidewheel.inference.generate import stream
from tidewheel.inference.writer import Writer
from tidewheel.shards.tokenizer import Encoder

_INCOMPLETE = "\ufffd"


class Chat:
    """A conversation with a model.

    What a message says is plain text: a special token that it spells out is encoded as its characters, so nobody can
    end a turn or speak for another role from inside a message.

    Args:
        writer: the model, with a chat template.
        tools: that the assistant may call, as JSON schemas.

    Raises:
        ConfigError: the run has no chat template.
    """

    def __init__(self, writer: Writer, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        if writer.template is None:
            raise ConfigError("the model has no chat template", where=writer.checkpoint,
                              fix="give one: --chat-template PATH/chat_template.jinja")
        self.messages: list[Message] = []
        self._writer = writer
        self._template: ChatTemplate = writer.template
        self._tools = tools

    def say(self, message: Mapping[str, Any], where: str = "message") -> None:
        """Append a message of any role.

        Args:
            message: {"role", "content", ...}.
            where: its origin, for error messages.

        Raises:
            InputError: the message cannot be used.
        """
        self.messages += checked_messages([message], where)

    def answer(self, *, tokens: int, temperature: float, top_k: int, top_p: float, seed: int) -> Iterator[str]:
        """Yield the assistant's next turn in pieces, as they are sampled, and append it to the conversation.

        Args:
            tokens: maximum number of new tokens; the context may leave fewer.
            temperature: see `inference.generate.stream`, also for the other arguments.
            top_k: sample from this number of most likely tokens.
            top_p: sample from the most likely tokens of this share.
            seed: of the draws.

        Raises:
            InputError: the template does not accept the conversation, or it fills the model's context.
        """
        writer = self._writer
        ids = self.prompt()
        room = writer.context - len(ids)
        if room < 1:
            raise InputError(f"the conversation has {len(ids)} tokens, and the model's context {writer.context}",
                             where=writer.checkpoint, fix="begin a new conversation, or say less")
        sampled = stream(writer.model, ids, tokens=min(tokens, room), context=writer.context, device=writer.device,
                         temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=writer.ends)
        said = ""
        for piece in pieces(writer.tokenizer, sampled, writer.ends):
            said += piece
            yield piece
        self.messages.append({"role": ASSISTANT, "content": said})

    def prompt(self) -> list[int]:
        """Return the tokens of the conversation and of the beginning of the assistant's turn.

        Raises:
            InputError: the template does not accept the conversation.
        """
        return encode_messages(self._writer.tokenizer, self._template, self.messages, self._tools,
                               where=self._writer.checkpoint)


def encode_messages(tokenizer: Encoder, template: ChatTemplate, messages: Sequence[Message],
                    tools: Sequence[Mapping[str, Any]] | None = None, *, where: str) -> list[int]:
    """Return the tokens of a conversation and of the beginning of the assistant's turn.

    Args:
        tokenizer: of the model.
        template: the chat template.
        messages: the conversation.
        tools: that the assistant may call.
        where: the origin of the conversation or the model, for error messages.

    Raises:
        InputError: the template does not accept the conversation.
    """
    try:
        text = template.text(messages, tools, add_generation_prompt=True)
    except Refused as error:
        raise InputError(f"the chat template does not accept the conversation: {error}", where=where,
                         fix="change the messages to what it accepts") from None
    ((ids, _),) = encode_rendered(tokenizer, template, [text])
    return [int(token) for token in ids]


def pieces(tokenizer: Encoder, tokens: Iterable[int], ends: Collection[int]) -> Iterator[str]:
    """Yield the text of tokens as it becomes known; a character whose bytes are not all there waits for them.

    Args:
        tokenizer: of the tokens.
        tokens: tokens of one text.
        ends: tokens that end it; they have no text.
    """
    seen: list[int] = []
    shown = ""
    for token in tokens:
        if token in ends:
            break
        seen.append(token)
        text = tokenizer.decode(seen)
        if not text.endswith(_INCOMPLETE) and len(text) > len(shown):
            yield text[len(shown):]
            shown = text
    text = tokenizer.decode(seen)
    if len(text) > len(shown):
        yield text[len(shown):]


def read_conversation(uri: str) -> tuple[list[Message], Sequence[Mapping[str, Any]] | None]:
    """Return the messages and the tools of a JSON file: a list of messages, or {"messages": [...], "tools": [...]}.

    Args:
        uri: path or URI of the file.

    Raises:
        InputError: the file is missing, is not JSON, or holds something else; or nothing in it is to be answered.
    """
    try:
        value = json.loads(storage.read_text(uri))
    except FileNotFoundError:
        raise InputError("there is no such file", where=uri, fix="give --messages another path") from None
    except ValueError as error:
        raise InputError(f"not a JSON file ({error})", where=uri,
                         fix='write a list of messages: [{"role": "user", "content": "..."}]') from None
    group = value if isinstance(value, dict) else {"messages": value}
    messages = checked_messages(group.get("messages"), uri)
    if messages[-1]["role"] == ASSISTANT:
        raise InputError("the last message is the assistant's, so there is nothing to answer", where=uri,
                         fix="end with a message of the user")
    try:
        return messages, checked_tools(group.get("tools"), "tools")
    except UnusableError as error:
        raise InputError(error.detail, where=uri, fix="write tools as JSON schemas of functions") from None


def is_answered(messages: Sequence[Message], index: int) -> bool:
    """Return whether the model answers message `index`: the last one, or one whose answer the file leaves out.

    Args:
        messages: of a file.
        index: of a message.
    """
    if index + 1 == len(messages):
        return True
    return messages[index]["role"] in ("user", "tool") and messages[index + 1]["role"] == "user"


def checked_messages(messages: Any, where: str) -> list[Message]:
    """Return messages in the common form.

    Args:
        messages: a list of messages, or something else.
        where: its origin, for error messages.

    Raises:
        InputError: they cannot be used.
    """
    try:
        return checked(messages, "messages")
    except UnusableError as error:
        raise InputError(error.detail, where=where,
                         fix='write messages as {"role": "user", "content": "..."}') from None
