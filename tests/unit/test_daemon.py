"""Daemon threads that can be abandoned while a call hangs."""

import subprocess
import sys
import threading

import pytest

from tidewheel.daemon import DaemonThread
from tidewheel.errors import StorageAwayError
from tidewheel.time_limit import TimeLimit, result

SECONDS = 60
AT_WORK = """
import sys, threading, time
import torch
from tidewheel.daemon import DaemonThread, start_daemon

begun = threading.Event()

def work():
    until, matrix = time.monotonic() + 1.0, torch.randn(200, 200)
    while time.monotonic() < until:  # nearly always inside torch, without the interpreter's lock
        matrix @ matrix
        begun.set()

if sys.argv[1] == "thread":
    start_daemon(work, "at work")
else:
    DaemonThread("at work").submit(work)
begun.wait()
sys.exit(3)
"""


@pytest.fixture
def held():
    """Yield an event that hanging calls wait for, and set it at the end."""
    event = threading.Event()
    yield event
    event.set()


def test_calls_run_in_order():
    thread = DaemonThread("test")
    calls = []
    futures = [thread.submit(calls.append, index) for index in range(50)]
    assert [future.result(SECONDS) for future in futures] == [None] * 50
    assert calls == list(range(50))
    thread.stop()


def test_the_future_raises_the_error_of_its_call():
    thread = DaemonThread("test")
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 // 0).result(SECONDS)
    assert thread.submit(lambda: 7).result(SECONDS) == 7
    thread.stop()


def test_stopping_abandons_a_hanging_call_and_cancels_those_after_it(held):
    thread = DaemonThread("test")
    entered = threading.Event()

    def hang():
        entered.set()
        held.wait()

    hung = thread.submit(hang)
    waiting = thread.submit(print)
    assert entered.wait(SECONDS)
    thread.stop(wait=False)
    assert not hung.done()
    held.set()
    hung.result(SECONDS)
    thread.stop()
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="has been stopped"):
        thread.submit(print)


def test_a_process_exits_while_a_call_hangs():
    code = "import threading as t; from tidewheel.daemon import DaemonThread; DaemonThread('x').submit(t.Event().wait)"
    subprocess.run([sys.executable, "-c", code], timeout=SECONDS, check=True)


@pytest.mark.parametrize("how", ["thread", "queue"])
def test_the_exit_waits_for_a_thread_in_torch_which_would_abort_the_process(how):
    """Without the wait the process ends with SIGABRT, nearly always."""
    done = subprocess.run([sys.executable, "-c", AT_WORK, how], timeout=SECONDS, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")


def test_a_time_limit_ends_the_wait(held):
    thread, limit = DaemonThread("test"), TimeLimit()
    threading.Timer(0.05, limit.end, ["the ranks have parted"]).start()
    with pytest.raises(StorageAwayError, match="parted"):
        result(thread.submit(held.wait), limit)
    thread.stop(wait=False)


def test_a_finished_result_is_returned_after_the_limit():
    thread, limit = DaemonThread("test"), TimeLimit()
    future = thread.submit(lambda: 7)
    future.result(SECONDS)
    limit.end("the ranks have parted")
    assert result(future, limit) == 7
    thread.stop()
