"""A generator in the process that trains: both take turns, and between turns it holds no memory.

Training waits for the rollouts of its next step, so its weights do not change while they are sampled. The generator
reads them where they are. What it makes of them for sampling, and keys and values, live as long as its turn: they are
gone when training goes on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tidewheel.inference.decoding import released
from tidewheel.inference.group import Answer, sample_groups
from tidewheel.post import policy
from tidewheel.post.fetching import Fetched, Fetcher
from tidewheel.post.generator import Generator
from tidewheel.post.groups import Group, Job
from tidewheel.post.policy import Version
from tidewheel.post.waiting import patiently
from tidewheel.shards.order import hash64
from tidewheel.train.policy import resident

MOST_ROWS = 256
"""Answers that are decoded together, which bounds the memory of keys and values."""


class ColocatedGenerator(Generator):
    """Samples with the weights that train in this process; if they are not there, with published ones."""

    _ahead: dict[int, list[Answer]]  # by stream, answers that no group has yet
    _share = 0.0  # processor time of each of them

    def make(self, job: Job) -> Group:
        """See `Generator.make`."""
        share = self._share if hash64(job.position) in self._ahead else 0.0
        group = super().make(job)
        return replace(group, seconds=group.seconds + share)

    def _load(self, version: Version) -> Fetched:
        """Have a version of the policy; return what was read for it."""
        if version.digest == self._loaded:
            return Fetched()
        own = resident.held(self._run.uri, version.files[0].whole.hash) if len(version.files) == 1 else None
        if own is None or self._model is None:
            self._materialise()
            return super()._load(version)
        shapes = {name: value.shape for name, value in self._model.state_dict().items()}
        policy.check(own, version, shapes, self._run.uri)
        self._model.load_state_dict(own, assign=True)
        self._loaded = version.digest
        return Fetched()

    def make_ahead(self, jobs: Sequence[Job]) -> None:
        """Sample groups of one turn together, which `make` then judges one by one.

        Only groups whose answers do not depend on what they are decoded with.
        """
        began = time.process_time()
        rollouts, model = self._rollouts, self._model
        if model is None or rollouts.environment is not None or self._settings.model.attention != "exact":
            return
        patiently(lambda: self._load(jobs[0].version), self._settings)
        by_length: dict[int, list[Job]] = {}
        for job in jobs:
            if job.version == jobs[0].version:
                by_length.setdefault(len(job.prompt.tokens), []).append(job)
        most = max(1, MOST_ROWS // rollouts.group)
        for same in by_length.values():
            for begin in range(0, len(same), most):
                part = same[begin:begin + most]
                streams = [hash64(job.position) for job in part]
                groups = sample_groups(model, [job.prompt.tokens for job in part], range(rollouts.group),
                                       self._sampling, key=hash64(rollouts.seed), streams=streams)
                self._ahead |= dict(zip(streams, groups))
        self._share = (time.process_time() - began) / len(jobs)

    def _sample(self, prompt: Sequence[int], samples: Sequence[int], sampling: Any, **about: Any) -> Any:
        """Return answers, see `groups.SampleGroup`; those of `make_ahead`, if it has made them."""
        ahead = self._ahead.pop(about["stream"], None)
        return super()._sample(prompt, samples, sampling, **about) if ahead is None else ahead

    def rest(self) -> None:
        """Give back the memory of a turn."""
        self._loaded = ""
        self._ahead = {}
        self._fetcher = Fetcher(self._run)
        if self._model is not None:
            released(self._model)
            self._model.to_empty(device="meta")

    def _materialise(self) -> None:
        """Give the model memory of its own."""
        if self._model is not None and next(self._model.parameters()).is_meta:
            self._model.to_empty(device="cpu")


class ColocatedPool:
    """One generator, which works in the thread that asks for groups.

    Args:
        arguments: of `Generator`.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        import torch

        self._arguments, self._threads = arguments, torch.get_num_threads()
        self._generator: ColocatedGenerator | None = None
        self._jobs: deque[Job] = deque()
        self._ahead = 0  # jobs at the head of the queue whose groups are sampled

    def submit(self, job: Job) -> None:
        """See `Pool`."""
        self._jobs.append(job)

    def next(self, seconds: float) -> Group | None:
        """See `Pool`. The turn ends with the last group that was submitted."""
        if not self._jobs:
            return None
        if self._generator is None:
            self._generator = self._started()
        if not self._ahead:
            self._generator.make_ahead(self._jobs)
            self._ahead = len(self._jobs)
        group = self._generator.make(self._jobs.popleft())
        self._ahead -= 1
        if not self._jobs:
            self._generator.rest()
        return group

    def _started(self) -> ColocatedGenerator:
        import torch

        generator = ColocatedGenerator(*self._arguments)
        torch.set_num_threads(self._threads)  # that of this process; products have the bits of training then
        generator.rest()
        return generator

    def close(self) -> None:
        """See `Pool`."""
        if self._generator is not None:
            self._generator.rest()
