"""How a worker frees memory and ends between two generations, run in this process."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.train.helpers import config, write_shards
from tidewheel.checkpoint.peers import RankError
from tidewheel.elastic import member as member_module
from tidewheel.elastic import warm, worker
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.elastic.messages import ExitReason, Join
from tidewheel.elastic.worker import take_part
from tidewheel.errors import clear_frames, related
from tidewheel.ownership import acquire
from tidewheel.storage import store
from tidewheel.train import loop, parallel
from tidewheel.train.guards.hang import HangError, Watch
from tidewheel.train.parallel.caches import StaleProcessError
from tidewheel.train.parallel.kept_base import KeptBase
from tidewheel.train.record import TrainResult
from tidewheel.train.run import Run

FAILURES = 3


def wrapped(error: BaseException, wrapping: str) -> BaseException:
    """Return an error that wraps `error` in the given way."""
    try:
        if wrapping == "cause":
            raise HangError("rank 1 does not answer") from error
        if wrapping == "context":
            try:
                raise error
            except BaseException:
                raise HangError("rank 1 does not answer")  # noqa: B904
        if wrapping == "hidden":
            try:
                raise error
            except BaseException:
                raise HangError("rank 1 does not answer") from None
        if wrapping == "group":
            raise BaseExceptionGroup("several", [error])
        raise RankError(0, error) from error
    except BaseException as outer:
        return outer


def failing() -> tuple[BaseException, weakref.ref[torch.nn.Module]]:
    def step() -> None:
        model = torch.nn.Linear(1, 1)
        models.append(weakref.ref(model))
        raise RuntimeError("timed out")

    models: list[weakref.ref[torch.nn.Module]] = []
    try:
        step()
    except RuntimeError as error:
        return error, models[0]


@pytest.mark.parametrize("wrapping", ["cause", "context", "hidden", "group", "failures"])
def test_clearing_an_error_frees_the_model_in_all_that_it_wraps(wrapping: str) -> None:
    inner, model = failing()
    error = wrapped(wrapped(inner, wrapping), "cause")
    assert inner in list(related(error))
    assert model() is not None
    clear_frames(error)
    assert model() is None


def test_a_cycle_of_causes_is_followed_once() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__context__ = second, first
    assert list(related(first)) == [first, second]


@pytest.mark.parametrize("hang", [False, True])
def test_the_model_of_a_broken_generation_is_gone_before_the_next_is_built(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: bool) -> None:
    """With `hang` the guard explains the error in one of its own, whose cause is the collective's error."""
    write_shards(tmp_path / "shards")
    settings = config(tmp_path, "run", "data.validation=''", "evaluation.every_steps=0", "checkpoint.every_steps=1",
                      "elastic.max_workers=1")
    models: list[weakref.ref[Any]] = []
    alive: list[int] = []
    build, start_step, steps = parallel.build, loop.start_step, iter(range(1, 1000))

    def watched_build(*arguments: Any) -> Any:
        alive.append(sum(model() is not None for model in models))
        model = build(*arguments)
        models.extend(weakref.ref(part) for part in (model, *model.parts))
        return model

    def failing_step(*arguments: Any, **named: Any) -> Any:
        step = next(steps)
        if step % 3 == 0 and step <= 3 * FAILURES:
            raise RuntimeError("Timed out waiting for a peer")
        return start_step(*arguments, **named)

    monkeypatch.setattr(Coordinator, "_watch", lambda self: None)  # the real one asks Ray
    monkeypatch.setattr(warm, "warm_up", lambda *_, **__: None)  # would hide live objects from the garbage collector
    monkeypatch.setattr(parallel, "build", watched_build)
    monkeypatch.setattr(loop, "start_step", failing_step)
    if hang:
        monkeypatch.setattr(Watch, "explained", lambda self, error: HangError("rank 1 does not answer"))
    coordinator = Coordinator(settings.run_uri, settings.elastic, (1,), epoch=acquire(store(settings.run_uri)).epoch)
    coordinator.start("127.0.0.1")
    try:
        endpoint = coordinator.endpoint()
        coordinator.expect({"a": "n"}, True)
        result = take_part(settings, endpoint, name="a", node="n")
    finally:
        coordinator.end()
    assert isinstance(result, TrainResult)
    assert alive == [0] * (FAILURES + 1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hang")]


class Ended(BaseException):
    """An error in place of the end of the process."""


def test_a_process_that_computes_for_another_rank_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process replaces it: another generation in the same process would compute the same wrong values."""
    def stale(*_: Any) -> Any:
        raise StaleProcessError("rank 0 gets the rows of rank 1")

    def ended(code: int) -> None:
        raise Ended(code)

    reports: list[Any] = []
    monkeypatch.setattr(loop, "train", stale)
    monkeypatch.setattr(member_module.os, "_exit", ended)
    member = SimpleNamespace(begin=lambda *_: None, left=lambda *report: reports.append(report), send=lambda _: None)
    with pytest.raises(Ended, match=str(member_module.EXIT_CODE)):
        worker._generation(Run.open(config(tmp_path)), member, Join(4, 0, 1), "node", KeptBase())
    [(report,)] = reports
    assert (report.reason, report.text) == (ExitReason.FAILED, "StaleProcessError: rank 0 gets the rows of rank 1")
