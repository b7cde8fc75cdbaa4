"""Traces of chosen steps."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidewheel import storage
from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.train.metrics.config import ProfileConfig
from tidewheel.train.metrics.profile import Profiler, ranges


@given(st.sets(st.integers(1, 30)))
def test_neighbours_share_a_trace(steps: set[int]):
    result = ranges(tuple(steps))
    assert [step for first, last in result for step in range(first, last + 1)] == sorted(steps)
    assert all(last + 1 < first for (_, last), (first, _) in itertools.pairwise(result))


def test_the_trace_holds_the_steps_and_no_others(tmp_path: Path):
    profiler = Profiler(ProfileConfig(steps=(2, 3, 5)), storage.store(tmp_path), torch.device("cpu"))
    written = []
    for step in range(1, 7):
        profiler.begin(step)
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        written += profiler.end(step)
    profiler.close()
    assert written == [str(tmp_path / "profile" / name) for name in ("steps_2-3.json.gz", "steps_5-5.json.gz")]
    for uri, steps in zip(written, ({"step 2", "step 3"}, {"step 5"})):
        with gzip.open(uri) as file:  # the Chrome trace format that Perfetto reads
            events = json.load(file)["traceEvents"]
        named = [event for event in events if event.get("ph") == "X"]
        assert {event["name"] for event in named if event["name"].startswith("step ")} == steps
        assert sum(event["name"] == "aten::mm" for event in named) == len(steps)


def test_a_run_that_ends_in_a_profile_leaves_none(tmp_path: Path):
    profiler = Profiler(ProfileConfig(steps=(1, 2)), storage.store(tmp_path), torch.device("cpu"))
    profiler.begin(1)
    assert profiler.end(1) == []
    profiler.close()
    assert not (tmp_path / "profile").exists()


def test_steps_are_counted_from_one():
    with pytest.raises(ConfigError, match="counted from 1"):
        build(ProfileConfig, {"steps": [0, 3]})
