"""Distillation: a student learns the distributions of a teacher, beside the tokens of the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pydantic
from pydantic import Field

from tidewheel.train.distillation.objective import TeacherObjective
from tidewheel.train.objective import DIMENSIONS, Outputs, Sums
from tidewheel.versions import Version

if TYPE_CHECKING:
    from tidewheel.train.step import MicroBatch


class Distillation(TeacherObjective):
    """(1 - weight) cross-entropy + weight T^2 divergence(teacher, student), in nats per token.

    T^2 keeps the gradient's size at any temperature (https://arxiv.org/abs/1503.02531, section 2). The teacher is a
    model that runs beside the student (`teacher`), or the most likely tokens that it gave before (`data.teacher`).
    """

    VERSION = Version("objective_distillation")
    METRICS = ("cross_entropy", "divergence")
    WORKS_WITH = DIMENSIONS
    UNDECISIVE = ("chunk_tokens",)

    divergence: Literal["forward_kl", "reverse_kl", "jensen_shannon"] = "forward_kl"
    """forward_kl: KL(teacher || student), which covers all that the teacher may say. reverse_kl: KL(student ||
    teacher), which keeps to what it says most. jensen_shannon: between them
    (https://arxiv.org/abs/2306.13649)."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """Of jensen_shannon: the teacher's share of the mixture; near 0 it is like forward_kl, near 1 like reverse_kl."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """Share of the divergence; the rest is the cross-entropy of the data."""
    top_k: int = Field(default=0, ge=0)
    """Of `teacher`: compare this many most likely tokens one by one and all others as one, as with `data.teacher`. 0:
    all tokens one by one."""
    chunk_tokens: int = Field(default=1024, ge=0)
    """Tokens whose logits are in memory at once. Logits of several chunks are computed again in the backward pass. 0:
    all tokens at once."""

    @pydantic.model_validator(mode="after")
    def _possible(self) -> Distillation:
        if self.top_k and not self.teacher:
            raise ValueError("top_k is of a live teacher; the tokens in data.teacher have their own number: leave it "
                             "out")
        return self

    @property
    def logit_tokens(self) -> int | None:
        return self.chunk_tokens

    def sums(self, outputs: Outputs, batch: MicroBatch) -> Sums:
        from tidewheel.train.distillation.sums import Comparison, sums

        comparison = Comparison(self.divergence, self.beta, self.temperature, self.top_k)
        cross_entropy, divergence = sums(outputs, batch, comparison, self.chunk_tokens).unbind()
        loss = (1 - self.weight) * cross_entropy + self.weight * self.temperature ** 2 * divergence
        return Sums(loss, {"cross_entropy": cross_entropy, "divergence": divergence})
