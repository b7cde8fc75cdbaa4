"""`tidewheel generate`: text from a checkpoint, or a conversation with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

from cyclopts import Parameter

from tidewheel.errors import ConfigError
from tidewheel.printable import printable_lines


def generate(
    source: Annotated[str, Parameter(help="URI of a run (its newest complete checkpoint), or of one checkpoint, "
                                          "RUN/checkpoints/step_00000100.")],
    *,
    prompt: Annotated[str, Parameter(help="Beginning of the text; with --chat, what the user says.")] = "",
    special_tokens: Annotated[bool, Parameter(negative="", help="Encode special tokens in the prompt, such as "
                              "<|im_start|>, as such: for a prompt that a chat template made.")] = False,
    chat: Annotated[bool, Parameter(negative="", help="Hold a conversation with the model's chat template. A line of "
                                    "the standard input is a turn of the user.")] = False,
    messages: Annotated[str, Parameter(help="With --chat: a JSON file with the messages instead. Each turn of the user "
                                            "without an answer is answered.")] = "",
    adapter: Annotated[list[str] | None, Parameter(negative="", consume_multiple=False, help="Adapter of this model as "
                       "NAME=URI: a run, one of its checkpoints, or a folder that peft wrote; may be repeated. The "
                       "prompt is continued with each.")] = None,
    prompts: Annotated[str, Parameter(help="A JSONL file with a prompt and the name of an adapter in each line, "
                                           "instead of --prompt.")] = "",
    system: Annotated[str, Parameter(help="With --chat: the system's message.")] = "",
    chat_template: Annotated[str, Parameter(help="A Jinja file; default: that of the run's conversations.")] = "",
    tokens: Annotated[int, Parameter(help="Tokens to write, at most; the text may end earlier.")] = 100,
    temperature: Annotated[float, Parameter(help="Sampling temperature; 0 always takes the most likely token.")] = 0.8,
    top_k: Annotated[int, Parameter(help="Sample from the K most likely tokens; 0: from all.")] = 50,
    top_p: Annotated[float, Parameter(help="Sample from the fewest tokens whose probabilities reach this sum.")] = 1.0,
    seed: Annotated[int, Parameter(help="Seed; the same seed gives the same text.")] = 0,
    tokenizer: Annotated[str, Parameter(help="Tokenizer file; default: that of the run's shard set.")] = "",
    device: Annotated[str, Parameter(help="cpu, cuda or cuda:1; default: the first GPU, or else cpu.")] = "",
) -> int:
    """Continue a text with the model of a checkpoint, or talk to it, from any number of workers and any layout."""
    if tokens < 0 or temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        raise ConfigError("--tokens, --temperature and --top-k must be 0 or more, --top-p above 0 and at most 1",
                          where="tidewheel generate", fix="correct the option")
    if (messages or system) and not chat:
        raise ConfigError("--messages and --system are of a conversation", where="tidewheel generate", fix="add --chat")
    if chat and (special_tokens or (messages and prompt)):
        raise ConfigError("--chat takes --prompt or --messages, and makes the special tokens itself",
                          where="tidewheel generate", fix="leave one of the options out")
    if prompts and (prompt or chat):
        raise ConfigError("--prompts is instead of --prompt and --chat", where="tidewheel generate",
                          fix="leave one of the options out")
    if chat and adapter and len(adapter) > 1:
        raise ConfigError("a conversation is held with one adapter", where="--adapter", fix="give one --adapter")
    from tidewheel.inference.adapters import named, read_prompts
    from tidewheel.inference.writer import Writer

    adapters = named(adapter or ())
    requests = read_prompts(prompts, list(adapters)) if prompts else []
    writer = Writer.open(source, tokenizer=tokenizer, chat_template=chat_template, device=device, adapters=adapters)
    sampling: dict[str, Any] = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
                                "seed": seed}
    if chat:
        with writer.using("".join(adapters)):
            _converse(writer, prompt, messages, system, sampling)
        return 0
    for request in requests:
        with writer.using(request.adapter):
            text = writer.write(request.text, special_tokens=special_tokens, **sampling)
        print(json.dumps({"prompt": request.text, "adapter": request.adapter, "text": text}), flush=True)
    for name in () if prompts else adapters or ("",):
        with writer.using(name):
            text = writer.write(prompt, special_tokens=special_tokens, **sampling)
        print(f"[{name}] " * (len(adapters) > 1) + printable_lines(text), flush=True)
    return 0


def _converse(writer: Any, prompt: str, file: str, system: str, sampling: dict[str, Any]) -> None:
    """Print the assistant's turns as they are sampled; an empty line separates them."""
    from tidewheel.inference.chat import Chat, is_answered, read_conversation

    if file:
        given, tools = read_conversation(file)
    else:
        given, tools = [], None
    chat = Chat(writer, tools)
    if system:
        chat.say({"role": "system", "content": system}, "--system")
    for index, message in enumerate(given):
        chat.say(message, file)
        if is_answered(given, index):
            _answer(chat, sampling)
    if not file:
        for line in [prompt] if prompt else _lines():
            chat.say({"role": "user", "content": line}, "the user's turn")
            _answer(chat, sampling)


def _lines() -> Iterator[str]:
    """Yield the lines of the standard input that are not blank, after a prompt where a person types them."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\r\n")


def _answer(chat: Any, sampling: dict[str, Any]) -> None:
    """Print one turn; each turn of a conversation has draws of its own."""
    for piece in chat.answer(**{**sampling, "seed": sampling["seed"] + len(chat.messages)}):
        print(printable_lines(piece), end="", flush=True)
    print("\n", flush=True)
