"""Communication, bubble and step time: closed forms, a ring that is really gone round, schedules as torch runs them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.pipeline_schedules import bubble as simulated
from tests.benchmarks.pipeline_schedules import timeline
from tests.benchmarks.plan_published import RUNS, predicted
from tidewheel.config import build
from tidewheel.plan.hardware import LINK_SHARE, ClusterConfig
from tidewheel.plan.layout import Job, Layout
from tidewheel.plan.links import FACTORS, group, sent
from tidewheel.plan.step_time import bubble, passes, seen, step_time
from tidewheel.train.config import TrainConfig
from tidewheel.train.memory.config import MemoryConfig
from tidewheel.train.parallel.config import ParallelConfig
from tidewheel.train.parallel.stages import SCHEDULES, default_per_rank, takes


def ring_all_reduce(chunks: list[list[int]]) -> tuple[list[list[int]], int]:
    """Sums over ranks by a ring, [rank][chunk]; and how many chunks each rank has sent."""
    ranks, moved = len(chunks), 0
    held = [list(mine) for mine in chunks]
    for phase in ("reduce", "gather"):
        for step in range(ranks - 1):
            before = [list(mine) for mine in held]
            for rank in range(ranks):
                chunk = (rank - step + (phase == "gather")) % ranks
                into = held[(rank + 1) % ranks]
                into[chunk] = before[rank][chunk] + (before[(rank + 1) % ranks][chunk] if phase == "reduce" else 0)
            moved += 1
    return held, moved


@given(ranks=st.integers(2, 12), data=st.data())
def test_a_ring_sends_what_the_formula_says(ranks: int, data: st.DataObject):
    values = data.draw(st.lists(st.lists(st.integers(-9, 9), min_size=ranks, max_size=ranks), min_size=ranks,
                                max_size=ranks))
    sums, chunks = ring_all_reduce(values)
    assert sums == [[sum(column) for column in zip(*values)]] * ranks
    size = 96.0 * ranks
    assert sent("all_reduce", size, ranks) == pytest.approx(chunks * size / ranks)  # 2 (N-1)/N of the bytes
    assert sent("all_gather", size, ranks) == sent("reduce_scatter", size, ranks) == pytest.approx(
        sent("all_reduce", size, ranks) / 2)
    assert sent("all_to_all", size, ranks) == pytest.approx((ranks - 1) * size / ranks)


@pytest.mark.parametrize("kind", FACTORS)
def test_one_rank_sends_nothing(kind: str):
    assert sent(kind, 1e9, 1) == 0
    assert group(ClusterConfig(gpus=8), 1, 1).seconds(kind, 1e9) == 0


def test_links_of_a_group():
    cluster = ClusterConfig(gpus=64)
    assert group(cluster, 8, 1).bandwidth == 450e9 * LINK_SHARE  # a node
    assert group(cluster, 8, 8).bandwidth == 50e9 * LINK_SHARE  # one GPU of each node: its own adapter
    assert group(cluster, 64, 1).bandwidth == 400e9 * LINK_SHARE  # all: eight adapters side by side
    assert group(cluster, 16, 4).bandwidth == 100e9 * LINK_SHARE
    assert group(ClusterConfig(gpus=64, network_gbytes=12.5), 8, 8).bandwidth == 12.5e9 * LINK_SHARE


def test_a_measured_all_reduce():
    """8 H200 without in-switch reduction: 367.6 GB/s of bus bandwidth for large ones, 40 us for small ones."""
    node = group(ClusterConfig(gpus=8, gpu="h200"), 8, 1)
    assert sent("all_reduce", 16 << 30, 8) / node.seconds("all_reduce", 16 << 30) == pytest.approx(367.6e9, rel=0.01)
    assert node.seconds("all_reduce", 32 << 10) == pytest.approx(40e-6, rel=0.05)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pipeline", "micro_batches"), [(2, 4), (4, 8), (4, 32), (8, 16)])
def test_bubble_as_torch_runs_the_schedule(schedule: str, pipeline: int, micro_batches: int):
    assert takes(schedule, pipeline, micro_batches)  # type: ignore[arg-type]
    real = simulated(timeline(schedule, pipeline, micro_batches))  # type: ignore[arg-type]
    stages = default_per_rank(schedule)  # type: ignore[arg-type]
    assert bubble(schedule, pipeline, micro_batches, stages) == pytest.approx(real, abs=0.011)
    if schedule in ("1f1b", "gpipe"):
        assert real == pytest.approx((pipeline - 1) / (micro_batches + pipeline - 1))


def test_a_roofline_by_hand():
    """1b on one H200, 8 x 4,096 tokens: 308 ms of products, 62 to 88 of attention, 10 of AdamW, 39 of the rest, by the
    project's published arithmetic."""
    config = build(TrainConfig, {"model": {"preset": "1b"}, "precision": "bf16", "compile": True, "batch": {
        "global_sequences": 8, "micro_sequences": 8, "virtual_ranks": 1}})
    layout = Layout(ParallelConfig(data="ddp"), MemoryConfig(), 8, 1, 1)
    result = step_time(Job(config, 128_256, 4096), layout, ClusterConfig(gpus=1, gpu="h200"))
    assert result.seconds == pytest.approx(0.308 + 0.088 + 0.010 + 0.039, rel=0.05)
    assert result.optimizer == pytest.approx(0.010, rel=0.2)
    assert result.exposed == result.bubble == 0
    flops = config.model.flops_per_token(128_256, 4096)
    assert result.mfu == pytest.approx(result.tokens_per_second * flops / 989e12)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.source} {run.length}")
def test_published_runs_reach_most_of_the_plan(run):
    found, _ = predicted(run)
    assert 0.55 < run.published / found < 1.15


@pytest.mark.parametrize(("window", "keys"), [(None, 4096), (8192, 4096), (4096, 3072), (1024, 960)])
def test_a_window_leaves_fewer_keys(window: int | None, keys: float):
    """Of 8,192 tokens, the first 4,096 see half of their window on average, the others all of it."""
    shape = {"kind": "mistral", "preset": "mistral_7b", "sliding_window": window}
    job = Job(build(TrainConfig, {"model": shape}), 32_000, 8192)
    assert seen(job, 8192) == pytest.approx(keys, rel=1e-3)


def test_recomputation_costs_what_it_computes_again():
    config = build(TrainConfig, {"model": {"preset": "8b"}, "precision": "bf16", "compile": True})
    job, cluster = Job(config, 128_256, 8192), ClusterConfig(gpus=8)
    share = layout_share(job)
    times = {kind: sum(passes(job, Layout(ParallelConfig(data="zero3"), MemoryConfig.model_validate(
        {"activation_checkpointing": kind}), 1, 8, 1), cluster, share)) for kind in ("none", "selective", "full")}
    assert times["none"] < times["selective"] < times["full"] < 4 / 3 * times["none"]


def layout_share(job: Job):
    from tidewheel.plan.layout import shares

    return shares(job, Layout(ParallelConfig(data="zero3"), MemoryConfig(), 1, 8, 1))[0]
