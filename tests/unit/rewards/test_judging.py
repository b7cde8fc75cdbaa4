"""Judging: what a reward may return, failures, limits of own code, and how a reward is named and keyed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tidewheel as tw
from tidewheel import parts
from tidewheel.errors import ConfigError, InputError
from tidewheel.rewards import KIND
from tidewheel.rewards.scoring import process as module
from tidewheel.rewards.scoring.base import NotJudged
from tidewheel.rewards.scoring.process import RewardProcess

OWN = '''
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import tidewheel as tw

HERE = Path(__file__).parent


class Trouble(tw.Reward):
    """Do what the answer says; else its length, times a factor."""
    factor: float = 1.0

    def score(self, batch):
        print("what is printed is no answer")
        for sample in batch:
            if sample.answer == "loop":
                while True:
                    pass
            elif sample.answer == "exit":
                os._exit(3)
            elif sample.answer == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            elif sample.answer == "memory":
                bytearray(8 << 30)
            elif sample.answer == "raise":
                raise RuntimeError("it says raise")
            elif sample.answer == "read":
                assert sys.stdin.read() == ""
            elif sample.answer == "wait":
                child = subprocess.Popen(["sleep", "1000"])
                (HERE / "child").write_text(f"{child.pid}.")
                child.wait()
        return [len(sample.answer) * self.factor for sample in batch]


class Wrong(tw.Reward):
    def score(self, batch):
        return [1.0]


def brief(sample):
    if sample.reference is None:
        return "no reference"
    return len(sample.answer) <= len(sample.reference)
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of rewards in the working folder."""
    name = "rewards_" + "".join(letter if letter.isalnum() else "_" for letter in tmp_path.name)
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)
    parts._load.cache_clear()
    parts._source_hash.cache_clear()


def samples(*answers: str) -> list[tw.Sample]:
    return [tw.Sample("", answer) for answer in answers]


class Picky(tw.Reward):
    """Raise for answers that it does not like; count how often it is called."""

    def score(self, batch: Sequence[tw.Sample]) -> list[float]:
        CALLS.append(len(batch))
        if any("bad" in sample.answer for sample in batch):
            raise ValueError("bad")
        return [float(len(sample.answer)) for sample in batch]


CALLS: list[int] = []


@settings(derandomize=True, database=None, deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(["bad", "a", "ab", "abc"]), max_size=12))
def test_an_error_costs_only_the_answers_to_blame(answers: list[str]):
    scores = Picky().judge(samples(*answers))
    wrong = {index for index, answer in enumerate(answers) if answer == "bad"}
    assert set(scores.failures) == wrong
    assert all(failure == tw.Failure("raised", "ValueError: bad") for failure in scores.failures.values())
    assert [math.isnan(value) for value in scores.values] == [index in wrong for index in range(len(answers))]
    kept = [len(answer) for answer in answers if answer != "bad"]
    assert scores.mean == (None if not kept else math.fsum(kept) / len(kept))


def test_halving_finds_one_of_64_in_few_calls():
    CALLS.clear()
    assert len(Picky().judge(samples(*["fine"] * 63, "bad")).failures) == 1
    assert CALLS == [64, 32, 32, 16, 16, 8, 8, 4, 4, 2, 2, 1, 1]


def test_a_failure_is_not_a_score_of_zero():
    scores = tw.rewards.ExactMatch().judge([tw.Sample("", "a", "a"), tw.Sample("", "b", "a"), tw.Sample("", "c")])
    assert scores.mean == 0.5
    assert scores.failures == {2: tw.Failure("no_reference")}
    assert np.isnan(scores.values[2])


class Returning(tw.Reward):
    """Return what a test wants."""

    def score(self, batch: Sequence[tw.Sample]) -> tw.Scores:
        return RETURNED[0]  # type: ignore[return-value]


RETURNED: list[object] = []


@pytest.mark.parametrize("returned", [[1, 0.5], (True, 0.5), np.array([1, 0.5], np.float32), tw.Scores([1, 0.5])])
def test_scores_may_be_any_numbers(returned: object):
    RETURNED[:] = [returned]
    scores = Returning().judge(samples("a", "b"))
    assert isinstance(scores.values, np.ndarray)
    assert scores.values.dtype == np.float64
    assert list(scores.values) == [1, 0.5]


@pytest.mark.parametrize(("returned", "message"), [
    ([1.0], r"values of shape \[1\] for 2 samples"), (None, r"values of shape \[\] for 2"), (["a", "b"], "no numbers"),
    ([[1.0], [2.0]], r"shape \[2, 1\]"), (tw.Scores([1, 2], {2: tw.Failure("x")}), "a failure of sample 2")])
def test_scores_that_do_not_fit_are_refused(returned: object, message: str):
    RETURNED[:] = [returned]
    with pytest.raises(ConfigError, match=message):
        Returning().judge(samples("a", "b"))


def test_infinite_scores_and_what_a_failure_leaves_are_no_scores():
    RETURNED[:] = [tw.Scores([math.inf, math.nan, 7.0, 1.0], {2: tw.Failure("own reason", "x" * 999)})]
    scores = Returning().judge(samples(*"abcd"))
    assert [scores.failures[index].reason for index in range(3)] == ["not_finite", "not_finite", "own reason"]
    assert len(scores.failures[2].detail) == 200
    assert scores.mean == 1.0


@pytest.mark.parametrize("error", [MemoryError(), InputError("it is said already")])
def test_an_error_that_says_nothing_about_an_answer_is_raised(error: Exception):
    def fails(batch: Sequence[tw.Sample]) -> tw.Scores:
        raise error

    with pytest.raises(type(error)):
        Picky().judge(samples("a"), fails)


def test_an_error_in_a_built_in_reward_is_a_fault_of_ours():
    def fails(batch: Sequence[tw.Sample]) -> tw.Scores:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tw.rewards.JsonObject().judge(samples("a"), fails)


def test_another_process_may_give_a_batch_up():
    def gives_up(batch: Sequence[tw.Sample]) -> list[float]:
        if any(sample.answer == "slow" for sample in batch):
            raise NotJudged(tw.Failure("time_limit"))
        return [1.0] * len(batch)

    scores = tw.rewards.JsonObject().judge(samples("a", "slow", "b"), gives_up)
    assert scores.failures == {1: tw.Failure("time_limit")}
    assert scores.mean == 1


def test_own_code_that_fails_or_ends_its_process_costs_only_its_answer(own: str):
    with RewardProcess(KIND.build(f"{own}:Trouble", {"factor": 2})) as process:
        scores = process.judge(samples("fine", "exit", "crash", "raise", "memory", "read", "end"))
    assert {index: (failure.reason, failure.detail) for index, failure in scores.failures.items()} == {
        1: ("crashed", "exit code 3"), 2: ("crashed", "SIGSEGV"), 3: ("raised", "RuntimeError: it says raise"),
        4: ("out_of_memory", "")}
    assert [scores.values[index] for index in (0, 5, 6)] == [8, 8, 6]


def test_own_code_that_runs_for_ever_costs_only_its_answer(own: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "WAIT_FACTOR", 10_000)
    with RewardProcess(KIND.build(f"{own}:Trouble"), seconds=1) as process:
        scores = process.judge(samples("loop", "fine"))
    assert scores.failures == {0: tw.Failure("time_limit", "more than 1 s of processor time")}
    assert scores.values[1] == 4


class TimerOfAFile(threading.Thread):
    """A timer whose time has come when the file `child` is whole in the working folder, however long that takes."""

    def __init__(self, seconds: float, end: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.end, self.done, self.file = end, threading.Event(), Path("child")

    def cancel(self) -> None:
        self.done.set()

    def run(self) -> None:
        while not self.done.wait(0.02):
            if self.file.exists() and self.file.read_text().endswith("."):
                self.file.rename("ended")
                return self.end()


def test_own_code_that_only_waits_ends_with_all_that_it_started(own: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "threading", SimpleNamespace(Timer=TimerOfAFile, Event=threading.Event))
    with RewardProcess(KIND.build(f"{own}:Trouble"), seconds=7) as process:
        scores = process.judge(samples("wait"))
        assert scores.failures == {0: tw.Failure("time_limit", "more than 70 s on the clock")}
        assert list(process.judge(samples("fine")).values) == [4]
    status = Path(f"/proc/{Path('ended').read_text().rstrip('.')}/stat")
    for _ in range(3000):  # the kernel takes a moment
        if not status.exists() or status.read_text().split()[2] in "ZX":
            return
        time.sleep(0.01)
    pytest.fail("the process that it started still runs")


def test_own_code_in_a_process_gives_what_it_gives_here(own: str):
    batch = [tw.Sample("p", "a\u00e9\n", "r"), tw.Sample("", "long answer", "r"), tw.Sample("", "b")]
    reward = KIND.build(f"{own}:brief")
    with RewardProcess(reward) as process:
        in_child = process.judge(batch)
    in_process = reward.judge(batch)
    assert str(in_child) == str(in_process)
    assert in_child.failures == {2: tw.Failure("no reference")}


def test_mistakes_of_own_code_are_told_from_the_process(own: str):
    with RewardProcess(KIND.build(f"{own}:Wrong")) as process, pytest.raises(ConfigError, match="for 2 samples"):
        process.judge(samples("a", "b"))


def test_a_reward_that_other_processes_cannot_import_is_refused():
    class Inner(tw.Reward):
        pass

    with pytest.raises(ConfigError, match="cannot import"):
        RewardProcess(Inner())


def test_a_process_that_does_not_start_is_told(own: str, tmp_path: Path):
    reward = KIND.build(f"{own}:Wrong")
    (tmp_path / f"{own}.py").write_text("import os\nos._exit(7)")
    with RewardProcess(reward) as process, pytest.raises(ConfigError, match="does not start: exit code 7"):
        process.judge(samples("a"))
    (tmp_path / f"{own}.py").write_text("Wrong = 3")
    with RewardProcess(reward) as process, pytest.raises(ConfigError, match="does not start: 'Wrong' is no reward"):
        process.judge(samples("a"))


def test_keys_hold_the_name_the_version_settings_and_own_source(own: str, tmp_path: Path):
    assert tw.rewards.Gsm8k().key() == KIND.build("gsm8k", {"marker": "####"}).key()
    assert len({reward.key() for reward in (tw.rewards.Gsm8k(), tw.rewards.Gsm8k(last_number=True),
                                            tw.rewards.ExactMatch(), tw.rewards.JsonObject())}) == 4
    before = KIND.build(f"{own}:Trouble").key()
    parts._source_hash.cache_clear()
    assert KIND.build(f"{own}:Trouble").key() == before
    (tmp_path / f"{own}.py").write_text(OWN + "\n# changed\n")
    parts._source_hash.cache_clear()
    assert KIND.build(f"{own}:Trouble").key() != before


def test_an_installed_package_offers_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    about = tmp_path / "tw_test_rewards-1.0.dist-info"
    about.mkdir()
    (tmp_path / "tw_test_rewards.py").write_text(OWN)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tw_test_rewards\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[tidewheel.rewards]\nbrief = tw_test_rewards:brief\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    parts._entry_points.cache_clear()
    try:
        reward = KIND.build("brief")
        assert parts.name_of(type(reward)) == "tw_test_rewards:brief"
        with RewardProcess(reward) as process:
            assert process.judge([tw.Sample("", "a", "b")]).mean == 1
    finally:
        parts._entry_points.cache_clear()
        parts._load.cache_clear()
        sys.modules.pop("tw_test_rewards", None)


def test_mistakes_in_names_and_settings_are_told(own: str):
    for name, message in (("gsm8", "did you mean 'gsm8k'"), (f"{own}:Gone", "does not exist"),
                          (f"{own}:HERE", "is no reward")):
        with pytest.raises(ConfigError, match=message):
            KIND.build(name)
    with pytest.raises(ConfigError, match="did you mean 'last_number'"):
        tw.rewards.Gsm8k(last_numbr=True)  # type: ignore[call-arg]


def test_rewards_import_neither_torch_nor_ray():
    code = "import sys, tidewheel as tw; tw.rewards.Gsm8k(); sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": os.pathsep.join(sys.path)})
