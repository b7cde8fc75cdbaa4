"""The plan of compressed gradients: bytes on the links, residuals in memory, and what it says of them."""

from __future__ import annotations

from typing import Any

import pytest

from tidewheel.config import build
from tidewheel.plan import tables
from tidewheel.plan.compressed import all_reduced, kept, note
from tidewheel.plan.hardware import ClusterConfig
from tidewheel.plan.held import held
from tidewheel.plan.layout import Job, Layout, shares
from tidewheel.plan.layouts import rank
from tidewheel.plan.links import sent
from tidewheel.train.config import TrainConfig

RANKS = 8


def planned(compression: dict[str, Any] | None, **changes: Any) -> tuple[Job, Layout, Any]:
    config = build(TrainConfig, {
        "model": {"preset": "125m", "vocabulary_size": 32_000}, "parallel": {"data": "zero1"},
        "compression": compression,
        "elastic": {"min_workers": RANKS, "max_workers": RANKS},
        "batch": {"virtual_ranks": 16, "global_sequences": 16, "micro_sequences": 1}, **changes})
    job, layout = Job(config, 32_000, 1024), Layout(config.parallel, config.memory, 1, RANKS, 2)
    (share,) = shares(job, layout)
    return job, layout, held(job, layout, share)


@pytest.mark.parametrize(("compression", "share"), [
    ({"kind": "quantised"}, 0.255), ({"kind": "quantised", "bits": 4}, 0.13), ({"kind": "one_bit"}, 0.036),
    ({"kind": "power_sgd", "rank": 4}, 0.0104), ({"kind": "topk", "density": 0.01}, 0.081)])
def test_fewer_bytes_are_planned(compression: dict[str, Any], share: float):
    whole, less = (all_reduced(*planned(given)) for given in (None, compression))
    assert less / whole == pytest.approx(share, rel=0.05)
    job, _, parts = planned(compression)
    part, dim = job.config.compression, job.model.dim
    assert part is not None
    assert sent("all_reduce", less, RANKS) == pytest.approx(part.sent_bytes((dim, dim), RANKS) * parts.whole / dim**2)
    again = all_reduced(*planned(compression, reproducible=True))
    assert again == pytest.approx(2 * less), "a gradient for each virtual rank"


def test_residuals_take_memory():
    _, _, parts = planned(None)
    assert kept(*planned(None)) == 0
    assert kept(*planned({"kind": "topk"})) == 8 * parts.whole
    assert kept(*planned({"kind": "topk", "error_feedback": False})) == 4 * parts.whole
    assert kept(*planned({"kind": "topk"}, reproducible=True)) == 16 * parts.whole


def test_the_plan_says_what_it_does_not_count_and_why_a_mesh_is_refused():
    job, layout, parts = planned({"kind": "topk", "only": ["blocks.*"]})
    assert all_reduced(job, layout, parts) == all_reduced(*planned(None)), "an upper bound"
    assert "whole gradients, because compression.only is set" in note(job)[0]
    job, _, _ = planned({"kind": "topk"})
    assert "the time to compress is not counted" in tables.job_of(job.config, 32_000, 1024)[1][-1]
    ranking = rank(job, ClusterConfig(gpus=RANKS))
    assert ranking.fitting
    assert all(item.layout.parallel.data in ("ddp", "zero1") for item in ranking.fitting)
    assert any("compression topk" in refused.reason for refused in ranking.refused if refused.what.startswith("TP 2"))
