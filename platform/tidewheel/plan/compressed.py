"""Compressed gradients in a plan: bytes that travel, and memory of what has not been sent."""

from __future__ import annotations

from tidewheel.parts import name_of
from tidewheel.plan.held import Held
from tidewheel.plan.layout import GRADIENT_BYTES, Job, Layout


def all_reduced(job: Job, layout: Layout, held: Held) -> float:
    """Return the bytes of an all-reduce that sends as much as the sum of gradients does.

    Compressed gradients count as those of square matrices of the model's width. With `compression.only` they count as
    whole ones, an upper bound.

    Args:
        job: the run.
        layout: its layout.
        held: parameters of the rank's part of the model.
    """
    part, ranks, dim = job.config.compression, layout.data * layout.parallel.context, job.model.dim
    if part is None or part.only or ranks == 1:
        return layout.reduced_bytes * held.whole
    sent = part.sent_bytes((dim, dim), ranks) * held.whole / dim**2 * slots(job, layout)
    return sent / (2 * (ranks - 1) / ranks)


def kept(job: Job, layout: Layout, held: Held) -> float:
    """Return the bytes of residuals, and of the new ones that a step makes beside them.

    Args:
        job: the run.
        layout: its layout.
        held: parameters of the rank's part of the model.
    """
    part = job.config.compression
    if part is None:
        return 0.0
    return GRADIENT_BYTES * held.whole * slots(job, layout) * (2 if part.error_feedback else 1)


def slots(job: Job, layout: Layout) -> int:
    """Return how many gradients a rank compresses in a step.

    Args:
        job: the run.
        layout: its layout.
    """
    return job.config.batch.virtual_ranks // layout.data if job.config.reproducible else 1


def note(job: Job) -> list[str]:
    """Return what the plan assumes of compression."""
    part = job.config.compression
    if part is None:
        return []
    counted = "whole gradients, because compression.only is set" if part.only else (
        f"every gradient compressed as one of {job.model.dim} x {job.model.dim}")
    return [f"compression {name_of(type(part))}: {counted}; the time to compress is not counted, nor are residuals in "
            "the bytes of a checkpoint (4 bytes a parameter for each worker)"]
