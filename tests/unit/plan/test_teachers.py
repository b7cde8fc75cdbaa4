"""Planned memory and time of a live teacher."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.train.helpers import config as run_config
from tests.unit.train.helpers import write_shards
from tidewheel.config import build
from tidewheel.elastic.trainer import fit_local
from tidewheel.models import families
from tidewheel.plan.hardware import ClusterConfig
from tidewheel.plan.layout import Job, Layout
from tidewheel.plan.memory import memory
from tidewheel.plan.step_time import passes, shares
from tidewheel.plan.tables import job_of
from tidewheel.train.config import TrainConfig
from tidewheel.train.memory.config import MemoryConfig
from tidewheel.train.parallel.config import ParallelConfig
from tidewheel.train.teacher_config import teacher_config

GB = 1e9


def planned(weights: str) -> Job:
    """Return a 1B student of an 8B teacher, in bf16."""
    config = build(TrainConfig, {
        "model": {"preset": "1b"}, "precision": "bf16",
        "objective": {"kind": "distillation", "teacher": "run", "teacher_weights": weights}})
    larger = families.KIND.build(families.DEFAULT, {"preset": "8b"})
    teacher = Job(teacher_config(config, larger.shape()), 128_256, 2048)
    return Job(config, 128_256, 2048, teacher=teacher)


def layout(data: str, ranks: int) -> Layout:
    return Layout(ParallelConfig(data=data), MemoryConfig(activation_checkpointing="full"), 1, ranks, 1)


def test_a_teachers_weights_are_sharded_as_the_students():
    for weights, size in (("bf16", 2), ("fp32", 4)):
        job = planned(weights)
        assert job.teacher is not None
        whole = job.teacher.parameters * size
        logits = 1024 * 128_256 * (12 + 8 + 2)
        copied = memory(job, layout("ddp", 8)).teacher
        assert copied == pytest.approx(whole + logits + 2048 * 4096 * size, rel=1e-3)
        sharded = memory(job, layout("zero3", 8)).teacher
        block = job.teacher.costs.matrices / 32
        gathered = 2 * max(2 * block, block + 128_256 * 4096) / 2 + 128_256 * 4096 * 2
        assert whole / 8 < sharded - logits < whole / 8 + 2 * gathered
        assert "teacher" in memory(job, layout("zero3", 8)).parts()
    alone = Job(job.config, 128_256, 2048)
    assert memory(alone, layout("zero3", 8)).total == pytest.approx(memory(job, layout("zero3", 8)).total - sharded)
    assert "teacher" not in memory(alone, layout("zero3", 8)).parts()


def test_a_teacher_adds_a_forward_pass():
    job, of = planned("bf16"), layout("ddp", 8)
    cluster = build(ClusterConfig, {"gpus": 8, "gpu": "h100", "nodes_of": 8})
    assert job.teacher is not None
    [share], [own] = shares(job, of), shares(job.teacher, of)
    forward, backward = passes(job, of, cluster, share)
    alone = passes(Job(job.config, 128_256, 2048), of, cluster, share)
    assert forward - alone[0] == pytest.approx(passes(job.teacher, of, cluster, own)[0])
    assert backward == alone[1]


def test_the_teacher_is_read_from_its_checkpoint(tmp_path: Path):
    write_shards(tmp_path / "shards")
    fit_local(run_config(tmp_path, "teacher", "steps=1", "data.validation=''", "evaluation.sample_tokens=0"))
    config = run_config(tmp_path, "student", "objective.kind=distillation", "model.num_layers=1",
                        f"objective.teacher={tmp_path}/runs/teacher")
    job, _ = job_of(config, None, None)
    assert job.teacher is not None
    assert (job.teacher.model.num_layers, job.model.num_layers) == (2, 1)
