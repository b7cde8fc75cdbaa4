"""A process with limits that judges answers with a reward of the user's own, whose code may do anything.

    with RewardProcess(reward) as process:
        scores = process.judge(batch)

An answer that makes the code run too long, take too much memory or end its process has a failure and no score; the
process is started again, and goes on with the next one. The kernel counts processor time, so a busy machine changes no
result; code that only waits ends after `WAIT_FACTOR` times as long on the clock. Run as a module, this is the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any

from tidewheel.data.readers.page_text import limit_cpu
from tidewheel.errors import ConfigError
from tidewheel.parts import importable, name_of
from tidewheel.rewards.scoring import children
from tidewheel.rewards.scoring.base import Failure, NotJudged, Reward, Sample, Scores, fitting

WAIT_FACTOR = 10
START_SECONDS = 600.0
"""Importing the user's module may take this long."""
SECONDS = 10
MEMORY_BYTES = 4 << 30


class RewardProcess(contextlib.AbstractContextManager["RewardProcess"]):
    """Judges answers in a child process, which it starts for the first batch. For one thread at a time.

    Args:
        reward: whose class other processes can import.
        seconds: processor time for one answer, and for a batch before it is halved.
        memory_bytes: data and heap of the process.

    Raises:
        ConfigError: other processes cannot import the reward.
    """

    def __init__(self, reward: Reward, *, seconds: int = SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self.reward = reward
        self._seconds = seconds
        self._command = [sys.executable, "-P", "-m", __name__, importable(name_of(type(reward)), "the reward"),
                         json.dumps(reward.canonical()), str(seconds), str(memory_bytes)]
        self._child: subprocess.Popen[bytes] | None = None

    def __exit__(self, *_: object) -> None:
        """End the child, and what it has started."""
        if self._child is not None:
            self._reap()

    def judge(self, batch: Sequence[Sample]) -> Scores:
        """Return the checked scores of a batch, as `Reward.judge` does.

        Raises:
            ConfigError: what `score` returned does not fit the batch, or the process does not start.
        """
        return self.reward.judge(batch, self._call)

    def _call(self, batch: Sequence[Sample]) -> Scores:
        child = self._running()
        answer, timed_out = self._ask(child, [astuple(sample) for sample in batch], self._seconds * WAIT_FACTOR)
        if answer is None:
            status = self._reap()
            if timed_out:
                raise NotJudged(Failure("time_limit", f"more than {self._seconds * WAIT_FACTOR} s on the clock"))
            if status == -signal.SIGXCPU:
                raise NotJudged(Failure("time_limit", f"more than {self._seconds} s of processor time"))
            raise NotJudged(Failure("crashed", children.ending(status)))
        if "wrong" in answer:
            what, where, fix = answer["wrong"]
            raise ConfigError(what, where=where, fix=fix)
        if "failure" in answer:
            raise NotJudged(Failure(*answer["failure"]))
        return Scores(answer["values"], {index: Failure(*failure) for index, failure in answer["failures"]})

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
            self._child = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                           env={**os.environ, "PYTHONPATH": path}, start_new_session=True)
            answer, _ = self._ask(self._child, None, START_SECONDS)
            if answer is None or "wrong" in answer:
                problem = answer["wrong"][0] if answer else children.ending(self._reap())
                raise ConfigError(f"the process of the reward does not start: {problem}",
                                  where=name_of(type(self.reward)),
                                  fix="see the messages above; its module must be importable from here")
        return self._child

    def _ask(self, child: subprocess.Popen[bytes], request: Any, seconds: float) -> tuple[dict[str, Any] | None, bool]:
        """Return the answer, None if the child ended; and whether it was ended because it took too long."""
        assert child.stdin is not None
        assert child.stdout is not None
        ended = threading.Event()

        def end() -> None:
            ended.set()
            children.kill(child)

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                if request is not None:
                    child.stdin.write(json.dumps(request).encode() + b"\n")
                    child.stdin.flush()
            line = child.stdout.readline()
        finally:
            timer.cancel()
            timer.join()
        if ended.is_set() or not line.endswith(b"\n"):
            return None, ended.is_set()
        return json.loads(line), False

    def _reap(self) -> int:
        """End the child if it still runs, and what it has started; return its exit status."""
        child, self._child = self._child, None
        assert child is not None
        children.kill(child)
        children.close_pipes(child)
        return child.wait()


def _answer(reward: Reward, samples: Sequence[Sample]) -> dict[str, Any]:
    try:
        scores = fitting(reward, reward.score(samples), len(samples))
    except ConfigError as error:
        return {"wrong": [error.what, error.where, error.fix]}
    except MemoryError:
        return {"failure": ["out_of_memory"]}
    except Exception as error:
        return {"failure": ["raised", f"{type(error).__name__}: {error}"]}
    return {"values": list(scores.values), "failures": [[index, astuple(failure)]
                                                        for index, failure in scores.failures.items()]}


def _answers(name: str, settings: str, seconds: int, memory_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield {} when the reward is there, then an answer for each line of standard input."""
    from tidewheel.rewards import KIND

    requests = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # the reward's code reads no requests
    try:
        reward = KIND.build(name, json.loads(settings))
    except ConfigError as error:
        yield {"wrong": [error.what, error.where, error.fix]}
        return
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, most))
    yield {}
    for line in requests:
        limit_cpu(seconds)
        yield _answer(reward, [Sample(*sample) for sample in json.loads(line)])


def main() -> None:
    """Judge batches until standard input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the reward's code prints is no answer
    name, settings, seconds, memory_bytes = sys.argv[1:]
    for answer in _answers(name, settings, int(seconds), int(memory_bytes)):
        sink.write(json.dumps(answer).encode() + b"\n")
        sink.flush()


if __name__ == "__main__":
    main()
