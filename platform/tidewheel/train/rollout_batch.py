"""Which groups of rollouts a step trains on, for its record and for the audit."""

from __future__ import annotations

from typing import Any

import numpy as np

from tidewheel.shards.source import Source
from tidewheel.shards.waves import WaveOrder


def rollout_batch(source: Source, positions: np.ndarray, group: int) -> dict[str, Any]:
    """Return {"wave", "epoch", "groups"} of a step: the wave, the pass over it, and the places of its whole groups.

    Waves and passes count from 1, places from 0 in the order in which the ledger has admitted the groups.

    Args:
        source: the run's set of rollouts, whose waves have a shard each.
        positions: of the step, int64 [B].
        group: answers to a prompt.
    """
    [order] = source.orders
    assert isinstance(order, WaveOrder), "rollouts come in waves"
    waves, passes = order.passes(positions)
    places, answers = np.unique(order.locate(positions)[1] // group, return_counts=True)
    whole = places[answers == group].tolist()
    return {"wave": int(waves[0]) + 1, "epoch": int(passes[0]) + 1, "groups": whole}
