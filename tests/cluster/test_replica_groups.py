"""HSDP with real processes: a replica group loses a worker, and the other group goes on at once, with all of the batch.

    python -m pytest -s -m long tests/cluster/test_replica_groups.py

prints how long that takes, and where the state of each generation came from.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.agent_processes import AgentProcesses, ask_patiently
from tests.cluster.in_place import ONE_SAVE, PATIENT, SMALL, Group, finished, prepare
from tests.unit.train.helpers import config
from tidewheel.checkpoint.digest import digest
from tidewheel.checkpoint.verify import list_checkpoints
from tidewheel.elastic.agent_supervisor import AgentSupervisor
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.elastic.trainer import fit_local

pytestmark = [pytest.mark.cluster, pytest.mark.long]  # `test_replicas_in_memory.py` has the parts without a run
GROUPS = ("parallel.data=zero3", "parallel.shard=2", "batch.virtual_ranks=4", "batch.micro_sequences=2",
          "checkpoint.memory_tier.replica=false", "elastic.min_workers=2", "elastic.max_workers=4", "steps=80")
"""Two workers share a copy of the model. Nobody sends copies of snapshots: the other group has them anyway."""

WAIT_SECONDS = 3000.0


def members(group: Group) -> list[str]:
    """Return the names of the present generation's workers, by rank."""
    generation = group.coordinator._membership.generation
    return list(generation.members) if generation is not None else []


def test_a_replica_group_goes_on_when_the_other_loses_a_worker(tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Coordinator, "_watch", lambda self: None)  # it would ask Ray
    agents = AgentProcesses()
    settings = prepare(tmp_path, ONE_SAVE, *GROUPS, **PATIENT)
    group = Group(settings, tmp_path, (2, 4), ask_patiently)
    group.coordinator._agents.supervisor = AgentSupervisor(agents)  # type: ignore[arg-type]

    def wait(condition: Callable[[], bool]) -> None:
        group.wait(condition, WAIT_SECONDS)

    try:
        nodes = {"a": "m", "b": "m", "c": "n", "d": "n"}
        for node in "mn":
            group.add(*(name for name in nodes if nodes[name] == node), anew=node == "m", node=node)
        wait(lambda: len(members(group)) == 4 and group.step() >= 5)
        before = len(group.events("recovered"))  # a slow start begins with one group
        first, second = members(group)[:2], members(group)[2:]
        assert len({nodes[name] for name in first}) == 1
        group.signal(second[1], signal.SIGKILL)
        wait(lambda: len(group.events("recovered")) > before)
        assert members(group) == first, "the group of which nobody is lost"
        others = nodes[second[0]]
        group.add("e", node=others)
        wait(lambda: len(group.events("recovered")) > before + 1 and len(members(group)) == 4)
        assert members(group)[:2] == first
        assert set(members(group)[2:]) == {second[0], "e"}
        wait(lambda: group.step() >= group.events("recovered")[-1]["detail"]["step"] + 3)
        for name in (second[0], "e"):
            group.signal(name, signal.SIGKILL)
        agents.kill(others)
        group.coordinator._agents.lost(others, for_good=True)
        wait(lambda: len(group.events("recovered")) > before + 2)
        assert members(group) == first
        finished(group, WAIT_SECONDS)
    finally:
        group.end()
        agents.kill()
    sizes = [event["detail"]["world_size"] for event in group.events("start", "resume")]
    assert sizes[before:] == [4, 2, 4, 2]
    resumes = [event["detail"] for event in group.events("resume")][-3:]
    assert [(detail["tier"], detail["redo"]) for detail in resumes] == [("memory", 0)] * 3
    restored = [event["detail"] for event in group.events("restored")][-3:]
    assert [sorted(detail["bytes"]) for detail in restored] == [["own"]] * 3, "no copy, no disk, no storage"
    assert restored[2]["lost_parts"] == [2, 3], "the memory of their node is gone: the first group has the same"
    for event, detail in zip(group.events("recovered")[-3:], restored, strict=True):
        print(f"{event['detail']['seconds']} s from the loss or request to the next step; {detail}")
    undisturbed = config(tmp_path, "undisturbed", *SMALL, *GROUPS, ONE_SAVE, "reproducible=true", "parallel.shard=null",
                         "elastic.min_workers=1")
    fit_local(undisturbed)
    ends = [list_checkpoints(group.store.child("checkpoints"))[-1].name, f"step_{settings.steps:08d}"]
    assert digest(f"{settings.run_uri}/checkpoints/{ends[0]}") == digest(
        f"{undisturbed.run_uri}/checkpoints/{ends[1]}")
