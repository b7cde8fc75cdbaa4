"""A generator in the process that trains: both take turns, and between turns it holds no memory.

Training waits for the rollouts of its next step, so its weights do not change while they are sampled. The generator
reads them where they are. What it makes of them for sampling, and keys and values, live as long as its turn: they are
gone when training goes on.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from tidewheel.inference.decoding import released
from tidewheel.post import policy
from tidewheel.post.fetching import Fetched, Fetcher
from tidewheel.post.generator import Generator
from tidewheel.post.groups import Group, Job
from tidewheel.post.policy import Version
from tidewheel.train.policy import resident


class ColocatedGenerator(Generator):
    """Samples with the weights that train in this process; if they are not there, with published ones."""

    def _load(self, version: Version) -> Fetched:
        """Have a version of the policy; return what was read for it."""
        if version.digest == self._loaded:
            return Fetched()
        own = resident.held(self._run.uri, version.files[0].whole.hash) if len(version.files) == 1 else None
        if own is None or self._model is None:
            self._materialise()
            return super()._load(version)
        policy.check(own, version, self._model, self._run.uri)
        self._model.load_state_dict(own, assign=True)
        self._loaded = version.digest
        return Fetched()

    def rest(self) -> None:
        """Give back the memory of a turn."""
        self._loaded = ""
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

    def submit(self, job: Job) -> None:
        """See `Pool`."""
        self._jobs.append(job)

    def next(self, seconds: float) -> Group | None:
        """See `Pool`. The turn ends with the last group that was submitted."""
        if not self._jobs:
            return None
        if self._generator is None:
            self._generator = self._started()
        group = self._generator.make(self._jobs.popleft())
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
