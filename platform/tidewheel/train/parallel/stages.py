"""Which blocks each pipeline stage holds, which rank runs it, and how many micro-batches a schedule takes.

Plain arithmetic, so that an impossible pipeline is refused before any process starts. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ScheduleName = Literal["1f1b", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline: the embedding (the first), some blocks, the final norm and the output (the last)."""

    index: int
    count: int
    """Stages of the whole pipeline."""
    blocks: range
    rank: int
    """Pipeline rank that runs it."""

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


def stages(num_layers: int, pipeline: int, schedule: ScheduleName, per_rank: int) -> list[Stage]:
    """The stages of a decoder of `num_layers` blocks on `pipeline` ranks, `per_rank` on each.

    Embedding and output count like a block each; what does not divide goes to the earlier stages, whose embedding is a
    look-up and costs least. Stages lie on the ranks in a loop (0, 1, 0, 1); for ZBV in a V (0, 1, 1, 0).
    """
    count = pipeline * per_rank
    base, longer = divmod(num_layers + 2, count)
    bounds = [index * base + min(index, longer) for index in range(count + 1)]
    cuts = [min(max(bound - 1, 0), num_layers) for bound in bounds]  # unit 0 is the embedding
    order = [rank for turn in range(per_rank) for rank in _turn(turn, pipeline, schedule)]
    return [Stage(index, count, range(cuts[index], cuts[index + 1]), order[index]) for index in range(count)]


def _turn(turn: int, pipeline: int, schedule: ScheduleName) -> range:
    return range(pipeline - 1, -1, -1) if schedule == "zbv_zero_bubble" and turn % 2 else range(pipeline)


def default_per_rank(schedule: ScheduleName) -> int:
    """Stages on each rank: two where the schedule is made for several."""
    return 1 if schedule in ("1f1b", "gpipe") else 2


def takes(schedule: ScheduleName, pipeline: int, micro_batches: int) -> bool:
    """Whether the schedule of torch.distributed.pipelining can run so many micro-batches per step.

    1F1B needs one for every stage, the interleaved schedules rounds of equal length.
    """
    if schedule == "1f1b":
        return micro_batches >= pipeline
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
        return micro_batches % max(1, micro_batches // pipeline) == 0
    return micro_batches >= 1


def nearest_micro_batches(schedule: ScheduleName, pipeline: int, micro_batches: int) -> int:
    """The number of micro-batches nearest to `micro_batches` (above it when two are) that the schedule takes."""
    for distance in range(micro_batches + pipeline + 1):
        for candidate in (micro_batches + distance, micro_batches - distance):
            if candidate >= 1 and takes(schedule, pipeline, candidate):
                return candidate
    raise AssertionError("every schedule takes as many micro-batches as there are ranks")
