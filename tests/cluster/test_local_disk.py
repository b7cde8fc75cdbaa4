"""All processes of a run are killed, the memory agents too; the next ones go on from the nodes' disks."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.cluster.agent_processes import AgentProcesses, ask_patiently
from tests.cluster.in_place import PATIENT, SMALL, Group, finished, prepare
from tests.unit.train.helpers import config
from tidewheel.checkpoint.digest import digest
from tidewheel.checkpoint.verify import list_checkpoints
from tidewheel.elastic.agent_supervisor import AgentSupervisor
from tidewheel.elastic.coordinator import Coordinator
from tidewheel.elastic.trainer import fit_local

pytestmark = [pytest.mark.cluster, pytest.mark.long]  # `test_local_disk.py` of the memory tier has the agents alone
SAVED, STEPS, EVERY = 30, 80, 3
WAIT_SECONDS = 3000.0


def on_disks(folder: Path) -> int:
    """Return the newest step of which both ranks' parts are on a disk; 0 without one."""
    ranks: dict[int, set[str]] = {}
    for path in folder.rglob("step_*.safetensors"):
        step, rank = re.findall(r"step_(\d+)-g\d+-r(\d+)", path.name)[0]
        ranks.setdefault(int(step), set()).add(rank)
    return max((step for step, known in ranks.items() if known == {"0", "1"}), default=0)


def test_every_process_is_killed_and_the_run_goes_on_from_the_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Coordinator, "_watch", lambda self: None)  # it would ask Ray
    disks = tmp_path / "disks"
    settings = prepare(tmp_path, f"steps={STEPS}", f"checkpoint.every_steps={SAVED}", "elastic.min_workers=2",
                       "elastic.max_workers=2", f"checkpoint.local_disk={{folder: {disks}, every_steps: {EVERY}}}",
                       **PATIENT)

    def start(*names: str) -> tuple[Group, AgentProcesses]:
        group, agents = Group(settings, tmp_path, (2,), ask_patiently), AgentProcesses(disks)
        group.coordinator._agents.supervisor = AgentSupervisor(agents)  # type: ignore[arg-type]
        for name, node in zip(names, ("m", "n"), strict=True):
            group.add(name, anew=node == "m", node=node)
        return group, agents

    def committed() -> int:
        return max((info.step for info in list_checkpoints(group.store.child("checkpoints")) if info.committed),
                   default=0)

    group, agents = start("a", "b")
    try:
        group.wait(lambda: committed() == SAVED and on_disks(disks) > SAVED, WAIT_SECONDS)
        for name in ("a", "b"):
            group.signal(name, signal.SIGKILL)
    finally:
        group.end()
        agents.kill()
    newest = on_disks(disks)  # nothing runs any more
    assert committed() == SAVED < newest < STEPS
    group, agents = start("c", "d")
    try:
        finished(group, WAIT_SECONDS)
    finally:
        group.end()
        agents.kill()
    resume = group.events("resume")[-1]["detail"]
    assert (resume["step"], resume["tier"]) == (newest, "disk")
    restored = group.events("restored")[-1]["detail"]
    assert list(restored["bytes"]) == ["disk"]
    undisturbed = config(tmp_path, "undisturbed", *SMALL, f"steps={STEPS}", "reproducible=true")
    fit_local(undisturbed)
    last = list_checkpoints(group.store.child("checkpoints"))[-1].name
    assert digest(f"{settings.run_uri}/checkpoints/{last}") == digest(
        f"{undisturbed.run_uri}/checkpoints/step_{STEPS:08d}")
