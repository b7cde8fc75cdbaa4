"""Ctrl-C and SIGTERM sent to real processes: the save, the one-line message, the exit code and a second signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tidewheel.stopping import Stopped, stopping

ROOT = Path(__file__).parents[2]
AGAIN = "give the same command again to continue"
COMMAND = """
import signal, sys, time
from tidewheel import cli
from tidewheel.stopping import stopping

def save():
    time.sleep({save_seconds})
    return "saved at step 12"

@cli.app.command
def work():
    with stopping({save}):
        try:
            print("ready", flush=True)
            for _ in range(600):  # a signal between two instructions does not wake a sleep that begins just then
                time.sleep(0.1)
        finally:
            print("cleaning", flush=True)
            time.sleep({cleaning_seconds})

cli.leave(cli.run_command(["work"]))
"""


class Process:
    """A process in its own group, as a shell starts it."""

    def __init__(self, *command: str) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'platform'}:{ROOT}"}
        self.popen = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                      text=True, env=environment, start_new_session=True)

    def wait_for(self, text: str) -> None:
        assert self.popen.stdout is not None
        output = ""
        for line in self.popen.stdout:
            output += line
            if text in line:
                return
        raise AssertionError(f"the process ended without {text!r}: {output}")

    def signal(self, signum: int) -> None:
        """Send a signal to the whole group, as a terminal does."""
        os.killpg(self.popen.pid, signum)

    def end(self) -> tuple[int, str]:
        output, _ = self.popen.communicate(timeout=120)
        return self.popen.returncode, output


def working(*, save: str = "None", save_seconds: float = 0, cleaning_seconds: float = 0) -> Process:
    process = Process("-c", COMMAND.format(save=save, save_seconds=save_seconds, cleaning_seconds=cleaning_seconds))
    process.wait_for("ready")
    return process


@pytest.mark.parametrize(("signum", "code", "verb"), [
    (signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "stopped")], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_gives_one_line_and_its_exit_code(signum, code, verb):
    process = working(save="save")
    process.signal(signum)
    assert process.end() == (code, textwrap.dedent(f"""\
        saving, then stopping; send the signal again to end at once
        cleaning
        {verb}, saved at step 12; {AGAIN}
    """))


def test_a_signal_without_anything_to_save_only_cleans_up():
    process = working()
    process.signal(signal.SIGINT)
    assert process.end() == (130, f"cleaning\ninterrupted; {AGAIN}\n")


@pytest.mark.parametrize("during", ["save", "cleaning"])
def test_a_second_signal_ends_at_once(during):
    process = working(save="save" if during == "save" else "None", save_seconds=60, cleaning_seconds=60)
    process.signal(signal.SIGINT)
    process.wait_for("saving, then" if during == "save" else "cleaning")
    with pytest.raises(subprocess.TimeoutExpired):
        process.popen.wait(0.5)
    process.signal(signal.SIGINT)
    code, output = process.end()
    assert code == 130
    assert "ended at once" in output
    assert "Traceback" not in output


def test_a_duplicated_ctrl_c_counts_once():
    process = working(save="save", save_seconds=0.5)
    for _ in range(3):
        process.signal(signal.SIGINT)
    code, output = process.end()
    assert code == 130
    assert "saved at step 12" in output


def test_other_errors_are_not_stops():
    with pytest.raises(ValueError, match="ours"), stopping():
        raise ValueError("ours")
    with pytest.raises(KeyboardInterrupt) as interrupted, stopping():  # raised by a library, not by a signal
        raise KeyboardInterrupt
    assert not isinstance(interrupted.value, Stopped)


def test_an_error_after_a_signal_becomes_a_stop():
    def block() -> None:
        with stopping(ends_itself=True) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested.wait(60)
            raise RuntimeError("a worker is gone")

    with pytest.raises(Stopped) as stopped:
        block()
    assert stopped.value.exit_code == 143


def test_handlers_are_restored_and_left_alone_outside_the_main_thread():
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    seen_in_thread = []
    with stopping():
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before

    def block() -> None:
        with stopping():
            seen_in_thread.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert seen_in_thread == [before[1]]


def test_a_block_that_swallows_the_interrupt_still_ends(monkeypatch):
    monkeypatch.setattr("tidewheel.stopping.INSIST_SECONDS", 0.05)
    swallowed = []
    cleaned = []

    def block() -> None:
        with stopping():
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            try:
                try:
                    time.sleep(10)
                except BaseException as error:
                    swallowed.append(error)
                time.sleep(10)
            finally:
                time.sleep(0.3)  # cleaning up is not interrupted
                cleaned.append(True)

    with pytest.raises(Stopped):
        block()
    assert (len(swallowed), cleaned) == (1, [True])
