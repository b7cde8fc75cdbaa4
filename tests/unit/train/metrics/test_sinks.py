"""Sinks and the thread that serves them; TensorBoard's own reader is the oracle of what its files say."""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from pydantic import PrivateAttr
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tidewheel import storage
from tidewheel.cluster.s3_server import S3Server
from tidewheel.config import build
from tidewheel.errors import ConfigError, StorageAwayError
from tidewheel.train.failures import is_passing
from tidewheel.train.metrics.config import MetricsConfig
from tidewheel.train.metrics.sinks import Background
from tidewheel.train.metrics.tracked import TrackerSink
from tidewheel.train.metrics.tracker import TrackedRun, Tracker
from tidewheel.train.trackers import WeightsAndBiases
from tidewheel.train.trackers.clients import event_files
from tidewheel.train.trackers.clients.event_files import EventFiles


def line(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "time": 1000.0 + step, "loss": loss, "tokens_per_second": 5.0 * step, "generation": 0,
            "host_resident_bytes": 7}


def write_run(place: storage.Store) -> None:
    """Steps 1 to 6, killed; again from step 4, with an evaluation and a sample."""
    first = EventFiles(place, flush_seconds=10.0)
    for step in range(1, 7):
        first.write(line(step, 10.0 - step))
    first.flush()  # and nothing more: killed
    again = EventFiles(place, step=3, generation=1, flush_seconds=10.0)
    again.write(line(4, 0.1))
    again.write(line(5, 0.1))
    again.restart(3)  # a rollback
    for step in range(4, 9):
        again.write(line(step, 20.0 - step))
        again.flush()
    again.write({"step": 8, "time": 1009.0, "validation_loss": 2.0, "validation": {
        "web": {"loss": 2.0, "bits_per_byte": 0.9, "tokens": 12}, "code": {"loss": 1.0, "bits_per_byte": None}}})
    again.write({"step": 8, "time": 1010.0, "sample": "def f():\n  <script>"})
    again.close()


def check_run(folder: Path) -> None:
    result = EventAccumulator(str(folder))
    result.Reload()
    losses = [(event.step, event.value) for event in result.Scalars("train/loss")]
    assert losses == [(1, 9.0), (2, 8.0), (3, 7.0), *((step, 20.0 - step) for step in range(4, 9))]
    assert [event.wall_time for event in result.Scalars("speed/tokens_per_second")] == [1000.0 + s for s in range(1, 9)]
    assert set(result.Tags()["scalars"]) == {
        "train/loss", "speed/tokens_per_second", "memory/host_resident_bytes", "validation/web/loss",
        "validation/web/bits_per_byte", "validation/web/tokens", "validation/code/loss"}
    sample = result.Tensors("sample/text_summary")[0].tensor_proto.string_val[0].decode()
    assert sample == "    def f():\n      <script>"


def test_tensorboard_on_a_folder(tmp_path: Path):
    write_run(storage.store(tmp_path))
    check_run(tmp_path / "tensorboard")


def test_tensorboard_on_an_object_store(tmp_path: Path):
    with S3Server() as server:
        server.create_bucket("runs")
        run_store = storage.store("s3://runs/one")
        write_run(run_store)
        for entry in run_store.list("tensorboard"):
            path = tmp_path / entry.key
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(run_store.read(entry.key))
    check_run(tmp_path / "tensorboard")
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_tensorboard_files_on_an_object_store_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """When they are long, and when a put may yet arrive late."""
    monkeypatch.setattr(event_files, "FILE_BYTES", 1000)
    with S3Server() as server:
        server.create_bucket("runs")
        run_store = storage.store("s3://runs/two")
        sink, late = EventFiles(run_store, flush_seconds=10.0), list[tuple[str, bytes]]()
        for step in range(1, 101):
            sink.write(line(step, float(step)))
            if step % 40:
                sink.flush()
                continue
            with monkeypatch.context() as broken:
                broken.setattr(type(run_store), "write", lambda _, key, data: late.append((key, data)) or 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    sink.flush()
        sink.close()
        for key, data in late:
            run_store.write(key, data)
        entries = run_store.list("tensorboard")
        for entry in entries:
            path = tmp_path / entry.key
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(run_store.read(entry.key))
    result = EventAccumulator(str(tmp_path / "tensorboard"))
    result.Reload()
    assert [event.step for event in result.Scalars("train/loss")] == list(range(1, 101))
    assert len(entries) < 30


class Fragile:
    """A sink that waits until it may go on, and raises `error` at the steps `failing`."""

    def __init__(self, failing: range = range(0), error: Exception = OSError("away")) -> None:  # noqa: B008
        self._failing, self._error = failing, error
        self.may = threading.Event()
        self.taken: list[int] = []
        self.closed = False

    def write(self, record) -> None:
        self.may.wait()
        if record["step"] in self._failing:
            raise self._error
        self.taken.append(record["step"])

    def restart(self, step: int) -> None:
        return

    def flush(self) -> None:
        return

    def close(self) -> None:
        self.closed = True


def test_the_step_waits_for_no_sink_and_a_passing_error_is_reported_once_per_outage():
    reported: list[tuple[str, str, int]] = []
    slow, fragile = Fragile(), Fragile(failing=range(3, 6))
    fragile.may.set()
    background = Background({"slow": slow, "fragile": fragile}, lambda *failure: reported.append(failure))
    for step in range(1, 11):
        background.write(line(step, 0.0))
    assert slow.taken == []  # it has not even begun, and all are handed over
    slow.may.set()
    background.flush()
    assert slow.taken == list(range(1, 11))
    assert fragile.taken == [1, 2, 6, 7, 8, 9, 10]
    assert reported == [("fragile", "OSError: away", 1)]
    assert background.failures == {"fragile": 3}
    background.close()
    background.close()
    assert slow.closed
    assert fragile.closed


def test_a_mistake_in_a_sink_is_raised_by_the_next_call_and_the_others_are_served():
    good, wrong = Fragile(), Fragile(failing=range(2, 3), error=ConfigError("the code is wrong"))
    good.may.set()
    wrong.may.set()
    background = Background({"wrong": wrong, "good": good}, lambda *failure: None)
    for step in (1, 2, 3):
        background._queue.put(lambda sink, step=step: sink.write(line(step, 0.0)))
    with pytest.raises(ConfigError, match="the code is wrong"):
        background.flush()
    assert (wrong.taken, wrong.closed, good.taken) == ([1], True, [1, 2, 3])
    with pytest.raises(ConfigError, match="the code is wrong"):
        background.write(line(4, 0.0))
    background.leave()  # how the generation ended is what counts
    assert good.closed


class Service(Tracker):
    """Opens at the third try."""

    _tries: list[str] = PrivateAttr(default_factory=list)

    def open(self, run: TrackedRun) -> Any:
        self._tries.append(run.id)
        if len(self._tries) < 3:
            raise ConnectionRefusedError("no service")
        return Fragile()


def test_a_tracker_whose_service_does_not_answer_is_opened_later(tmp_path: Path):
    seconds = [0.0]
    tracker = Service()
    sink = TrackerSink(tracker, tracked(tmp_path), clock=lambda: seconds[0])
    assert sink.may_write
    for now, tries in ((1.0, 1), (31.0, 2), (40.0, 2)):
        seconds[0] = now
        with pytest.raises(ConnectionRefusedError):
            sink.write(line(1, 0.0))
        assert len(tracker._tries) == tries
    sink.close()
    seconds[0] = 62.0
    sink.restart(0)
    assert len(tracker._tries) == 3


class LibraryError(Exception):
    """As client libraries have them."""


def chained(outer: Exception, cause: Exception) -> Exception:
    outer.__cause__ = cause
    return outer


@pytest.mark.parametrize(("error", "passing"), [
    (ConnectionError("refused"), True),
    (TimeoutError("late"), True),
    (OSError(28, "No space left on device"), True),
    (StorageAwayError("the store does not answer"), True),
    (chained(LibraryError("cannot connect"), ConnectionResetError("reset")), True),
    (FileNotFoundError("no such file"), False),
    (PermissionError("not yours"), False),
    (chained(KeyError("answer"), ConnectionError("refused")), False),
    (LibraryError("wrong key"), False),
    (TypeError("no number"), False),
])
def test_which_errors_may_pass(error: Exception, passing: bool):
    assert is_passing(error) is passing


def tracked(folder: Path) -> TrackedRun:
    return TrackedRun("r", storage.store(folder), step=2, recorded=4, generation=0, settings={"steps": 8})


def test_wandb_is_refused_without_its_package_and_without_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    config = WeightsAndBiases(project="p")
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed"):
        config.check()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        config.open(tracked(tmp_path))


def test_wandb_gets_each_step_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The client's own calls, as its reference gives them, noted down by a module in its place."""
    calls: list[tuple[str, Any]] = []

    class Run:
        def define_metric(self, name: str, step_metric: str) -> None:
            calls.append(("define", (name, step_metric)))

        def log(self, data: dict[str, Any]) -> None:
            calls.append(("log", data))

        def finish(self) -> None:
            calls.append(("finish", None))

    def init(**given: Any) -> Run:
        calls.append(("init", given))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("WANDB_API_KEY", "sesame")
    sink = WeightsAndBiases(project="p").open(tracked(tmp_path))
    assert sink is not None
    for step in (3, 4, 5):
        sink.write(line(step, 1.0))
    sink.close()
    kind, given = calls[0]
    assert kind == "init"
    assert (given["id"], given["resume"], given["project"], given["config"]) == ("r", "allow", "p", {"steps": 8})
    assert "sesame" not in str(calls)
    assert [data["step"] for name, data in calls if name == "log"] == [5]
    assert calls[-1][0] == "finish"


def test_configurations_of_trackers():
    [wandb] = build(MetricsConfig, {"trackers": [{"kind": "wandb", "project": "p"}]}).trackers
    assert isinstance(wandb, WeightsAndBiases)
    for wrong, hint in (({"straggle": {}}, "did you mean 'straggler'"),
                        ({"trackers": ["tensorbord"]}, "did you mean 'tensorboard'"),
                        ({"trackers": [{"kind": "wandb", "projct": "p"}]}, "did you mean 'project'"),
                        ({"trackers": [{"project": "p"}]}, "which tracker is it"),
                        ({"tensorboard": False}, "tensorboard is a tracker: write trackers")):
        with pytest.raises(ConfigError, match=hint):
            build(MetricsConfig, wrong)
