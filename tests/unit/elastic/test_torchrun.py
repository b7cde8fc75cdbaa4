"""Tests of training under torchrun: what a process reads of its place, and whole runs on two gloo ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unit.train.helpers import config, write_shards
from tidewheel import cli, jsonlog, storage
from tidewheel.elastic import torchrun
from tidewheel.elastic.torchrun import Place, device_of, fit_ranks, place, split_groups
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import ConfigError
from tidewheel.train.audit import audit

ENVIRONMENT = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
KILLER = """
import os, signal
from tidewheel.train.callback import Callback

class KillRank(Callback):
    "Kill rank 1 after step 5, once."
    EVERY_RANK = True
    once: str

    def on_step_end(self, worker, step):
        if worker.rank == 1 and step.step == 5 and not os.path.exists(self.once):
            open(self.once, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_place_is_read_from_the_environment():
    assert place(ENVIRONMENT) == Place(rank=9, world_size=16, local_rank=1)
    assert not Place(9, 16, 1).leads
    assert Place(0, 16, 0).leads


@pytest.mark.parametrize(("here", "world_size", "tensor", "split"), [
    ("8", 16, 8, 0), ("3", 6, 2, 1), ("6", 12, 4, 1), ("2", 8, 4, 2), ("", 6, 2, 0), ("3", 6, 1, 0)])
def test_tensor_parallel_groups_that_span_two_nodes_are_counted(here, world_size, tensor, split):
    numbers = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": here}
    where = place(ENVIRONMENT | numbers)
    assert where is not None
    assert split_groups(where, tensor) == split


@pytest.mark.parametrize("missing", ENVIRONMENT)
def test_without_all_of_the_variables_torchrun_has_not_started_the_process(missing):
    assert place({name: value for name, value in ENVIRONMENT.items() if name != missing}) is None


@pytest.mark.parametrize(("changed", "message"), [
    ({"RANK": "x"}, "RANK is 'x', not a number"), ({"WORLD_SIZE": "-1"}, "WORLD_SIZE is '-1'"),
    ({"RANK": "16"}, "do not fit"), ({"LOCAL_RANK": "10"}, "do not fit")])
def test_a_wrong_environment_is_refused(changed, message):
    with pytest.raises(ConfigError, match=message):
        place(ENVIRONMENT | changed)


def test_each_rank_takes_the_gpu_of_its_local_rank(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr("tidewheel.train.local_device.prepare_environment", lambda: None)
    assert device_of(Place(9, 16, 1)) == torch.device("cuda:1") == chosen[0]
    assert device_of(Place(9, 16, 1), "cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="local rank 2 has no GPU: torch sees 2"):
        device_of(Place(2, 4, 2))
    with pytest.raises(ConfigError, match="uses the GPU of its local rank"):
        device_of(Place(0, 4, 0), "cuda:1")


def test_local_and_address_are_refused_under_torchrun(tmp_path, monkeypatch, capsys):
    settings = config(tmp_path)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert cli.run_command(["train", _written(tmp_path, settings), "--local"]) == 2
    assert "torchrun has started the ranks" in capsys.readouterr().err


def test_one_rank_trains_as_a_process_without_torchrun_does(tmp_path):
    write_shards(tmp_path / "shards")
    quick = ("data.validation=''", "evaluation={every_steps: 0, sample_tokens: 0}", "steps=2")
    alone = fit_local(config(tmp_path, "alone", *quick))
    assert fit_ranks(config(tmp_path, "ranks", *quick), Place(0, 1, 0)).loss == alone.loss


def _written(folder: Path, settings) -> str:
    path = folder / f"{settings.run.id}.yaml"
    path.write_text(settings.model_dump_json(exclude_defaults=True))  # JSON is YAML
    return str(path)


def _torchrun(folder: Path, settings, *sets: str) -> subprocess.CompletedProcess[str]:
    """Train on two ranks of a torchrun of its own; its store takes a free port."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
               "-m", "tidewheel", "train", _written(folder, settings), *(f"--set={item}" for item in sets)]
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}", "COLUMNS": "200"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def _losses(settings) -> dict[int, float]:
    lines = jsonlog.read(storage.store(settings.run_uri), "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if "loss" in line and "tokens_per_second" in line}


@pytest.mark.long
def test_two_ranks_train_as_one_and_a_run_moves_between_them(tmp_path):
    write_shards(tmp_path / "shards")
    write_shards(tmp_path / "validation", shards=1, seed=1)
    same = ("reproducible=true", "schedule.kind=constant", "precision=fp32", "metrics.every_steps=1",
            "checkpoint.every_steps=4")
    alone, moved = config(tmp_path, "alone", *same), config(tmp_path, "moved", *same, "steps=4")
    fit_local(alone)
    fit_local(moved)
    moved = moved.model_copy(update={"steps": alone.steps})
    done = _torchrun(tmp_path, moved)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"8 steps", done.stdout)) == 1  # rank 0 alone prints
    assert done.stdout.count("report: ") == 1
    losses = _losses(moved)
    assert losses == _losses(alone)
    assert set(losses) == set(range(1, alone.steps + 1))
    worlds = [(line["step"], line["world_size"]) for line in jsonlog.read(
        storage.store(moved.run_uri), "metrics.jsonl") if "tokens_per_second" in line]
    assert {world for step, world in worlds if step > 4} == {2}
    assert {world for step, world in worlds if step <= 4} == {1}
    assert audit(moved.run_uri).ok


@pytest.mark.long
def test_a_killed_rank_is_torchruns_first_failure_and_a_restart_resumes(tmp_path):
    write_shards(tmp_path / "shards")
    (tmp_path / "killer.py").write_text(KILLER)
    settings = config(tmp_path, "killed", "checkpoint.every_steps=2", "data.validation=''")
    callback = f"callbacks=[{{kind: 'killer:KillRank', once: '{tmp_path / 'once'}'}}]"
    killed = _torchrun(tmp_path, settings, callback)
    assert killed.returncode == 1
    assert re.search(r"rank\s*: 1 .*\n\s*exitcode\s*: -9", killed.stderr), killed.stderr
    assert f"Signal {int(signal.SIGKILL)}" in killed.stderr or "SIGKILL" in killed.stderr
    again = _torchrun(tmp_path, settings, callback)
    assert again.returncode == 0, again.stderr
    assert audit(settings.run_uri).ok


def test_the_wait_for_torchruns_signal_ends_with_the_signal(tmp_path, monkeypatch):
    from tidewheel.elastic.process_group import GenerationGroup
    from tidewheel.errors import ClusterError
    from tidewheel.stopping import Stop

    write_shards(tmp_path / "shards")
    settings = config(tmp_path, "lost", "data.validation=''")

    def fail(self, rank, world_size, device):
        raise RuntimeError("gloo: Connection closed by peer")

    waited = []
    stop = Stop()
    monkeypatch.setattr(GenerationGroup, "open_from_environment", fail)
    monkeypatch.setattr(stop.requested, "wait", waited.append)
    with pytest.raises(ClusterError, match="rank 1 of 2 ends because another rank ended"):
        fit_ranks(settings, Place(1, 2, 1), stop=stop)
    assert waited == [torchrun.SIGNAL_SECONDS]
