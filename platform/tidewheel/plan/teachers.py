"""Bytes of a live teacher on a GPU, which is frozen and in the layout of its student."""

from __future__ import annotations

import dataclasses

from tidewheel.plan.held import held
from tidewheel.plan.layout import Job, Layout, Share, shares

STUDENT_COPIES = 12
"""Bytes of a student's logit that a divergence needs: its fp32 copy, log-softmax and gradient."""
TEACHER_COPIES = 8
"""Bytes of a teacher's logit besides itself: its fp32 copy and log-softmax."""


def teacher_bytes(job: Job, layout: Layout, share: Share, tokens: float, rows: float) -> float:
    """Return the bytes of a live teacher on a pipeline rank; 0 without one.

    They are its weights and what it has gathered, the hidden states that it has handed over, and the logits of both in
    a chunk.

    Args:
        job: the run.
        layout: its layout.
        share: the pipeline rank's part of the student.
        tokens: of a rank's micro-batch.
        rows: tokens whose logits exist at once.
    """
    teacher = job.teacher
    if teacher is None:
        return 0.0
    frozen = dataclasses.replace(layout, memory=teacher.config.memory)
    own = min(shares(teacher, frozen), key=lambda part: abs(part.rank - share.rank))
    parts = held(teacher, frozen, own)
    weights = parts.whole * teacher.weight_bytes
    if layout.sharded:
        weights /= layout.shards
        gathered = parts.whole_here
        if layout.parallel.data == "zero3":  # the unit in use and the next one, and the output until the step ends
            gathered = parts.block_here + max(parts.block_here, parts.embedding) + parts.output
        weights += gathered * teacher.gathered_bytes
    if not share.last:
        return weights
    kept = layout.micro_batches if layout.parallel.pipeline > 1 else 1
    hidden = kept * tokens * teacher.model.dim * teacher.residual_bytes / layout.parallel.tensor
    logits = rows * job.vocabulary_size * (STUDENT_COPIES + TEACHER_COPIES + teacher.compute_bytes)
    return weights + hidden + logits
