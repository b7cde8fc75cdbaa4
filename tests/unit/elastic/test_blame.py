"""Which worker, device or node is excluded after an error, and which errors end the run."""

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
    """Return a world with two workers and one standby worker."""
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
    assert not world.take_receivers("raise")


def test_the_cause_is_the_first_error_that_is_not_an_echo(world):
    """A peer of the failed worker may report first."""
    world.leave("a", text="RuntimeError: connection reset by peer")
    world.leave("b", text="RuntimeError: CUDA error", kind="RuntimeError")
    assert [detail["error"] for detail in world.details("failure")] == ["RuntimeError: CUDA error"]
    assert world.members == ("a", "c")


def test_a_rank_accused_of_a_hang_is_left_out(world):
    report = Left(world.number, ExitReason.FAILED, "HangError: rank 1 is still at step 5", accused=(1,))
    world.membership.left(["a"], report, world.now)
    world.leave("b")
    assert world.fenced == ["b"]
    assert world.members == ("a", "c")


CORRUPTION = "SilentCorruptionError: gradient of rank 1"


def test_a_rank_that_computed_other_bits_is_left_out_with_its_node(world):
    world.come("b2", node="node of b")
    report = Left(world.number, ExitReason.FAILED, CORRUPTION, accused=(1,))
    for name in ("a", "b"):
        world.membership.left([name], report, world.now)
    [out] = world.details("worker_left_out")
    assert (out["node"], out["level"], out["times"]) == ("node of b", "node", 1)
    assert world.members == ("a", "c")


def test_nobody_is_left_out_while_it_is_not_known_which_of_two_computed_wrongly(world):
    report = Left(world.number, ExitReason.FAILED, CORRUPTION, accused=(0, 1))
    for name in world.members:
        world.membership.left([name], report, world.now)
    assert not world.details("worker_left_out")
    [failure] = world.details("failure")
    assert failure["recovery"] == "in_place"
    assert world.members == ("a", "b")
    assert world.membership.failures._budget.stuck == 1, "a run in which this repeats ends"


def test_a_loss_that_came_first_is_the_cause(world):
    """An error that a survivor raises afterwards may be a consequence of the loss."""
    world.lose("b")
    world.leave("a", text="RuntimeError: odd", kind="RuntimeError")
    assert world.members == ("a", "c")
    assert not world.details("worker_left_out")


def test_a_loss_that_follows_an_error_is_not_the_cause(world):
    """The process could not leave its collective, and ended."""
    world.leave("b", text="RuntimeError: CUDA error", kind="RuntimeError")
    world.lose("b")
    world.leave("a")
    assert [out["node"] for out in world.details("worker_left_out")] == ["node of b"]


def test_a_device_whose_probe_fails_gets_no_rank_again(world):
    """The GPU stays bad. The run continues with the other workers and probes less and less often."""
    world.fail("b")
    times = []
    for attempt in range(30):
        world.come(f"b{attempt}", node="node of b")
        world.wait(300, "a", "c", f"b{attempt}")
        asked = world.take_receivers("probe")
        if asked:
            assert asked == [f"b{attempt}"]
            times.append(world.now)
            world.membership.probed(f"b{attempt}", "RuntimeError: CUDA error", world.now)
        assert world.members == ("a", "c")
    assert len(world.details("failure")) == 1
    assert len(times) > 20


# -- escalation and the way back -----------------------------------------------------------------
def test_a_new_process_on_a_blamed_node_must_pass_a_probe(world):
    world.fail("b")
    world.run(6)
    world.come("b2", node="node of b")
    world.wait(0.2, "a", "c", "b2")
    assert world.take_receivers("probe") == ["b2"]
    world.lose("c")
    world.leave("a")
    assert world.members == ()  # the new process has not answered yet
    world.membership.probed("b2", "", world.now)
    assert world.members == ("a", "b2")
    assert [detail["worker"] for detail in world.details("worker_readmitted")] == ["b2"]


def test_no_worker_is_started_on_an_excluded_node(world):
    world.fail("b")
    assert world.membership.nodes_out(world.now) == set()
    world.come("b2", node="node of b")
    world.membership.probed("b2", "not asked", world.now)  # ignored: nobody asked for a probe
    world.wait(0.2, "a", "c", "b2")
    world.membership.probed("b2", "", world.now)
    world.lose("c")
    world.leave("a")
    world.come("d")
    world.fail("b2")
    assert world.membership.nodes_out(world.now) == {"node of b"}
    assert world.membership.nodes_out(world.now + 61) == set()


def test_a_blamed_node_is_used_when_nothing_else_is_left(world):
    world.fail("b")
    world.come("b2", node="node of b")
    world.wait(0.2, "a", "c", "b2")
    world.membership.probed("b2", "", world.now)
    world.lose("c")
    world.leave("a")
    world.come("d", "b3")
    world.fail("b2")
    world.come("b4", node="node of b")
    world.lose("d", "b3")
    world.leave("a")
    world.wait(10, "a", "b4")  # after failures in a row there is a pause
    assert world.take_receivers("probe")[-1] == "b4"
    world.membership.probed("b4", "", world.now)
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
        if world.membership.phase is Phase.FAILED:
            break
        world.come(f"b{attempt}", node="node of b")
        world.wait(1, "a", f"b{attempt}")
        world.membership.probed(f"b{attempt}", "RuntimeError: CUDA error", world.now)
    assert world.membership.recovery is Recovery.NONE
    assert next(message.text for _, message in world.sent if isinstance(message, Raise)).endswith("CUDA error")


# -- the run's faults ----------------------------------------------------------------------------
def test_the_same_fatal_error_from_several_nodes_ends_the_run(world):
    world.leave("a", reason=ExitReason.FATAL, text="ShardError: damaged a")
    world.leave("b", reason=ExitReason.FATAL, text="ShardError: damaged b")
    assert world.membership.phase is Phase.FAILED
    assert world.membership.recovery is Recovery.NONE
    assert world.take_receivers("raise") == ["a"]  # the user gets the first failed worker's own error
    [failure] = world.details("failure")
    assert (failure["ranks"], failure["restart"], failure["error"]) == ([0], False, "ShardError: damaged a")


def test_the_same_fatal_error_of_the_replacement_ends_the_run(world):
    world.leave("b", reason=ExitReason.FATAL, text=FATAL)
    world.leave("a")
    world.leave("c", reason=ExitReason.FATAL, text=FATAL)
    world.leave("a")
    assert world.membership.recovery is Recovery.NONE
    assert world.take_receivers("raise") == ["c"]


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
    assert world.membership.recovery is Recovery.NONE
    assert world.take_receivers("raise") == ["b"]


def test_a_single_worker_is_restarted_up_to_the_limit():
    """A step always runs out of memory: the run reports that error, not that it gave up recovering."""
    world = World((1,))
    world.healthy = True
    world.start("a")
    world.run(5)
    ways = []
    for _ in range(4):
        world.fail("a", "OutOfMemoryError: CUDA out of memory")
        ways.append(world.membership.recovery)
        world.wait(61, "a")
        if world.membership.phase is Phase.FAILED and world.membership.recovery is not Recovery.NONE:
            world.start("a")
            world.wait(61, "a")
    assert ways == [Recovery.IN_PLACE, Recovery.KEPT, Recovery.PLAIN, Recovery.NONE]
    assert world.details("failure")[-1]["error"] == "OutOfMemoryError: CUDA out of memory"
    assert [message.text for _, message in world.sent if isinstance(message, Raise)][-1] == ""


def test_an_error_that_moves_from_node_to_node_without_progress_ends_the_run():
    names = [f"w{index}" for index in range(12)]
    world = World((2,))
    world.start(*names)
    world.run(5)
    failed = 0
    while world.membership.recovery is not Recovery.NONE:
        world.fail(world.members[0])
        failed += 1
        world.wait(10, *names)
    assert failed == 5  # the first counts as its node's fault; three more are the limit
    assert len(world.fenced) == 4


def test_without_a_limit_restarts_never_end():
    world = World((1,), max_without_progress=-1)
    world.healthy = True
    world.start("a")
    world.run(5)
    for _ in range(20):
        world.fail("a")
        assert world.membership.recovery is not Recovery.NONE
        world.start("a")
        world.wait(61, "a")


def test_a_failure_with_echoes_only_blames_no_worker(world):
    world.leave("a", "b")
    assert world.members == ("a", "b")
    assert not world.details("worker_left_out")
    world.leave("a", "b")
    assert world.membership.recovery is Recovery.KEPT


# -- errors outside a generation -------------------------------------------------------------------
def test_a_worker_that_fails_before_it_joins_is_left_out():
    """For example, a package is missing on its node."""
    world = World((1, 2))
    world.membership.expect({"a": "node of a", "b": "node of b"}, world.now, anew=True)
    world.come("a")
    assert world.membership.raised("b", "ModuleNotFoundError", "ModuleNotFoundError: no torch", world.now, fatal=True)
    world.wait(0.2, "a")
    assert world.members == ("a",)


def test_the_same_error_on_all_nodes_before_they_join_ends_the_run():
    world = World((1, 2))
    world.membership.expect({"a": "node of a", "b": "node of b"}, world.now, anew=True)
    assert world.membership.raised("b", "ModuleNotFoundError", "ModuleNotFoundError: no torch", world.now, fatal=True)
    assert not world.membership.raised("a", "ModuleNotFoundError", "ModuleNotFoundError: no torch", world.now,
                                       fatal=True)


# -- judging without a membership ---------------------------------------------------------------------------------
def fault(worker: str = "w", node: str = "n", device: str = "", kind: str = "RuntimeError", *, fatal: bool = False,
          furthest: int = 5) -> Fault:
    return Fault(worker, node, device, kind, f"{kind}: 7 is wrong", fatal, furthest)


def anything(fault: Fault, level: Level) -> bool:
    return True


def not_the_node(fault: Fault, level: Level) -> bool:
    return level is not Level.NODE


def test_repeated_faults_exclude_the_process_then_the_device_then_the_node():
    blame = Blame(READMIT)
    exclusions = [blame.judge([fault(device="3")], anything, at).out for at in (0.0, 1.0, 200.0)]
    assert [exclusion.level for exclusion in exclusions if exclusion] == [Level.PROCESS, Level.DEVICE, Level.NODE]
    assert blame.is_out("n", "5", 201.0)
    assert not blame.is_out("m", "3", 201.0)


def test_repeated_faults_of_a_node_double_its_exclusion():
    blame = Blame(READMIT)
    exclusions = [blame.judge([fault()], anything, float(at)).out for at in range(6)]
    assert [exclusion.seconds for exclusion in exclusions if exclusion] == [0, 60, 120, 240, 240, 240]


def test_faults_of_two_devices_do_not_exclude_their_node():
    blame = Blame(READMIT)
    exclusions = [blame.judge([fault(f"w{device}", device=device)], anything, 0.0).out for device in "35"]
    assert [exclusion.level for exclusion in exclusions if exclusion] == [Level.PROCESS, Level.PROCESS]


def test_two_workers_that_fail_together_exclude_their_node():
    """For example, the node's cache disk is full."""
    judgement = Blame(READMIT).judge([fault("w1", fatal=True), fault("w2", fatal=True)], anything, 0.0)
    assert judgement.out is not None
    assert (judgement.out.level, judgement.final) == (Level.NODE, False)


def test_two_workers_that_fail_together_on_the_only_node_blame_the_run():
    judgement = Blame(READMIT).judge([fault("w1", fatal=True), fault("w2", fatal=True)], not_the_node, 0.0)
    assert (judgement.out, judgement.final) == (None, True)


def test_a_second_process_with_the_same_error_on_the_only_node_blames_the_run():
    blame = Blame(READMIT)
    assert blame.judge([fault("w1", fatal=True)], not_the_node, 0.0).out is not None
    assert blame.judge([fault("w2", fatal=True)], not_the_node, 1.0).final


def test_faults_are_forgotten_after_a_while():
    blame = Blame(READMIT)
    blame.judge([fault()], anything, 0.0)
    assert blame.suspects("n", "", 2 * READMIT.most - 1)
    assert not blame.suspects("n", "", 2 * READMIT.most + 1)
    later = blame.judge([fault()], anything, 2 * READMIT.most + 1)
    assert later.out is not None
    assert later.out.level is Level.PROCESS
