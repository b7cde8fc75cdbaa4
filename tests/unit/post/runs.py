"""A small run of reinforcement learning, and pools that work without processes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.unit.train.helpers import write_tokenizer
from tidewheel import storage
from tidewheel.config import build
from tidewheel.post.generator import Generator
from tidewheel.post.groups import Group, Job
from tidewheel.train.config import TrainConfig


def rollout_run(folder: Path, run: str = "run", *overrides: str) -> TrainConfig:
    """Return a run of GRPO: 8 groups of 4 answers a step, which are right if they begin with a letter up to m."""
    if not (folder / "prompts.jsonl").exists():
        write_tokenizer(storage.store(folder))
        lines = [{"prompt": f"{chr(97 + index)} {chr(122 - index)}", "id": f"p{index}"} for index in range(20)]
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    values = {
        "run": {"id": run, "uri": str(folder / "runs")}, "steps": 4, "reproducible": True,
        "model": {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 64, "init_std": 0.1,
                  "tie_embeddings": True, "max_sequence_length": 16, "attention": "exact"},
        "optimizer": {"learning_rate": 3e-2}, "schedule": {"warmup_steps": 1, "final_fraction": 1.0},
        "objective": {"kind": "grpo"},
        "batch": {"global_sequences": 32, "micro_sequences": 8, "virtual_ranks": 2, "pad_to_multiple_of": 8},
        "rollouts": {"prompts": str(folder / "prompts.jsonl"), "tokenizer": str(folder / "tokenizer.json"), "group": 4,
                     "answer_tokens": 5, "reward": {"kind": "regex", "pattern": "^[a-m]"}},
        "evaluation": {"sample_tokens": 0}, "checkpoint": {"every_steps": 2}, "elastic": {"max_workers": 2}}
    return build(TrainConfig, values, overrides)


class InlinePool:
    """A generator in the collector's thread.

    Args:
        arguments: of `Generator`.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self._generator, self._jobs = Generator(*arguments), []

    def submit(self, job: Job) -> None:
        self._jobs.append(job)

    def next(self, seconds: float) -> Group | None:
        return self._generator.make(self._jobs.pop())

    def close(self) -> None:
        self._generator.close()


class ScriptedPool:
    """Answers each job by a function, in a random order.

    Args:
        answer: from a job to its group.
        seed: of the order.
    """

    def __init__(self, answer: Callable[[Job], Group], seed: int = 0) -> None:
        self._answer, self._random, self._jobs = answer, random.Random(seed), []
        self.submitted: list[int] = []

    def submit(self, job: Job) -> None:
        self._jobs.append(job)
        self.submitted.append(job.position)

    def next(self, seconds: float) -> Group | None:
        return self._answer(self._jobs.pop(self._random.randrange(len(self._jobs))))

    def close(self) -> None:
        pass


def inline(arguments: tuple[Any, ...], config: TrainConfig, on_event: Callable[..., None]) -> InlinePool:
    """Return an `InlinePool`, as `making_rollouts` asks for one."""
    return InlinePool(arguments)


def logged(folder: Path, run: str, file: str) -> Sequence[dict[str, Any]]:
    """Return the records of a run's log."""
    return [json.loads(line) for line in (folder / "runs" / run / file).read_text().splitlines()]
