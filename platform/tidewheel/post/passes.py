"""Check that the steps of a wave trained on each of its groups once in each pass (`rollouts.epochs`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tidewheel import jsonlog
from tidewheel.storage import Store
from tidewheel.train.policy.config import RolloutsConfig


def untrained(run: Store, rollouts: RolloutsConfig, groups: int) -> Iterator[str]:
    """Yield the groups that the recorded steps of a run have not trained on once in a pass, and steps amiss.

    Args:
        run: the run's folder.
        rollouts: the run's settings.
        groups: of a wave.
    """
    if rollouts.wave_steps == 1:
        return  # the audit of the ledger covers them
    records = {int(line["step"]): line for line in jsonlog.read(run, "batches.jsonl")}  # a repeated step counts once
    trained: dict[tuple[int, int], Counter[int]] = {}
    for step, record in sorted(records.items()):
        wave, epoch = int(record.get("wave", 0)), int(record.get("epoch", 0))
        planned = (rollouts.wave_of(step), (step - rollouts.first_step(wave)) // rollouts.minibatches + 1)
        if (wave, epoch) != planned:
            yield f"step {step} trained on wave {wave} in pass {epoch}, planned are {planned[0]} and {planned[1]}"
        trained.setdefault((wave, epoch), Counter()).update(record.get("groups", ()))
    last = max(records, default=0)
    for (wave, epoch), times in trained.items():
        is_over = rollouts.first_step(wave) + epoch * rollouts.minibatches - 1 <= last
        wrong = [group for group in range(groups) if times[group] > 1 or (is_over and not times[group])]
        if wrong or set(times) - set(range(groups)):
            first = wrong[0] if wrong else max(times)
            yield f"pass {epoch} over wave {wave} has group {first} {times[first]} times, planned is once"
