"""Compute timelines of the pipeline schedules and their bubble, the share of time in which ranks wait.

    python -m tests.benchmarks.pipeline_schedules [--pipeline 4] [--micro-batches 8] [--plot FILE.svg]

The order of work is that of torch.distributed.pipelining. The times are a model: a block's forward pass takes 1, its
gradients with respect to inputs 1 and to weights 1, and sending takes none.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from torch.distributed.pipelining.schedules import get_schedule_class

from tidewheel.report.plots import Svg
from tidewheel.train.parallel.pipeline import TORCH_NAMES
from tidewheel.train.parallel.stages import SCHEDULES, ScheduleName, default_per_rank, takes

DURATION = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
COLOUR = {"F": "#2a6fdb", "I": "#d9622b", "W": "#e0a52b", "B": "#d9622b"}
MEANING = {"F": "forward", "I": "backward, inputs", "W": "backward, weights", "B": "backward"}


class Work(NamedTuple):
    """One pass of a stage over a micro-batch."""

    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


def order(schedule: ScheduleName, pipeline: int, micro_batches: int) -> list[list[tuple[str, int, int]]]:
    """Return each rank's (kind, stage, micro-batch) in the order of torch's schedule."""
    if schedule in ("gpipe", "1f1b"):  # torch runs these in a loop; the order that it reports for 1F1B is off by one
        return [_one_stage(rank, micro_batches if schedule == "gpipe" else pipeline - rank, micro_batches)
                for rank in range(pipeline)]
    count = pipeline * default_per_rank(schedule)
    held = [SimpleNamespace(stage_index=index, num_stages=count, group_size=pipeline, group_rank=0, submod=None,
                            is_first=index == 0, is_last=index == count - 1)
            for index in range(0, count, pipeline)]
    instance = get_schedule_class(TORCH_NAMES[schedule])(held, micro_batches, loss_fn=lambda output, target: output)
    return [[(action.computation_type.value, action.stage_index, action.microbatch_index)
             for action in instance.pipeline_order[rank] if action and action.computation_type.value in DURATION]
            for rank in range(pipeline)]


def _one_stage(stage: int, ahead: int, micro_batches: int) -> list[tuple[str, int, int]]:
    """Return forward passes of `ahead` micro-batches, then alternate backward and forward passes."""
    forward = [("F", stage, micro) for micro in range(micro_batches)]
    work = forward[:ahead]
    for micro in range(micro_batches):
        work += [("B", stage, micro), *forward[ahead + micro:ahead + micro + 1]]
    return work


def timeline(schedule: ScheduleName, pipeline: int, micro_batches: int) -> list[list[Work]]:
    """Return each rank's work with its times, in units of a forward pass through all of a rank's blocks."""
    waiting = order(schedule, pipeline, micro_batches)
    per_rank = default_per_rank(schedule)
    last = pipeline * per_rank - 1
    done: dict[tuple[str, int, int], float] = {}
    ranks: list[list[Work]] = [[] for _ in waiting]
    while any(waiting):
        moved = False
        for rank, queue in enumerate(waiting):
            while queue:
                kind, stage, micro = queue[0]
                needed = _needs(kind, stage, micro, last)
                if any(need not in done for need in needed):
                    break
                queue.pop(0)
                start = max([done[need] for need in needed] + [ranks[rank][-1].end if ranks[rank] else 0.0])
                end = start + DURATION[kind] / per_rank
                done["B" if kind == "I" else kind, stage, micro] = end
                ranks[rank].append(Work(kind, stage, micro, start, end))
                moved = True
        if not moved:
            raise RuntimeError(f"{schedule}: ranks wait for each other")
    return ranks


def _needs(kind: str, stage: int, micro: int, last: int) -> list[tuple[str, int, int]]:
    if kind == "F":
        return [("F", stage - 1, micro)] if stage else []
    if kind == "W":
        return [("B", stage, micro)]
    return [("F", stage, micro)] + ([("B", stage + 1, micro)] if stage < last else [])


def bubble(ranks: list[list[Work]]) -> float:
    """Return the idle share of the time until the last rank is done, over all ranks."""
    total = max(work[-1].end for work in ranks)
    busy = sum(item.end - item.start for work in ranks for item in work)
    return 1 - busy / (total * len(ranks))


def in_flight(ranks: list[list[Work]]) -> float:
    """Return the most micro-batches whose activations a rank keeps at once, in units of all of a rank's blocks."""
    largest = 0.0
    for work in ranks:
        held = 0
        for item in work:
            held += (item.kind == "F") - (item.kind in "BW")
            largest = max(largest, held / len({other.stage for other in work}))
    return largest


def plot(path: str, lines: dict[str, list[list[Work]]]) -> None:
    """Draw a strip for each rank of each schedule on one time axis."""
    width = max(work[-1].end for ranks in lines.values() for work in ranks)
    height, row, top = 30.0, 18.0, 30.0
    tall = sum(height + row * len(ranks) for ranks in lines.values()) + top
    figure = Svg(height=tall, label="timelines of pipeline schedules")
    for left, kind, meaning in ((60, "F", MEANING["F"]), (220, "B", "backward, or its part for inputs"),
                                (480, "W", MEANING["W"])):
        figure.rect(left, 6, 12, 12, COLOUR[kind])
        figure.text(left + 18, 16, meaning)
    for name, ranks in lines.items():
        top += height
        figure.text(0, top - 6, f"{name}: {bubble(ranks):.0%} waiting")
        for rank, work in enumerate(ranks):
            figure.text(0, top + row - 5, f"rank {rank}")
            for item in work:
                left = 60 + 990 * item.start / width
                figure.rect(left, top + 1, 990 * (item.end - item.start) / width - 1, row - 2, COLOUR[item.kind],
                            f"{MEANING[item.kind]} of micro-batch {item.micro_batch}, stage {item.stage}")
                figure.text(left + 2, top + row - 5, str(item.micro_batch), fill="white")
            top += row
    body = "".join(map(str, figure.parts))
    Path(path).write_text(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1060 {tall:g}" '
                          f'font-family="sans-serif" font-size="12"><rect width="1060" height="{tall:g}" fill="white"/>'
                          f'{body}</svg>\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipeline", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--plot", default="")
    options = parser.parse_args()
    lines = {schedule: timeline(schedule, options.pipeline, options.micro_batches) for schedule in SCHEDULES
             if takes(schedule, options.pipeline, options.micro_batches)}
    print(f"{options.pipeline} pipeline ranks, {options.micro_batches} micro-batches\n")
    print("| schedule | stages per rank | waiting | activations kept, micro-batches |\n|---|---|---|---|")
    for name, ranks in lines.items():
        print(f"| {name} | {default_per_rank(name)} | {bubble(ranks):.1%} | {in_flight(ranks):g} |")
    if options.plot:
        plot(options.plot, dict(lines))


if __name__ == "__main__":
    main()
