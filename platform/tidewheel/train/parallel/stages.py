"""Pipeline stages: the blocks and rank of each, and the numbers of micro-batches that a schedule can run.

It is plain arithmetic, so that an impossible pipeline is refused before any process starts. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ScheduleName = Literal["1f1b", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline. The first has the embedding, the last the final norm and the output.

    Args:
        index: of the stage.
        count: number of stages of the whole pipeline.
        blocks: indices of its blocks.
        rank: pipeline rank that runs it.
    """

    index: int
    count: int
    blocks: range
    rank: int

    @property
    def first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether the stage has the output layer."""
        return self.index == self.count - 1


def stages(num_layers: int, pipeline: int, schedule: ScheduleName, per_rank: int) -> list[Stage]:
    """Return the stages of a decoder.

    Embedding and output count as a block each. A remainder goes to the earlier stages: the embedding is a look-up and
    costs least. Stages are assigned to ranks in a loop (0, 1, 0, 1), or in a V for ZBV (0, 1, 1, 0).

    Args:
        num_layers: number of blocks.
        pipeline: number of pipeline ranks.
        schedule: of the pipeline.
        per_rank: stages on each rank.
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
    """Return the default number of stages on each rank: 2 for schedules with several."""
    return 1 if schedule in ("1f1b", "gpipe") else 2


def takes(schedule: ScheduleName, pipeline: int, micro_batches: int) -> bool:
    """Return whether a schedule of torch.distributed.pipelining can run this number of micro-batches per step.

    1F1B needs one for each stage; the interleaved schedules need rounds of equal length.

    Args:
        schedule: of the pipeline.
        pipeline: number of pipeline ranks.
        micro_batches: per step.
    """
    if schedule == "1f1b":
        return micro_batches >= pipeline
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
        return micro_batches % max(1, micro_batches // pipeline) == 0
    return micro_batches >= 1


def nearest_micro_batches(schedule: ScheduleName, pipeline: int, micro_batches: int) -> int:
    """Return the nearest number of micro-batches that a schedule can run; of two equally near ones, the larger.

    Args:
        schedule: of the pipeline.
        pipeline: number of pipeline ranks.
        micro_batches: per step.
    """
    for distance in range(micro_batches + pipeline + 1):
        for candidate in (micro_batches + distance, micro_batches - distance):
            if candidate >= 1 and takes(schedule, pipeline, candidate):
                return candidate
    raise AssertionError("every schedule can run one micro-batch per rank")
