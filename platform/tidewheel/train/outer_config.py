"""Configuration of groups that train apart and average now and then (DiLoCo). Nothing here imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pydantic
from pydantic import Field

from tidewheel.config import Config
from tidewheel.parts import name_of

if TYPE_CHECKING:
    from tidewheel.train.config import TrainConfig

UNDECISIVE = ("store", "patience_seconds", "keep")
"""Settings that decide where and when groups meet, and never what they compute of what they exchange."""


class OuterConfig(Config):
    """Groups of workers in different places, each an ordinary run, which meet over storage every so many steps.

    A group trains `every` steps on its own and publishes how far its weights have moved (the outer gradient). The
    average over the groups of the round is the gradient of an outer step with Nesterov momentum, from which all of them
    go on (DiLoCo, https://arxiv.org/abs/2311.08105). `learning_rate` 1 with `momentum` 0 averages the weights (local
    SGD, https://arxiv.org/abs/1805.09767).
    """

    groups: int = Field(ge=1, le=1024)
    """Number of groups. They share the data: step s of all groups together reads what one run with a batch of `groups`
    times `batch.global_sequences` reads in its step s."""
    group: int = Field(default=0, ge=0)
    """Which of them this run is, from 0."""
    store: str = Field(min_length=1)
    """Folder in which the groups meet, local or s3://; the same for all."""
    every: int = Field(default=50, ge=1)
    """Steps between two rounds. The last step of a run ends in a round too."""
    learning_rate: float = Field(default=0.7, gt=0, allow_inf_nan=False)
    """Learning rate of the outer step."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Nesterov momentum of the outer step."""
    quantise: Literal["fp32", "bf16", "int8", "int4"] = "fp32"
    """Number type in which outer gradients are sent. int8 and int4 have a scale for each 128 and 64 values of a row;
    vectors, such as the weights of norms, are then sent in bf16."""
    error_feedback: bool = False
    """Add what `quantise` has rounded off to the next outer gradient. It takes the memory of the weights once more. A
    group that is left out of a round drops it together with what it has learnt."""
    fragments: int = Field(default=1, ge=1)
    """Parts of the model that meet in rounds of their own, evenly spread over `every` steps, so that less is sent at a
    time (streaming DiLoCo, https://arxiv.org/abs/2501.18512). Layer i is in part i modulo `fragments`."""
    overlap: int = Field(default=0, ge=0)
    """Steps that go on between the publication of an outer gradient and the outcome of its round, so that nothing waits
    for the network."""
    merge: float = Field(default=0.5, ge=0, lt=1)
    """With `overlap`: share of a group's own weights when it takes an outcome, which lacks its steps in between."""
    patience_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """How long a group that is ready waits for the others. Then the round is decided without those that are late, which
    take the newest outer state when they come and go on from there."""
    keep: int = Field(default=4, ge=2, le=32)
    """Rounds whose outer state and outer gradients are kept; the same for all groups. A group that repeats steps after
    a failure takes the same outcomes again as long as they are kept, and else the newest outer state."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> OuterConfig:
        if self.group >= self.groups:
            raise ValueError(f"group {self.group} of {self.groups} groups, which count from 0; nearest legal choice: "
                             f"{self.groups - 1}")
        if self.error_feedback and self.quantise == "fp32":
            raise ValueError("error_feedback with quantise fp32, which rounds nothing off; nearest legal choice: bf16, "
                             "int8 or int4")
        if self.fragments > self.every:
            raise ValueError(f"fragments {self.fragments} meet one after the other within every {self.every} steps; "
                             f"nearest legal choice: fragments {self.every}")
        if self.overlap >= self.every:
            raise ValueError(f"overlap {self.overlap} is not shorter than the {self.every} steps between two rounds; "
                             f"nearest legal choice: overlap {self.every - 1}")
        return self

    @property
    def averages_weights(self) -> bool:
        """Whether the outcome of a round is the mean of the members' weights, so that no difference is taken."""
        return self.learning_rate == 1 and self.momentum == 0 and self.quantise == "fp32"

    @property
    def share(self) -> tuple[int, int]:
        """Which part of each step's data is read: (group, groups)."""
        return self.group, self.groups

    def offset(self, fragment: int) -> int:
        """Return how many steps after a common start the first round of a fragment ends."""
        return -(-self.every * (fragment + 1) // self.fragments)


def reason_against(config: TrainConfig) -> str | None:
    """Return why the settings of a run do not work with `outer`, with the nearest legal choice; None if they do."""
    outer, last = config.outer, "nearest legal choice"
    if outer is None:
        return None
    if config.rollouts is not None:
        return f"outer shares one data set among groups, but rollouts are a group's own; {last}: no outer"
    if config.guards.may_roll_back:
        return (f"outer with a guard that rolls back, but the rounds since the checkpoint cannot be undone; {last}: "
                "skip in guards.non_finite and guards.spike")
    for name in ("tensor", "pipeline", "context", "expert"):
        if getattr(config.parallel, name) > 1:
            return (f"outer with parallel.{name} {getattr(config.parallel, name)}: outer steps work with data "
                    f"parallelism alone; {last}: parallel.{name} 1, with data zero2 or zero3")
    if config.parallel.offload:
        return f"outer keeps its start weights on the device, and parallel.offload frees it; {last}: offload false"
    if config.optimizer.AVERAGE:
        return (f"outer with optimizer.kind {name_of(type(config.optimizer))}, which keeps weights of its own and sets "
                f"the model back to them after a round; {last}: optimizer.kind adamw")
    if config.parameters != "fp32":
        return f"outer gradients are differences of fp32 weights, but parameters is {config.parameters}; {last}: fp32"
    if config.adapter is not None:
        return (f"outer with the adapter {name_of(type(config.adapter))}, which has not been compared with one run; "
                f"{last}: no adapter")
    every, most = config.checkpoint.every_steps, outer.keep * outer.every
    if isinstance(every, int) and every > most:
        return (f"checkpoint.every_steps {every} is longer than the rounds that are kept, outer.keep {outer.keep} x "
                f"outer.every {outer.every}, so a lost worker could not repeat them; {last}: checkpoint.every_steps "
                f"{most}")
    return None
