"""Evaluation tasks on Ray workers: the answers of one process, for any number of workers and with one killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.small_ray import small_ray
from tests.unit.inference.tasks.models import CHOICES, ITEMS, WRITTEN, write_adapter, write_model, write_task
from tidewheel.data.stage import Published, Unit
from tidewheel.elastic import task_workers
from tidewheel.elastic.task_workers import Model, Resources, TaskWorker, evaluate_on_workers
from tidewheel.errors import ClusterError, InputError
from tidewheel.inference.scorer import open_scorer
from tidewheel.inference.tasks import evaluation
from tidewheel.inference.tasks.evaluation import Options, evaluate

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1200)]
COUNT = 3 * evaluation.UNIT + 7


class DiesOnce(TaskWorker):
    """A worker that is killed when it is to answer its first unit, unless another was killed before."""

    def answer(self, index: int, adapter: str, unit: Unit) -> Published:
        mark = Path(self._output).parent / "killed"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().answer(index, adapter, unit)


class HangsOnce(TaskWorker):
    """A worker whose process stops when it is to answer its first unit, unless another did before."""

    def answer(self, index: int, adapter: str, unit: Unit) -> Published:
        mark = Path(self._output).parent / "hung"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().answer(index, adapter, unit)


class DiesAlways(TaskWorker):
    def answer(self, index: int, adapter: str, unit: Unit) -> Published:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().answer(index, adapter, unit)


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with small_ray(2):
        yield


def units(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "stages").rglob("*")) if path.is_file()}


def test_workers_give_the_answers_of_one_process(ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    uri = str(write_model(tmp_path / "model"))
    items = [{**ITEMS[number % len(ITEMS)], "question": f"which, {number}?"} for number in range(COUNT)]
    options = Options((write_task(tmp_path / "tasks", "choices", CHOICES, items),
                       write_task(tmp_path / "tasks", "written", WRITTEN)))
    model = Model(uri, {"device": "cpu"})
    expected = evaluate(open_scorer(uri, device="cpu"), options, str(tmp_path / "plain"))
    done: list[int] = []
    found = {1: evaluate_on_workers(model, options, str(tmp_path / "one"), Resources(1),
                                    on_progress=lambda count, total: done.append(count))}
    assert (done[0], done[-1]) == (0, COUNT + len(ITEMS))
    monkeypatch.setattr(task_workers, "TaskWorker", DiesOnce)
    found[2] = evaluate_on_workers(model, options, str(tmp_path / "two"), Resources(2))
    assert (tmp_path / "killed").exists()
    monkeypatch.setattr(task_workers, "TaskWorker", HangsOnce)
    monkeypatch.setattr(task_workers, "LEASE_SECONDS", 20.0)  # a worker opens the model and answers in two seconds
    found[3] = evaluate_on_workers(model, options, str(tmp_path / "three"), Resources(2))
    assert (tmp_path / "hung").exists()
    monkeypatch.setattr(task_workers, "LEASE_SECONDS", 3600.0)
    for workers, results in found.items():
        assert [result.figures for result in results] == [result.figures for result in expected], workers
    assert units(tmp_path / "plain") == units(tmp_path / "one") == units(tmp_path / "two") == units(tmp_path / "three")
    monkeypatch.undo()
    adapters = {"tuned": write_adapter(tmp_path / "adapter", tmp_path / "model")}
    scorer = open_scorer(uri, device="cpu", adapters=adapters)
    tuned = evaluate(scorer.of("tuned"), options, str(tmp_path / "tuned"))
    both = evaluate_on_workers(Model(uri, {"device": "cpu", "adapters": adapters}), options, str(tmp_path / "plain"),
                               Resources(2))
    assert [(result.adapter, result.answered) for result in both] == [
        ("", 0), ("", 0), ("tuned", COUNT), ("tuned", len(ITEMS))]
    assert [result.figures for result in both] == [result.figures for result in [*expected, *tuned]]
    monkeypatch.setattr(task_workers, "TaskWorker", DiesAlways)
    again = evaluate_on_workers(model, options, str(tmp_path / "two"), Resources(1))
    assert [result.answered for result in again] == [0, 0]
    with pytest.raises(ClusterError, match="in a row were lost"):
        evaluate_on_workers(model, options, str(tmp_path / "lost"), Resources(1))
    broken = Options((write_task(tmp_path / "tasks", "broken", {**CHOICES, "doc_to_text": "{{x}}"}),))
    with pytest.raises(InputError, match="'x' is undefined"):
        evaluate_on_workers(model, broken, str(tmp_path / "lost"), Resources(1))
