"""Prompts of validation, answered by the model at each evaluation, in the run's answers.jsonl.

A line has "step", "id" (hash of the prompt), "prompt" or "messages", "answer" and "time"; after a rollback also
"passed_over", as in batches.jsonl. A prompt has one line at each evaluated step, whatever was killed, because a
generation first reads which lines there are. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tidewheel import jsonlog, storage
from tidewheel.errors import ConfigError
from tidewheel.jsonlog import JsonLog

if TYPE_CHECKING:
    from tidewheel.train.training import Training

ANSWERS = "answers.jsonl"
"""Name of the log."""
MAX_PROMPTS = 256
"""All ranks wait while they are answered, so a file of thousands is a mistake."""
EXAMPLE = '{"messages": [{"role": "user", "content": "..."}]} or {"prompt": "..."}'


@dataclass(frozen=True)
class Prompt:
    """A prompt of validation.

    Args:
        values: "prompt", a text to continue, or "messages", a conversation for the assistant to answer.
    """

    values: Mapping[str, Any]

    @cached_property
    def id(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of its values."""
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()[:16]


def read_prompts(uri: str) -> list[Prompt]:
    """Return the prompts of a file of JSON lines, each of them once.

    Raises:
        ConfigError: there is no such file, a line is no prompt, or there are none or too many.
    """
    where = "evaluation.answers.prompts"
    try:
        lines = storage.read_text(uri).splitlines()
    except FileNotFoundError:
        raise ConfigError(f"there is no file {uri}", where=where, fix="give the path of a file of JSON lines") from None
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompt = _prompt(line, f"{uri}, line {number}")
            prompts.setdefault(prompt.id, prompt)
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ConfigError(f"{uri} has {len(prompts)} prompts", where=where, fix=f"give 1 to {MAX_PROMPTS}")
    return list(prompts.values())


def _prompt(line: str, where: str) -> Prompt:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"not JSON ({error})", where=where, fix=f"write {EXAMPLE}") from None
    if isinstance(values, dict):
        if isinstance(values.get("prompt"), str) and values["prompt"]:
            return Prompt({"prompt": values["prompt"]})
        messages = values.get("messages")
        if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
            return Prompt({"messages": messages})
    raise ConfigError("neither a prompt nor a conversation", where=where, fix=f"write {EXAMPLE}")


class Answers:
    """Answers the prompts for one worker; all ranks make the same calls.

    Args:
        training: this worker's share of the run.
    """

    def __init__(self, training: Training) -> None:
        self._training, self._settings = training, training.config.evaluation.answers
        self._prompts: list[Prompt] = []
        self._log: JsonLog | None = None
        self._answered: set[tuple[str, int, int]] = set()
        if not self._settings.prompts or training.runtime.answerer is None:
            return
        self._prompts = training.retry(lambda: read_prompts(self._settings.prompts))
        if training.leads:
            store = training.record.store
            lines = training.retry(lambda: jsonlog.read(store, ANSWERS))
            self._answered = {_place(line) for line in lines}
            self._log = JsonLog(store, ANSWERS, order=training.runtime.generation)

    def write(self, step: int) -> None:
        """Answer the prompts that the model of this step has not answered yet, and record the answers durably.

        Raises:
            ConfigError, InputError: a prompt cannot be rendered, or fills the model's context.
        """
        training, answerer = self._training, self._training.runtime.answerer
        if not self._prompts or answerer is None:
            return
        windows = len(training.positions.windows)
        missing = [(prompt.id, step, windows) not in self._answered for prompt in self._prompts]
        if training.collectives.world_size > 1:  # rank 0 knows
            flags = training.collectives.bytes_from_first(bytes(missing))
            missing = [bool(flag) for flag in flags]
        prompts = [prompt for prompt, is_missing in zip(self._prompts, missing) if is_missing]
        if not prompts:
            return
        training.watch.mark(step, "answer")
        answers = answerer(training.model, training.source.domains, training.config, training.collectives, prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            training.watch.mark(step, "answer")  # many long answers are no hang
            if self._log is not None:
                line = {"step": step, "id": prompt.id, **prompt.values, "answer": answer, "time": time.time(),
                        **({"passed_over": windows} if windows else {})}
                self._answered.add(_place(line))
                self._log.append(line)
        if self._log is not None:
            training.retry(self._log.flush)
        training.timeline.spent("productive")

    def close(self) -> None:
        """Hand over the last lines."""
        if self._log is not None:
            self._log.close()


def _place(line: Mapping[str, Any]) -> tuple[str, int, int]:
    return line["id"], line["step"], line.get("passed_over", 0)
