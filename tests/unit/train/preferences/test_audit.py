"""Tests of the audit of runs on pairs: it finds a pair that the loader reads twice, passes over or swaps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.unit.train.preferences.pairs import pair_config, random_pairs, write_pairs
from tidewheel.elastic.trainer import fit_local
from tidewheel.shards.loader import Loader
from tidewheel.train.audit import audit

POSITION = 13
"""The pair that goes wrong is in step 2 of 4, in the first epoch of 20 pairs."""


def doubled(positions: np.ndarray) -> np.ndarray:
    """Read the pair before again."""
    return np.where(positions == POSITION, POSITION - 1, positions)


def skipped(positions: np.ndarray) -> np.ndarray:
    """Pass over the pair: read the one after it, and so on to the end."""
    return np.where(positions >= POSITION, positions + 1, positions)


def swapped(positions: np.ndarray) -> np.ndarray:
    """Read the pair and the one after it in the wrong order."""
    return np.where(positions == POSITION, POSITION + 1, np.where(positions == POSITION + 1, POSITION, positions))


@pytest.mark.parametrize(("fault", "wrong"), [(None, []), (doubled, [2]), (skipped, [2, 3, 4]), (swapped, [2])])
def test_the_audit_finds_what_the_loader_does_to_a_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                        fault: Callable[[np.ndarray], np.ndarray] | None,
                                                        wrong: list[int]):
    """Micro-batches hold pairs of similar lengths, so the ranks read the pairs of a step in another order."""
    if fault is not None:
        read = Loader.batch
        monkeypatch.setattr(Loader, "batch", lambda self, positions: read(self, fault(np.asarray(positions))))
    write_pairs(tmp_path / "pairs", random_pairs(20), shards=3)
    settings = pair_config(tmp_path, "run", "objective.kind=simpo", "data.validation=''", "batch.group_by_length=true",
                           "batch.pad_to_multiple_of=8", "evaluation.sample_tokens=0")
    fit_local(settings)
    audited = audit(settings.run_uri)
    assert [line.split(" (")[0] for line in audited.mismatches] == [f"step {step}" for step in wrong]
    assert all("other sequences, or another order" in line for line in audited.mismatches)
    assert (audited.steps, audited.sequences, audited.ok) == (4, 32, not wrong)
