"""The real coordinator with many connections that speak the workers' protocol, at the size of a test."""

from __future__ import annotations

import pytest

from tests.benchmarks.control_plane import Measurement


@pytest.mark.long  # processes that import the package; `tests/benchmarks/control_plane.py` has more workers
def test_survivors_of_deaths_and_of_a_freeze_join_again():
    workers = 48
    # A quarter of the workers is one process. A busy machine may not run it for the seconds that are the defaults, and
    # then they are all silent, and rightly cut off.
    measurement = Measurement(workers, beat=0.0, heartbeat=20.0, leave=30.0)
    try:
        died = measurement.kill(5)
        froze = measurement.freeze(1)
    finally:
        measurement.close()
    assert measurement.problems == []
    # One abort for each survivor and generation. On a busy machine the dead do not die at the same moment, and a
    # generation may begin and end in between. Some of the dead were told to leave before they died.
    ended = int(died["ended"])
    assert (workers - 5) * ended <= int(died["aborts"]) <= workers * ended
    assert int(froze["aborts"]) == (workers - 6) * int(froze["ended"])


@pytest.mark.long
def test_survivors_behind_relays_join_again_after_deaths_and_the_loss_of_a_node():
    workers = 48
    measurement = Measurement(workers, beat=0.0, relays=True, heartbeat=600.0, spread=0.05)
    try:
        died = measurement.kill(5)
        lost = measurement.lose_node()
    finally:
        measurement.close()
    assert measurement.problems == []
    nodes = workers // 8
    assert int(died["frames out"]) < 4 * nodes * int(died["ended"]), "an abort and a join for each node, and few more"
    assert lost["event"] in ("a node of 7", "a node of 8")
    assert int(lost["aborts"]) >= workers - 5 - 8
