"""Who is left out after an error, and when the error is the run's."""

from __future__ import annotations

import pytest

from tests.unit.elastic.world import READMIT, World
from tidewheel.elastic.blame import Blame, Fault, Level
from tidewheel.elastic.generation import Phase
from tidewheel.elastic.messages import ExitReason, Left, Raise
from tidewheel.elastic.policy import Recovery

FATAL = "ShardError: damaged"


@pytest.fixture
def world():
    """Two workers, and one that stands by."""
    world = World((2,))
    world.start("a", "b", "c")
    world.run(5)
    assert world.members == ("a", "b")
    return world


# -- one worker's fault ------------------------------------------------------------------------
def test_a_standby_worker_replaces_a_worker_that_raised_an_error(world):
    world.fail("b")
    assert world.members == ("a", "c")
    assert world.fenced == ["b"]
    [out] = world.details("worker_left_out")
    assert (out["worker"], out["node"], out["level"], out["times"]) == ("b", "node of b", "process", 1)
    assert "ECC" in out["reason"]
    [failure] = world.details("failure")
    assert (failure["ranks"], failure["recovery"]) == ([1], "in_place")
    assert "ECC" in failure["error"]


def test_a_fatal_error_of_one_worker_does_not_end_the_run(world):
    world.leave("b", reason=ExitReason.FATAL, text=FATAL)
    world.leave("a")
    assert world.members == ("a", "c")
    assert world.fenced == ["b"]
    assert not world.told("raise")


def test_the_cause_is_the_first_error_that_is_not_an_echo(world):
    """The peer of the first failer may be the first to speak."""
    world.leave("a", text="RuntimeError: connection reset by peer")
    world.leave("b", text="RuntimeError: CUDA error", kind="RuntimeError")
    assert [detail["error"] for detail in world.details("failure")] == ["RuntimeError: CUDA error"]
    assert world.members == ("a", "c")


def test_a_rank_accused_of_a_hang_is_left_out(world):
    report = Left(world.number, ExitReason.FAILED, "HangError: rank 1 is still at step 5", accused=(1,))
    world.it.left("a", report, world.now)
    world.leave("b")
    assert world.fenced == ["b"]
    assert world.members == ("a", "c")


def test_a_loss_that_came_first_is_the_cause(world):
    """What a survivor raises then may be a consequence."""
    world.lose("b")
    world.leave("a", text="RuntimeError: odd", kind="RuntimeError")
    assert world.members == ("a", "c")
    assert not world.details("worker_left_out")


def test_a_loss_that_follows_an_error_is_not_the_cause(world):
    """Its process could not let go, and ended."""
    world.leave("b", text="RuntimeError: CUDA error", kind="RuntimeError")
    world.lose("b")
    world.leave("a")
    assert [out["node"] for out in world.details("worker_left_out")] == ["node of b"]


def test_a_device_whose_probe_fails_gets_no_rank_again(world):
    """The GPU stays bad. The run goes on with the others, and asks ever more seldom."""
    world.fail("b")
    times = []
    for attempt in range(30):
        world.come(f"b{attempt}", node="node of b")
        world.wait(300, "a", "c", f"b{attempt}")
        asked = world.told("probe")
        if asked:
            assert asked == [f"b{attempt}"]
            times.append(world.now)
            world.it.probed(f"b{attempt}", "RuntimeError: CUDA error", world.now)
        assert world.members == ("a", "c")
    assert len(world.details("failure")) == 1
    assert len(times) > 20


# -- escalation and the way back -----------------------------------------------------------------
def test_a_new_process_on_a_blamed_node_must_pass_a_probe(world):
    world.fail("b")
    world.run(6)
    world.come("b2", node="node of b")
    world.wait(0.2, "a", "c", "b2")
    assert world.told("probe") == ["b2"]
    world.lose("c")
    world.leave("a")
    assert world.members == ()  # it has not answered yet
    world.it.probed("b2", "", world.now)
    assert world.members == ("a", "b2")
    assert [detail["worker"] for detail in world.details("worker_readmitted")] == ["b2"]


def test_no_worker_is_started_on_an_excluded_node(world):
    world.fail("b")
    assert world.it.nodes_out(world.now) == set()
    world.come("b2", node="node of b")
    world.it.probed("b2", "not asked", world.now)  # is not heard
    world.wait(0.2, "a", "c", "b2")
    world.it.probed("b2", "", world.now)
    world.lose("c")
    world.leave("a")
    world.come("d")
    world.fail("b2")
    assert world.it.nodes_out(world.now) == {"node of b"}
    assert world.it.nodes_out(world.now + 61) == set()


def test_a_blamed_node_is_used_when_nothing_else_is_left(world):
    world.fail("b")
    world.come("b2", node="node of b")
    world.wait(0.2, "a", "c", "b2")
    world.it.probed("b2", "", world.now)
    world.lose("c")
    world.leave("a")
    world.come("d", "b3")
    world.fail("b2")
    world.come("b4", node="node of b")
    world.lose("d", "b3")
    world.leave("a")
    world.wait(10, "a", "b4")  # failures follow each other: there is a pause
    assert world.told("probe")[-1] == "b4"
    world.it.probed("b4", "", world.now)
    assert world.members == ("a", "b4")


def test_a_probe_that_does_not_end_counts_as_failed(world):
    world.fail("b")
    world.come("b2", node="node of b")
    world.wait(62, "a", "c", "b2")
    assert world.fenced == ["b", "b2"]
    assert "probe did not end" in world.details("worker_left_out")[-1]["reason"]


def test_repeated_failures_of_the_last_probes_end_the_run():
    world = World((2,))
    world.start("a", "b", "c")
    world.run(5)
    world.fail("b")
    world.lose("c")
    world.leave("a")
    for attempt in range(10):
        if world.it.phase is Phase.FAILED:
            break
        world.come(f"b{attempt}", node="node of b")
        world.wait(1, "a", f"b{attempt}")
        world.it.probed(f"b{attempt}", "RuntimeError: CUDA error", world.now)
    assert world.it.recovery is Recovery.NONE
    assert next(message.text for _, message in world.sent if isinstance(message, Raise)).endswith("CUDA error")


# -- the run's faults ----------------------------------------------------------------------------
def test_the_same_fatal_error_from_several_nodes_ends_the_run(world):
    world.leave("a", reason=ExitReason.FATAL, text="ShardError: damaged a")
    world.leave("b", reason=ExitReason.FATAL, text="ShardError: damaged b")
    assert world.it.phase is Phase.FAILED
    assert world.it.recovery is Recovery.NONE
    assert world.told("raise") == ["a"]  # the first failer's own error is the one that the user is told
    [failure] = world.details("failure")
    assert (failure["ranks"], failure["restart"], failure["error"]) == ([0], False, "ShardError: damaged a")


def test_the_same_fatal_error_of_the_replacement_ends_the_run(world):
    world.leave("b", reason=ExitReason.FATAL, text=FATAL)
    world.leave("a")
    world.leave("c", reason=ExitReason.FATAL, text=FATAL)
    world.leave("a")
    assert world.it.recovery is Recovery.NONE
    assert world.told("raise") == ["c"]


def test_a_different_fatal_error_elsewhere_does_not_end_the_run(world):
    world.come("d")
    world.leave("b", reason=ExitReason.FATAL, text=FATAL)
    world.leave("a")
    world.run(50)
    world.leave("c", reason=ExitReason.FATAL, text="ShardError: cannot be read, no space left")
    world.leave("a")
    assert world.members == ("a", "d")


def test_a_fatal_error_of_a_worker_that_is_needed_ends_the_run():
    world = World((2,))
    world.start("a", "b")
    world.run(1)
    world.leave("b", reason=ExitReason.FATAL, text=FATAL)
    world.leave("a")
    assert world.it.recovery is Recovery.NONE
    assert world.told("raise") == ["b"]


def test_a_single_worker_is_restarted_up_to_the_limit():
    """A step that always runs out of memory. What is told is its own error, not that recovery was given up."""
    world = World((1,))
    world.healthy = True
    world.start("a")
    world.run(5)
    ways = []
    for _ in range(4):
        world.fail("a", "OutOfMemoryError: CUDA out of memory")
        ways.append(world.it.recovery)
        world.wait(61, "a")
        if world.it.phase is Phase.FAILED and world.it.recovery is not Recovery.NONE:
            world.start("a")
            world.wait(61, "a")
    assert ways == [Recovery.IN_PLACE, Recovery.KEPT, Recovery.PLAIN, Recovery.NONE]
    assert world.details("failure")[-1]["error"] == "OutOfMemoryError: CUDA out of memory"
    assert [message.text for _, message in world.sent if isinstance(message, Raise)][-1] == ""


def test_an_error_that_moves_from_node_to_node_without_progress_ends_the_run():
    names = [f"w{number}" for number in range(12)]
    world = World((2,))
    world.start(*names)
    world.run(5)
    failed = 0
    while world.it.recovery is not Recovery.NONE:
        world.fail(world.members[0])
        failed += 1
        world.wait(10, *names)
    assert failed == 5  # the first is its node's fault; three more are the limit
    assert len(world.fenced) == 4


def test_without_a_limit_restarts_never_end():
    world = World((1,), max_without_progress=-1)
    world.healthy = True
    world.start("a")
    world.run(5)
    for _ in range(20):
        world.fail("a")
        assert world.it.recovery is not Recovery.NONE
        world.start("a")
        world.wait(61, "a")


def test_a_failure_with_echoes_only_blames_no_worker(world):
    world.leave("a", "b")
    assert world.members == ("a", "b")
    assert not world.details("worker_left_out")
    world.leave("a", "b")
    assert world.it.recovery is Recovery.KEPT


# -- errors outside a generation -------------------------------------------------------------------
def test_a_worker_that_fails_before_it_joins_is_left_out():
    """A package is missing on its node."""
    world = World((1, 2))
    world.it.expect({"a": "node of a", "b": "node of b"}, world.now, anew=True)
    world.come("a")
    assert world.it.raised("b", "ModuleNotFoundError", "ModuleNotFoundError: no torch", world.now, fatal=True)
    world.wait(0.2, "a")
    assert world.members == ("a",)


def test_the_same_error_on_all_nodes_before_they_join_ends_the_run():
    world = World((1, 2))
    world.it.expect({"a": "node of a", "b": "node of b"}, world.now, anew=True)
    assert world.it.raised("b", "ModuleNotFoundError", "ModuleNotFoundError: no torch", world.now, fatal=True)
    assert not world.it.raised("a", "ModuleNotFoundError", "ModuleNotFoundError: no torch", world.now, fatal=True)


# -- judging alone ---------------------------------------------------------------------------------
def fault(worker: str = "w", node: str = "n", device: str = "", kind: str = "RuntimeError", *, fatal: bool = False,
          furthest: int = 5) -> Fault:
    return Fault(worker, node, device, kind, f"{kind}: 7 is wrong", fatal, furthest)


def anybody(fault: Fault, level: Level) -> bool:
    return True


def but_not_the_node(fault: Fault, level: Level) -> bool:
    return level is not Level.NODE


def test_repeated_faults_exclude_the_process_then_the_device_then_the_node():
    blame = Blame(READMIT)
    found = [blame.judge([fault(device="3")], anybody, at).out for at in (0.0, 1.0, 200.0)]
    assert [one.level for one in found if one] == [Level.PROCESS, Level.DEVICE, Level.NODE]
    assert blame.is_out("n", "5", 201.0)
    assert not blame.is_out("m", "3", 201.0)


def test_repeated_faults_of_a_node_double_its_exclusion():
    blame = Blame(READMIT)
    found = [blame.judge([fault()], anybody, float(at)).out for at in range(6)]
    assert [one.seconds for one in found if one] == [0, 60, 120, 240, 240, 240]


def test_faults_of_two_devices_do_not_exclude_their_node():
    blame = Blame(READMIT)
    found = [blame.judge([fault(f"w{device}", device=device)], anybody, 0.0).out for device in "35"]
    assert [one.level for one in found if one] == [Level.PROCESS, Level.PROCESS]


def test_two_workers_that_fail_together_exclude_their_node():
    """Its cache disk is full."""
    found = Blame(READMIT).judge([fault("w1", fatal=True), fault("w2", fatal=True)], anybody, 0.0)
    assert found.out is not None
    assert (found.out.level, found.final) == (Level.NODE, False)


def test_two_workers_that_fail_together_on_the_only_node_blame_the_run():
    found = Blame(READMIT).judge([fault("w1", fatal=True), fault("w2", fatal=True)], but_not_the_node, 0.0)
    assert (found.out, found.final) == (None, True)


def test_a_second_process_with_the_same_error_on_the_only_node_blames_the_run():
    blame = Blame(READMIT)
    assert blame.judge([fault("w1", fatal=True)], but_not_the_node, 0.0).out is not None
    assert blame.judge([fault("w2", fatal=True)], but_not_the_node, 1.0).final


def test_faults_are_forgotten_after_a_while():
    blame = Blame(READMIT)
    blame.judge([fault()], anybody, 0.0)
    assert blame.suspects("n", "", 2 * READMIT.most - 1)
    assert not blame.suspects("n", "", 2 * READMIT.most + 1)
    later = blame.judge([fault()], anybody, 2 * READMIT.most + 1)
    assert later.out is not None
    assert later.out.level is Level.PROCESS
