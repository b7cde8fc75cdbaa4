"""What is ranked is legal, what is refused says why, and the command tells it."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.cli import run_command
from tidewheel.config import build, load
from tidewheel.errors import ConfigError
from tidewheel.plan import tables
from tidewheel.plan.hardware import ClusterConfig
from tidewheel.plan.layout import Job
from tidewheel.plan.layouts import Ranking, layouts, own, rank
from tidewheel.plan.memory_tier import memory_tier
from tidewheel.plan.summary import summary
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import legal


def nested(settings: dict[str, object]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def must_be_legal(config: dict, ranking: Ranking, gpus: int, vocabulary: int, length: int) -> None:
    for item in ranking.fitting:
        made = build(TrainConfig, {**config, "elastic": {"min_workers": gpus, "max_workers": gpus}},
                     nested(item.layout.settings()))
        legal.check_world(made, gpus)
        legal.check_data(made, vocabulary, length)
        assert item.layout.gpus == gpus


@settings(max_examples=8, deadline=None)
@given(gpus=st.sampled_from([1, 2, 4, 6, 8, 16, 24]), layers=st.integers(1, 9), heads=st.sampled_from([2, 4, 6]),
       virtual=st.sampled_from([4, 12, 24]), compiled=st.booleans())
def test_every_layout_is_legal(gpus: int, layers: int, heads: int, virtual: int, compiled: bool):
    config = {"model": {"dim": 32 * heads, "num_layers": layers, "num_heads": heads, "ffn_dim": 48 * heads},
              "precision": "bf16", "compile": compiled,
              "batch": {"global_sequences": 48, "micro_sequences": 1, "virtual_ranks": virtual}}
    job = Job(build(TrainConfig, config), 1536, 96)
    cluster = ClusterConfig(gpus=gpus, nodes_of=min(8, gpus))
    if not any(layouts(job, cluster)):
        with pytest.raises(ConfigError, match="legal"):
            rank(job, cluster)
        return
    ranking = rank(job, cluster)
    assert ranking.fitting
    times = [item.time.seconds for item in ranking.fitting]
    assert times == sorted(times)
    must_be_legal(config, ranking, gpus, 1536, 96)


@pytest.mark.parametrize("kept", [
    {"activation_checkpointing": "offload", "activation_disk": "/local nvme"},
    {"activation_checkpointing": "every_nth", "every": "sqrt"},
    {"activation_checkpointing": "selective", "keep_products": ["wo", "w2"]},
    {"activation_checkpointing": "selective", "recompute_products": 3}])
def test_what_is_printed_is_accepted_by_the_same_configuration(kept: dict):
    config = {"model": {"dim": 64, "num_layers": 4, "num_heads": 2, "ffn_dim": 96}, "precision": "bf16", "memory": kept,
              "batch": {"global_sequences": 8, "micro_sequences": 1, "virtual_ranks": 4},
              "elastic": {"min_workers": 4, "max_workers": 4}}
    job = Job(build(TrainConfig, config), 1536, 96)
    ranking = rank(job, ClusterConfig(gpus=4))
    kinds = {item.layout.memory.activation_checkpointing for item in ranking.fitting}
    assert {"none", "selective", "full"} <= kinds
    assert ranking.own is not None
    for item in (*ranking.fitting, ranking.own):
        printed = shlex.split(tables._options(item))
        chosen = [text for text in printed if text != "--set"]
        assert build(TrainConfig, config, chosen).memory == item.layout.memory
    must_be_legal(config, ranking, 4, 1536, 96)


@pytest.fixture(scope="module")
def seventy() -> tuple[Job, ClusterConfig, Ranking]:
    job = Job(load(TrainConfig, "jobs/configs/llama_70b.yaml"), 128_256, 8192)
    cluster = ClusterConfig(gpus=256)
    return job, cluster, rank(job, cluster)


def test_the_published_layout_is_listed(seventy: tuple[Job, ClusterConfig, Ranking]):
    """TP 4 x PP 8 x DP 8 of 70B on 256 GPUs: legal, fits, and slower than the first with smaller tensor groups only by
    what tensor parallelism sends: it is not hidden here."""
    _, _, ranking = seventy
    published = next(item for item in ranking.fitting if (item.layout.parallel.tensor, item.layout.parallel.pipeline,
                                                          item.layout.data) == (4, 8, 8))
    first = next(item for item in ranking.fitting if item.layout.parallel.tensor < 4)
    slower = published.time.seconds - first.time.seconds
    assert published.time.axes[0].exposed - first.time.axes[0].exposed > 0.75 * slower


def test_the_configuration_has_the_layout_that_is_first(seventy: tuple[Job, ClusterConfig, Ranking]):
    """And its layout fits the smallest number of workers that it allows."""
    job, _, ranking = seventy
    assert ranking.own is not None
    assert ranking.own.layout == ranking.fitting[0].layout
    planned, reason = own(job, ClusterConfig(gpus=job.config.elastic.min_workers))
    assert planned is not None
    assert not reason


def test_why_meshes_are_refused(seventy: tuple[Job, ClusterConfig, Ranking]):
    reasons = {item.what: (item.reason, item.nearest) for item in seventy[2].refused}
    assert reasons["TP 16"] == ("parallel.tensor 16 would span several nodes of 8 GPUs", "TP 8")
    assert reasons["TP 1 x PP 1 x DP 256"][0] == (
        "256 data-parallel ranks do not divide batch.virtual_ranks 64; nearest that do: 64")
    assert "82 pieces of the model" in reasons["TP 1 x PP 128 x DP 2"][0]
    assert "needs 86.6 GB" in reasons["TP 1 x PP 8 x DP 32"][0]
    assert reasons["TP 1 x PP 8 x DP 32"][1] == "TP 2 x PP 8"


def test_a_layout_that_does_not_fit_gets_the_nearest_that_does():
    changed = ["parallel={data: ddp}", "elastic={min_workers: 8, max_workers: 64}"]
    job = Job(load(TrainConfig, "jobs/configs/llama_8b.yaml", changed), 128_256, 8192)
    ranking = rank(job, ClusterConfig(gpus=8))
    assert ranking.own is not None
    assert ranking.own_reason.startswith("needs ")
    assert ranking.nearest is not None
    assert ranking.nearest.layout.describe() in ("DP 8 zero2", "DP 8 zero3")


def test_gradients_are_summed_in_the_configured_type():
    config = {"model": {"preset": "1b"}, "precision": "bf16", "parallel": {"reduce_dtype": "bf16"},
              "batch": {"global_sequences": 64, "micro_sequences": 1, "virtual_ranks": 16}}
    ranking = rank(Job(build(TrainConfig, config), 128_256, 4096), ClusterConfig(gpus=16))
    assert {item.layout.parallel.reduce_dtype for item in ranking.fitting} == {"bf16"}
    must_be_legal(config, ranking, 16, 128_256, 4096)


def test_nothing_is_legal():
    job = Job(build(TrainConfig, {"batch": {"global_sequences": 5, "micro_sequences": 1, "virtual_ranks": 5}}), 513, 63)
    with pytest.raises(ConfigError, match="no layout of the model on 7 GPUs is legal"):
        rank(job, ClusterConfig(gpus=7, nodes_of=7))


def test_long_rows_are_cut():
    config = {"model": {"preset": "8b", "max_sequence_length": 131072}, "precision": "bf16", "compile": True,
              "batch": {"global_sequences": 8, "micro_sequences": 1, "virtual_ranks": 8}}
    ranking = rank(Job(build(TrainConfig, config), 128_256, 131_072), ClusterConfig(gpus=64))
    assert ranking.fitting[0].layout.parallel.context > 1
    must_be_legal(config, ranking, 64, 128_256, 131_072)


def test_the_whole_run(seventy: tuple[Job, ClusterConfig, Ranking]):
    job, cluster, ranking = seventy
    result = summary(job, ranking.fitting[0], cluster.model_copy(update={"price_per_gpu_hour": 2.0}))
    assert result.checkpoint_bytes == 12 * job.parameters
    assert result.tokens == 100_000 * 1024 * 8192
    assert result.days * 86_400 * 256 == pytest.approx(result.gpu_hours * 3600)
    assert result.cost == pytest.approx(2 * result.gpu_hours)
    assert 0.9 < result.goodput <= result.best_goodput < 1
    assert result.tokens_per_day == pytest.approx(
        ranking.fitting[0].time.tokens_per_second * 86_400 * result.goodput)


def test_the_command(capsys: pytest.CaptureFixture[str]):
    command = ["plan", "jobs/configs/llama_1b.yaml", "--gpus", "4", "--gpu", "a100", "--sequence-length", "4096",
               "--vocabulary-size", "128256"]
    assert run_command(command) == 0
    shown = capsys.readouterr().out
    assert "yours" in shown
    assert "activations" in shown
    assert "use it: --set parallel.data=" in shown
    assert run_command([*command, "--assume", "price_per_gpu_hour=1.5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["run"]["cost"] == pytest.approx(1.5 * result["run"]["gpu_hours"])
    assert result["layouts"][0]["memory"]["total"] < 80e9
    assert {axis["name"] for axis in result["layouts"][0]["time"]["axes"]} == {
        "tensor", "context", "expert", "pipeline", "data"}


@pytest.mark.parametrize(("options", "told"), [
    (["--gpus", "8", "--gpu", "h300"], "did you mean"), (["--gpus", "12"], "the nearest number is 16"),
    (["--gpus", "8", "--assume", "netwrok_gbytes=3"], "did you mean 'network_gbytes'")])
def test_wrong_options(options: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    assert run_command(["plan", "jobs/configs/llama_1b.yaml", *options]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_nothing_fits(capsys: pytest.CaptureFixture[str]):
    assert run_command(["plan", "jobs/configs/llama_70b.yaml", "--gpus", "8", "--gpu", "l40s"]) == 2
    assert "needs" in capsys.readouterr().out


def test_planning_imports_nothing_heavy():
    code = ("import sys; from tidewheel.cli import run_command;"
            "run_command(['plan', 'jobs/configs/llama_1b.yaml', '--gpus', '1', '--json']);"
            "print([m for m in ('ray', 'torch', 'numba', 'pyarrow') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def test_the_memory_tier_is_counted(seventy: tuple[Job, ClusterConfig, Ranking]):
    """An H100 copies over 55 GB/s to its host and sends over 50 GB/s; a node of 8 keeps 3 slots and 2 replicas."""
    job, cluster, ranking = seventy
    layout, mine = ranking.fitting[0].layout, 12 * job.parameters / 256
    cost = memory_tier(job, layout, cluster, 0.1)
    assert cost is not None
    seconds = mine / 55e9 + mine / 50e9
    assert cost.every_steps == math.ceil(seconds / (0.02 * 0.1))
    assert cost.host_bytes == pytest.approx(5 * 8 * mine)
    assert cost.network_bytes_per_second == pytest.approx(8 * mine / (cost.every_steps * 0.1))
    alone = memory_tier(job, layout, cluster.model_copy(update={"gpus": 8}), 0.1)
    assert alone is not None
    assert (alone.push_seconds, alone.network_bytes_per_second) == (0.0, 0.0)
    assert alone.host_bytes == pytest.approx(3 * 8 * mine)
    each, never = (memory_tier(replace(job, config=build(TrainConfig, job.config.canonical(),
                                                         [f"checkpoint.memory_tier.every_steps={every}"])),
                               layout, cluster, 0.1) for every in (1, 0))
    assert never is None
    assert each is not None
    assert each.network_bytes_per_second == pytest.approx(8 * mine / 0.1)


@pytest.mark.parametrize(("gpus", "copies"), [(None, 6), (8, 4)])
def test_the_local_disk_takes_one_more_slot(seventy: tuple[Job, ClusterConfig, Ranking], gpus: int | None, copies: int):
    job, cluster, ranking = seventy
    disk = build(TrainConfig, job.config.canonical(), ["checkpoint.local_disk.folder=/local_nvme"])
    cost = memory_tier(replace(job, config=disk), ranking.fitting[0].layout,
                       cluster.model_copy(update={"gpus": gpus or cluster.gpus}), 0.1)
    assert cost is not None
    assert cost.host_bytes == pytest.approx(copies * 8 * 12 * job.parameters / 256)
