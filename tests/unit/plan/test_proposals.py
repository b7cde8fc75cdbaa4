"""What a plan proposes when nothing fits, the bytes of every optimizer, and the cards that it knows."""

from __future__ import annotations

import json

import pytest

from tidewheel.cli import run_command
from tidewheel.config import build, load
from tidewheel.errors import ConfigError
from tidewheel.plan.byte_models import byte_models
from tidewheel.plan.gpus import GPUS
from tidewheel.plan.hardware import ClusterConfig
from tidewheel.plan.layout import Job, Layout
from tidewheel.plan.layouts import Planned, rank
from tidewheel.plan.memory import memory
from tidewheel.plan.proposals import changes, proposals
from tidewheel.plan.step_time import step_time
from tidewheel.plan.tables import layout_row
from tidewheel.train import optimizers
from tidewheel.train.config import TrainConfig
from tidewheel.train.memory.config import MemoryConfig
from tidewheel.train.parallel.config import ParallelConfig

SMALL = ["batch={global_sequences: 8, micro_sequences: 1, virtual_ranks: 8}",
         "elastic={min_workers: 1, max_workers: 8}"]
ONE = ClusterConfig(gpus=1, gpu="rtx3090", nodes_of=1, host_memory_gb=256)


def eight_billion() -> Job:
    return Job(load(TrainConfig, "jobs/configs/llama_8b.yaml", SMALL), 128_256, 2048)


def test_8b_on_one_card_is_told_what_fits_and_what_it_costs():
    job = eight_billion()
    assert not rank(job, ONE).fitting
    found = {item.change.what: item for item in proposals(job, ONE)}
    assert "parameters, gradients and state in host memory" in found
    assert "all, and the state on disk" in found
    assert "an adapter on a base in 4 bits (NF4)" in found
    assert "8-bit moments" not in found, "10 bytes a parameter are 80 GB"
    for item in found.values():
        assert item.planned.memory.total <= ONE.usable_bytes
        assert item.planned.host <= ONE.kind.host_memory
    offloaded, on_disk = found["both"], found["all, and the state on disk"]
    assert offloaded.slower is not None
    assert on_disk.slower is not None
    assert 1.2 < offloaded.slower < on_disk.slower
    assert on_disk.planned.host < offloaded.planned.host
    adapter = found["an adapter on a base in 4 bits (NF4)"]
    assert adapter.planned.memory.parameters < job.parameters, "the base takes less than a byte a parameter"


def test_a_proposal_is_a_configuration_that_training_takes():
    for change in changes():
        build(TrainConfig, {"model": {"preset": "llama3_8b"}, "precision": "bf16"},
              [f"{name}={value}" for name, value in change.settings.items()])


def test_the_command_prints_proposals_and_byte_models(capsys: pytest.CaptureFixture[str]):
    command = ["plan", "jobs/configs/llama_8b.yaml", "--gpus", "1", "--gpu", "rtx3090", "--nodes-of", "1",
               "--sequence-length", "2048", *(part for text in SMALL for part in ("--set", text))]
    assert run_command(command) == 2
    shown = capsys.readouterr().out
    assert "nothing fits; with these changes it does" in shown
    assert "--set parallel.offload=true" in shown
    assert "ZeRO's: 16-bit gradients" in shown
    assert run_command([*command, "--json"]) == 2
    values = json.loads(capsys.readouterr().out)
    assert values["proposals"][0]["slower"] > 1
    assert {model["what"] for model in values["byte_models"]} > {"sgd", "adafactor", "adamw8bit"}


def test_published_byte_models_and_those_of_all_optimizers():
    """7B: 112 GB with 2+2+12 (arXiv:1910.02054), 98 GB with 2+4+4+4, SGD 8 and 12 bytes a parameter."""
    job = Job(build(TrainConfig, {"model": {"preset": "1b"}}), 32_000, 2048)
    models = {model.what: model for model in byte_models(job)}
    assert set(optimizers.KIND.built_in()) < set(models)
    assert 7 * models["ZeRO's: 16-bit gradients"].total == 112
    assert 7 * models["bf16 weights without masters"].total == 98
    assert [models[name].total for name in ("sgd, momentum 0", "sgd", "adamw")] == [8, 12, 16]
    assert models["adafactor"].total == 8
    assert models["adamw"].note == "this run"
    low = Job(build(TrainConfig, {"model": {"preset": "1b"}, "precision": "bf16", "parameters": "bf16"}), 32_000, 2048)
    assert next(model.total for model in byte_models(low) if model.what == "adamw") == 18


def test_both_ways_to_count_a_bubble():
    """(p-1)/(m+p-1) of all time, and (p-1)/m of the time without it: 7 of 16 micro-batches are 44 %, or 30.4 %."""
    job = Job(load(TrainConfig, "jobs/configs/llama_70b.yaml"), 128_256, 8192)
    layout = Layout(ParallelConfig(data="zero1", tensor=8, pipeline=8), MemoryConfig(), 1, 4, 16)
    row = layout_row("1", Planned(layout, memory(job, layout), step_time(job, layout, ClusterConfig(gpus=256)), 0.0))
    assert (row["bubble %"], row["(p-1)/m %"]) == ("30.4", "43.8")


@pytest.mark.parametrize("name", GPUS)
def test_every_card_can_be_planned_for(name: str):
    precision = "bf16" if GPUS[name].bf16 else "fp16"
    config = {"model": {"preset": "125m"}, "precision": precision, "compile": True, "batch": {"micro_sequences": 1}}
    first = rank(Job(build(TrainConfig, config), 32_000, 1024), ClusterConfig(gpus=1, gpu=name, nodes_of=1)).fitting[0]
    assert 0.1 < first.time.mfu < 1


def test_a_card_without_bf16_says_so():
    config = build(TrainConfig, {"model": {"preset": "125m"}, "precision": "bf16"})
    with pytest.raises(ConfigError, match="a t4 has no bf16"):
        rank(Job(config, 32_000, 1024), ClusterConfig(gpus=1, gpu="t4", nodes_of=1))
