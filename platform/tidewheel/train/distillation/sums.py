"""Sums over the tokens of a micro-batch of the cross-entropy and of the divergence from a teacher.

The logits of a few tokens are in memory at a time, those of the teacher too; the backward pass computes them again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tidewheel.models.loss import IGNORED
from tidewheel.train.chunks import chunked, with_target
from tidewheel.train.distillation.divergences import Divergence, divergence, top_and_rest
from tidewheel.train.objective import Outputs, TopK
from tidewheel.train.step import MicroBatch


@dataclass(frozen=True)
class Comparison:
    """How a student is compared with its teacher.

    Args:
        kind: the divergence.
        beta: of jensen_shannon.
        temperature: of both distributions.
        top_k: compare the teacher's most likely tokens one by one and the others as one; 0: all tokens.
    """

    kind: Divergence
    beta: float
    temperature: float
    top_k: int

    def of_logits(self, student_NV: torch.Tensor, teacher_NV: torch.Tensor) -> torch.Tensor:
        """Return the divergence of each token, fp32 [N].

        Args:
            student_NV: logits.
            teacher_NV: logits.
        """
        if self.top_k:
            top = teacher_NV.topk(self.top_k, dim=1).indices
            return self.of_top(student_NV, top, top_and_rest(teacher_NV, top, self.temperature))
        student = (student_NV.float() / self.temperature).log_softmax(dim=1)
        teacher = (teacher_NV.float() / self.temperature).log_softmax(dim=1)
        return divergence(student, teacher, self.kind, self.beta)

    def of_top(self, student_NV: torch.Tensor, top_NK: torch.Tensor, teacher_NC: torch.Tensor) -> torch.Tensor:
        """Return the divergence of each token, fp32 [N], from a teacher's most likely tokens and the others' sum.

        Args:
            student_NV: logits.
            top_NK: int64, the teacher's K most likely tokens.
            teacher_NC: their log-probabilities, then that of all others together, [N, K + 1].
        """
        return divergence(top_and_rest(student_NV, top_NK, self.temperature), teacher_NC, self.kind, self.beta)


def sums(outputs: Outputs, batch: MicroBatch, comparison: Comparison, chunk_tokens: int) -> torch.Tensor:
    """Return the sums of the cross-entropy and of the divergence over all targets, in nats, fp32 [2].

    Args:
        outputs: the student's.
        batch: its rows, with the teacher's outputs or its most likely tokens.
        comparison: the divergence.
        chunk_tokens: tokens of a chunk; 0: all at once.
    """
    teacher = batch.teacher
    assert teacher is not None, "checked before training"
    if isinstance(teacher, TopK):
        inputs = [outputs.hidden, batch.targets, teacher.tokens, teacher.log_probabilities]
    else:
        inputs = [outputs.hidden, batch.targets, teacher.hidden]

    def of_chunk(hidden: torch.Tensor, targets: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        known = targets != IGNORED
        student = outputs.make_logits(hidden).flatten(0, -2)
        losses = F.cross_entropy(student.float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        if isinstance(teacher, TopK):
            top, log_probabilities = (values.flatten(0, -2) for values in others)
            found = comparison.of_top(student, top, log_probabilities)
        else:
            with torch.no_grad():
                other = teacher.make_logits(others[0]).flatten(0, -2)
            found = comparison.of_logits(student, other)
        return torch.stack((losses, torch.where(known.flatten(), found, 0.0).sum()))

    rows, length = batch.targets.shape
    if isinstance(outputs.hidden, DTensor) or outputs.hidden.shape[1] != length:
        # a rank has some positions of each row, and the logits of all: a chunk is of whole rows
        size = max(1, chunk_tokens // length) if chunk_tokens else rows
        return torch.stack(chunked(of_chunk, size, *inputs)).sum(dim=0)
    flat = [values.flatten(0, 1) for values in inputs]
    if batch.segment_ids.shape == batch.tokens.shape:  # with context parallelism the host knows the whole row's count
        index = with_target(flat[1], batch.num_targets)
        flat = [values[index] for values in flat]
    parts = chunked(lambda *given: of_chunk(*(values[None] for values in given)), chunk_tokens or len(flat[0]), *flat)
    return torch.stack(parts).sum(dim=0)
