"""Configuration of the global batch. Nothing here imports numpy or torch."""

from __future__ import annotations

import itertools
from typing import Literal

import pydantic
from pydantic import Field

from tidewheel.config import Config


class RampStage(Config):
    """A part of the beginning of the run with smaller global batches."""

    sequences: int = Field(ge=1)
    """Sequences per optimizer step."""
    tokens: int = Field(ge=1)
    """Length of the stage in tokens (sequences x their length, with padding), rounded up to whole steps."""


class BatchConfig(Config):
    """The global batch; it never depends on the number of workers."""

    global_sequences: int = Field(default=32, ge=1)
    """Sequences per optimizer step, over all workers."""
    micro_sequences: int = Field(default=4, ge=1)
    """Sequences per forward and backward pass; the same for every number of workers."""
    virtual_ranks: int = Field(default=4, ge=1)
    """Slices of the global batch, distributed evenly over the workers. The number of workers must divide their "
      "number."""
    ramp: tuple[RampStage, ...] = ()
    """Smaller global batches first, growing to global_sequences: early gradients need fewer samples
    (https://arxiv.org/abs/1812.06162)."""

    pad_to_multiple_of: int = Field(default=0, ge=0)
    """Pad the sequences of a micro-batch to the longest of them, rounded up to a multiple of this, for sets with one
    document in each row (`pack.method: one_per_row`) and for pairs. 0: pad to the row length of the set."""
    group_by_length: bool = False
    """Form the micro-batches of a step of sequences of similar length. The global batch has the same sequences."""
    equal_attention: bool = False
    """Form the micro-batches of a step of packed sequences so that attention costs the same in each, and on each
    worker: a row of one long document costs many times that of a row of short ones. The global batch has the same
    sequences."""
    rate_rule: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate follows the size of the batch: `optimizer.learning_rate` is that of a batch of
    `rate_sequences`, and a step of n sequences multiplies it by n / rate_sequences (linear, for gradient descent:
    https://arxiv.org/abs/1706.02677) or by the square root of that (for Adam: https://arxiv.org/abs/2205.10287)."""
    rate_sequences: int = Field(default=0, ge=0)
    """Sequences of the batch whose learning rate is known; see `rate_rule`."""

    @pydantic.model_validator(mode="after")
    def _grouped_rows_are_cut(self) -> BatchConfig:
        if self.group_by_length and not self.pad_to_multiple_of:
            raise ValueError("group_by_length saves nothing while every row is padded to the row length of the set; "
                             "nearest legal choice: pad_to_multiple_of 64, or group_by_length false")
        if self.group_by_length and self.equal_attention:
            raise ValueError("group_by_length and equal_attention both say which sequences form a micro-batch; nearest "
                             "legal choice: group_by_length for rows of one document, equal_attention for packed rows")
        return self

    @property
    def reorders(self) -> bool:
        """Whether the sequences of a step come in another order than that of the data."""
        return self.group_by_length or self.equal_attention

    @pydantic.model_validator(mode="after")
    def _rule_has_a_batch(self) -> BatchConfig:
        if self.rate_rule != "none" and not self.rate_sequences:
            raise ValueError(f"rate_rule {self.rate_rule} scales a learning rate that is known for another batch: give "
                             "its sequences in rate_sequences, or rate_rule none")
        if self.rate_sequences and self.rate_rule == "none":
            raise ValueError(f"rate_sequences {self.rate_sequences} is given without a rule; nearest legal choice: "
                             "rate_rule sqrt or linear, or leave rate_sequences out")
        return self

    @pydantic.model_validator(mode="after")
    def _divides(self) -> BatchConfig:
        unit = self.virtual_ranks * self.micro_sequences
        for name, value in [("global_sequences", self.global_sequences),
                            *((f"ramp.{index}.sequences", stage.sequences) for index, stage in enumerate(self.ramp))]:
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
        """Return the micro-batches per step and data rank, for each of `sizes`."""
        return tuple(size // self.micro_sequences // data_size for size in self.sizes)
