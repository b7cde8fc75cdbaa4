"""How many sequences each step reads: a fixed number, or fewer at the beginning of the run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pydantic
from pydantic import Field

from tidewheel.config import Config


class RampStage(Config):
    """A part of the beginning of the run with smaller global batches."""

    sequences: int = Field(ge=1)
    """Sequences per optimizer step."""
    tokens: int = Field(ge=1)
    """Lasts so many tokens (sequences x their length, padding included), rounded up to whole steps."""


class BatchConfig(Config):
    """The global batch; it never depends on the number of workers."""

    global_sequences: int = Field(default=32, ge=1)
    """Sequences per optimizer step, over all workers."""
    micro_sequences: int = Field(default=4, ge=1)
    """Sequences per forward and backward pass; the same for every number of workers."""
    virtual_ranks: int = Field(default=4, ge=1)
    """The global batch is cut in this many slices, spread evenly over the workers: their number must divide it."""
    ramp: tuple[RampStage, ...] = ()
    """Smaller global batches first, growing to global_sequences: early gradients need fewer samples
    (https://arxiv.org/abs/1812.06162)."""

    @pydantic.model_validator(mode="after")
    def _divides(self) -> BatchConfig:
        unit = self.virtual_ranks * self.micro_sequences
        for name, value in [("global_sequences", self.global_sequences),
                            *((f"ramp.{number}.sequences", stage.sequences) for number, stage in enumerate(self.ramp))]:
            if value % unit:
                nearest = max(1, round(value / unit)) * unit
                raise ValueError(
                    f"{name} {value} is not a multiple of virtual_ranks x micro_sequences = "
                    f"{self.virtual_ranks} x {self.micro_sequences} = {unit}; nearest that is: {nearest}")
        sizes = self.sizes
        if any(size >= following for size, following in itertools.pairwise(sizes)):
            raise ValueError(f"the batch must grow from stage to stage up to global_sequences, but it goes "
                             f"{' -> '.join(map(str, sizes))}")
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sequences per step, stage by stage; the last is `global_sequences`."""
        return (*(stage.sequences for stage in self.ramp), self.global_sequences)

    def micro_batches(self, data_size: int) -> tuple[int, ...]:
        """Micro-batches per step and data rank, for each of `sizes`."""
        return tuple(size // self.micro_sequences // data_size for size in self.sizes)


class BatchSizes:
    """Sequences of each step's global batch, steps counted from 1.

    Args:
        batch: a `BatchConfig`, as in run.json; `ramp` may be missing.
        sequence_length: tokens of a sequence.
    """

    def __init__(self, batch: Mapping[str, Any], sequence_length: int) -> None:
        firsts, taken, sizes = [1], [0], []
        for stage in batch.get("ramp", ()):
            sizes.append(int(stage["sequences"]))
            steps = -(-int(stage["tokens"]) // (sizes[-1] * sequence_length))
            firsts.append(firsts[-1] + steps)
            taken.append(taken[-1] + steps * sizes[-1])
        sizes.append(int(batch["global_sequences"]))
        self._firsts, self._taken, self._sizes = (np.array(part, dtype=np.int64) for part in (firsts, taken, sizes))

    @classmethod
    def of(cls, batch: BatchConfig, sequence_length: int) -> BatchSizes:
        """Of a run that is configured."""
        return cls(batch.canonical(), sequence_length)

    @property
    def largest(self) -> int:
        """Sequences of the largest batch."""
        return int(self._sizes.max())

    def counts(self, steps: np.ndarray) -> np.ndarray:
        """Sequences of each of `steps`, int64 of the same shape."""
        return self._sizes[self._stages(steps)]

    def taken(self, steps: np.ndarray) -> np.ndarray:
        """Sequences of steps 1 to s together, for each s of `steps` (0 or more), int64 of the same shape."""
        stages = self._stages(steps)
        return self._taken[stages] + (steps - self._firsts[stages] + 1) * self._sizes[stages]

    def total(self, steps: int) -> int:
        """Sequences of the first `steps` steps."""
        return int(self.taken(np.array(steps)))

    def steps(self, sequences: int) -> int:
        """Whole steps that `sequences` are enough for: the inverse of `total`."""
        stage = int(np.searchsorted(self._taken, sequences, side="right")) - 1
        return int(self._firsts[stage] - 1 + (sequences - self._taken[stage]) // self._sizes[stage])

    def _stages(self, steps: np.ndarray) -> np.ndarray:
        return np.maximum(np.searchsorted(self._firsts, steps, side="right") - 1, 0)
