"""How long steps wait for other workers: measured, in the ledger, in the report and by the doctor."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.train.metrics.test_own_time import Device
from tidewheel import jsonlog, storage
from tidewheel.cli import run_command
from tidewheel.cluster.doctor.run import run as diagnose
from tidewheel.errors import ConfigError
from tidewheel.jsonlog import JsonLog
from tidewheel.train.metrics.hidden import LIMIT, examine
from tidewheel.train.metrics.waits import DeviceWaits, ThreadWaits, Waits, measured, waits_on
from tidewheel.train.runtime import Runtime
from tidewheel.train.time_ledger import summarise
from tidewheel.train.timeline import Timeline


def test_sleep_in_a_step_is_a_wait_and_work_is_not():
    waits = ThreadWaits()
    waits.end()  # before any step
    assert waits.take() == 0
    waits.begin()
    time.sleep(0.2)
    waits.end()
    time.sleep(0.2)  # between two steps
    assert waits.take() > 0.19
    assert waits.take() == 0
    waits.begin()
    spent = time.thread_time()
    while time.thread_time() < spent + 0.2:
        pass
    waits.end()
    assert waits.take() < 0.1, "neither work nor the wait for a CPU"
    waits.close()


def test_a_single_worker_waits_for_nobody():
    assert type(waits_on(torch.device("cpu"), 1)) is Waits
    assert isinstance(waits_on(torch.device("cpu"), 2), ThreadWaits)
    assert isinstance(waits_on(torch.device("cuda"), 2), DeviceWaits)


def a_late_rank() -> None:
    """Rank 1 comes 0.4 s late to an all-reduce, for which rank 0 waits."""
    waits, values = ThreadWaits(), torch.ones(10)
    dist.all_reduce(values)
    waits.begin()
    if dist.get_rank() == 1:
        spent = time.monotonic()
        while time.monotonic() < spent + 0.4:  # computes
            pass
    dist.all_reduce(values)
    waits.end()
    seconds = waits.take()
    if dist.get_rank() == 0:
        assert seconds > 0.25
    waits.close()


def test_a_rank_waits_for_a_later_one():
    on_ranks(2, a_late_rank)


def test_spans_of_a_device_are_read_when_it_has_passed_them():
    device = Device()
    waits = DeviceWaits(device.event)

    def wait(seconds: float) -> str:
        device.now += seconds
        return "waited"

    assert measured(wait, waits)(0.5) == "waited"
    device.now += 10
    device.done = False
    assert waits.take() == 0, "the host does not wait for the device"
    with waits.span():
        device.now += 0.25
    device.done = True
    assert waits.take() == pytest.approx(0.75)
    assert waits.take() == 0


def test_waits_are_a_category_of_the_ledger(tmp_path: Path):
    store, began = storage.store(tmp_path), time.time() - 10
    timeline = Timeline(JsonLog(store, "ledger.jsonl"), Runtime(), began, 1e9)
    timeline.spent("productive", 2.5)
    time.sleep(0.002)
    timeline.spent("productive", 0.5)
    timeline.flush()
    [line] = jsonlog.read(store, "ledger.jsonl")
    assert line["waited"] == 3.0
    summary = summarise([line], [])
    assert summary.parts["communication"] == pytest.approx(3.0, abs=1e-3)
    assert sum(summary.parts.values()) == pytest.approx(line["end"] - began)
    assert summary.goodput == pytest.approx(1.0), "steps that wait count"
    assert [record["category"] for record in summary.records] == ["productive", "communication"]
    late = summarise([{**line, "waited": 99.0}], [])
    assert late.parts["communication"] == pytest.approx(line["end"] - began), "never more than the interval"


@pytest.mark.parametrize(("config", "metrics", "says"), [
    ({"parallel": {"data": "ddp"}}, [], "compress gradients"),
    ({"parallel": {"data": "zero1"}, "compression": {"kind": "topk"}}, [], "parallel.bucket_bytes"),
    ({"parallel": {"data": "zero3"}}, [], "parallel.data zero2"),
    ({"parallel": {"data": "auto", "reduce": "micro_batch"}}, [], "parallel.reduce step"),
    ({"parallel": {"data": "ddp", "tensor": 2}}, [], "parallel.async_tensor"),
    ({"parallel": {"data": "ddp", "pipeline": 2}}, [], "more micro-batches"),
    ({"parallel": {"data": "ddp"}}, [{"own_seconds": [1.0, 1.0, 3.0]}, {}], "worker 2 is slower"),
    ({}, [], "parallel.reduce_dtype bf16")])
def test_the_finding_names_what_to_change(config, metrics, says):
    found = examine({"productive": 80.0, "communication": 20.0}, config, metrics)
    assert found is not None
    assert found.share == 0.2 > LIMIT
    assert says in found.fix
    fine = examine({"productive": 90.0, "communication": 10.0}, config, metrics)
    assert fine is not None
    assert fine.fix == ""
    assert examine({}, config, metrics) is None


def written(folder: Path, waited: float) -> str:
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"config": {"parallel": {"data": "ddp"}}}))
    line = {"rank": 0, "generation": 0, "node": "n", "category": "productive", "start": 0, "end": 10, "waited": waited}
    (folder / "ledger.jsonl").write_text(json.dumps(line) + "\n")
    return str(folder)


def test_the_doctor_examines_a_run(tmp_path: Path, capsys):
    [much] = diagnose(written(tmp_path / "much", 3.0))
    assert (much.status, much.detail) == ("warning", "steps wait for other workers in 30% of their time")
    assert "compress gradients" in much.fix
    [fine] = diagnose(written(tmp_path / "fine", 1.0))
    assert (fine.status, fine.fix) == ("ok", "")
    with pytest.raises(ConfigError, match=r"no run\.json"):
        diagnose(str(tmp_path))
    assert run_command(["doctor", "--run", str(tmp_path / "much")]) == 0
    assert "30%" in capsys.readouterr().out
