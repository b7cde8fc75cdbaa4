"""Snapshots on the local disk: a run continues from them when every process of it has ended, the agents included."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import on_ranks
from tests.unit.checkpoint.helpers import Events, clear, equal, manager, state
from tidewheel.checkpoint.memory_tier import disk_file, local_disk
from tidewheel.checkpoint.memory_tier.agent import Agent
from tidewheel.checkpoint.memory_tier.local_disk import LocalDisk
from tidewheel.checkpoint.memory_tier.part_store import Part, PartStore
from tidewheel.checkpoint.memory_tier.protocol import Address
from tidewheel.checkpoint.memory_tier.slots import HEADER_BYTES, hash_blocks
from tidewheel.checkpoint.tiers import Placement, TieredCheckpoints
from tidewheel.errors import ConfigError
from tidewheel.storage import store
from tidewheel.train.checkpoint_config import CheckpointConfig

TOKEN = "secret"
Start = Callable[[], list[Agent]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that kills the agents, if there are any, and starts one on each of two nodes."""
    started: list[Agent] = []

    def start() -> list[Agent]:
        for agent in started:
            agent.stop(keep_disk=True)  # as a killed process leaves it, but for what is in memory
        started[:] = [Agent("127.0.0.1", TOKEN, "run", disk=(tmp_path / f"nvme{node}", 0)) for node in range(2)]
        return started

    yield start
    for agent in started:
        agent.stop()


def tiers(folder: Path, addresses: list[Address], rank: int, world_size: int, generation: int, events: Events,
          **options) -> TieredCheckpoints:
    placement = Placement(tuple(addresses[item % len(addresses)] for item in range(world_size)), tuple(addresses),
                          TOKEN)
    return TieredCheckpoints(manager(store(folder), events), placement, rank=rank, world_size=world_size,
                             generation=generation, on_event=events, disk_steps=2, **options)


def keep(folder: Path, addresses: list[Address], steps: range, generation: int,
         working: tuple[int, ...] = (0, 1)) -> None:
    """Save the first of `steps` to storage, keep all, wait for the disks that are `working`, and end as if killed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    both = tiers(folder, addresses, rank, size, generation, Events(), replica=False)
    both.load_latest(state(999, mesh))
    for step in steps:
        values = state(step, mesh)
        if step == steps[0]:
            both.save(step, values, {"step": step})
            both.wait()
        both.keep(step, values, {"step": step})
        both.is_safe(step)
        clear(values)
        node = rank % len(addresses)
        if step % 2 == 0 and node in working:  # a disk that is still busy would leave the next step out
            file = f"step_{step:08d}-g{generation}-r{rank}.safetensors"
            while not list((folder.parent / f"nvme{node}").rglob(file)):
                time.sleep(0.005)
    both.wait()


def written(agents: list[Agent]) -> None:
    for agent in agents:
        assert agent.disk is not None
        agent.disk.wait()


def take(folder: Path, addresses: list[Address], step: int, tier: str, refused: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    events, values = Events(), state(999, init_device_mesh("cpu", (size,)))
    extra = tiers(folder, addresses, rank, size, 9, events).load_latest(values)
    assert extra is not None
    assert (extra["step"], extra.get("tier", "storage")) == (step, tier)
    assert equal(values, state(step, init_device_mesh("cpu", (size,))))
    assert len(events.of("local_disk_refused")) == refused * (rank == 0), events


def files(agents: list[Agent]) -> list[Path]:
    """Return the files of all agents, the oldest step first."""
    found = [path for agent in agents for path in agent.disk._run.rglob("step_*.safetensors")]  # type: ignore[union-attr]
    return sorted(found, key=lambda path: path.name)


def test_the_newest_step_on_all_disks_is_taken_and_a_damaged_one_is_refused(tmp_path, start):
    """Three ranks keep 2 to 7 on two nodes, and the disks get 2, 4 and 6; any number of ranks take 6."""
    agents = start()
    on_ranks(3, keep, tmp_path / "runs", [agent.address for agent in agents], range(2, 8), 0)
    written(agents)
    assert [path.name[:13] for path in files(agents)] == ["step_00000004"] * 3 + ["step_00000006"] * 3
    agents = start()
    on_ranks(2, take, tmp_path / "runs", [agent.address for agent in agents], 6, "disk", 0)
    victim = files(agents)[-1]  # a tensor of step 6
    data = bytearray(victim.read_bytes())
    content = disk_file.read(victim).content
    data[content.extra_start - 5] ^= 1
    victim.write_bytes(data)
    agents = start()
    on_ranks(2, take, tmp_path / "runs", [agent.address for agent in agents], 4, "disk", 1)
    for path in files(agents)[:2]:  # the headers of two parts of step 4
        data = bytearray(path.read_bytes())
        data[200] ^= 1
        path.write_bytes(data)
    agents = start()
    on_ranks(1, take, tmp_path / "runs", [agent.address for agent in agents], 2, "storage", 2)


def test_a_run_goes_back_to_storage_if_one_node_cannot_write(tmp_path, start, monkeypatch):
    """The first node has the new generation twice and deletes the older one; the second has only the older one."""
    agents = start()
    on_ranks(2, keep, tmp_path / "runs", [agent.address for agent in agents], range(2, 8), 0)
    written(agents)
    write = disk_file.write

    def fails_on_the_second(path: Path, part: Part) -> int:
        if (tmp_path / "nvme1") in path.parents:
            raise OSError(errno.EIO, "Input/output error")
        return write(path, part)

    monkeypatch.setattr(disk_file, "write", fails_on_the_second)
    on_ranks(2, keep, tmp_path / "runs", [agent.address for agent in agents], range(8, 14), 7, (0,))
    written(agents)
    names = {path.name[:16] for path in files(agents[:1])}
    assert names == {"step_00000010-g7", "step_00000012-g7"}
    assert {path.name[:16] for path in files(agents[1:])} == {"step_00000004-g0", "step_00000006-g0"}
    agents = start()
    on_ranks(2, take, tmp_path / "runs", [agent.address for agent in agents], 8, "storage", 0)


def kept_alone(folder: Path, agent: Agent, steps: range, generation: int = 0) -> TieredCheckpoints:
    """Keep steps as one rank, and wait until the disk has what it is to have."""
    both = tiers(folder, [agent.address], 0, 1, generation, Events())
    both.load_latest(state(999))
    for step in steps:
        both.keep(step, state(step), {"step": step})
        both.is_safe(step)
        assert agent.disk is not None
        agent.disk.wait()
    return both


def test_memory_and_disks_make_up_a_step_together(tmp_path, start):
    """The agent of one node is lost, and starts again with what is on its disk; the other still has its memory."""
    agents = start()
    on_ranks(2, keep, tmp_path / "runs", [agent.address for agent in agents], range(2, 5), 0)
    written(agents)
    agents[1].stop(keep_disk=True)
    agents[1] = Agent("127.0.0.1", TOKEN, "run", disk=(tmp_path / "nvme1", 0))
    on_ranks(2, take, tmp_path / "runs", [agent.address for agent in agents], 4, "disk", 0)


def test_a_run_that_goes_back_to_a_checkpoint_forgets_the_disk(tmp_path, start):
    agent = start()[0]
    both = kept_alone(tmp_path / "runs", agent, range(1, 5))
    both.save(4, state(4), {"step": 4})
    both.wait()
    assert files([agent])
    both.load_saved(state(9))
    assert not files([agent])
    assert all(part.origin != "disk" for part in agent.store.parts())


def test_old_files_are_deleted_and_the_end_of_a_run_leaves_nothing(tmp_path, start):
    agents = start()
    kept_alone(tmp_path / "runs", agents[0], range(1, 9))
    assert [path.name for path in files(agents)] == [f"step_0000000{step}-g0-r0.safetensors" for step in (6, 8)]
    agent = start()[0]
    both = kept_alone(tmp_path / "runs", agent, range(9, 13), generation=7)
    both.close()
    assert [path.name for path in files([agent])] == [f"step_000000{step}-g7-r0.safetensors" for step in (10, 12)]
    agent.stop()
    assert not list((tmp_path / "nvme0").rglob("*"))


def test_the_limit_holds_and_is_reported(tmp_path):
    agent = Agent("127.0.0.1", TOKEN, "run", disk=(tmp_path / "nvme", 5000))
    events = Events()
    both = tiers(tmp_path / "runs", [agent.address], 0, 1, 0, events)
    for step in range(1, 7):
        both.keep(step, state(step), {"step": step})
        both.is_safe(step)
        assert agent.disk is not None
        agent.disk.wait()
    assert "exceed the limit" in events.of("local_disk_failed")[0]["reason"]
    assert not files([agent])
    agent.stop()


def test_a_folder_of_another_user_or_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    base = tmp_path / "nvme"
    base.mkdir(0o700)
    (base / f"{local_disk.PREFIX}run").symlink_to(tmp_path / "elsewhere")
    agent = Agent("127.0.0.1", TOKEN, "run", disk=(base, 0))
    assert agent.disk is None
    assert "link" in agent.disk_problem
    events = Events()
    both = tiers(tmp_path / "runs", [agent.address], 0, 1, 0, events)
    for step in range(1, 4):
        both.keep(step, state(step), {"step": step})
        both.is_safe(step)
    assert agent.disk_problem in events.of("local_disk_failed")[0]["reason"]
    assert not list((tmp_path / "elsewhere").iterdir())
    agent.stop()


def test_a_file_is_a_safetensors_file_with_the_bytes_of_the_slot(tmp_path, start):
    agent = start()[0]
    both = kept_alone(tmp_path / "runs", agent, range(2, 3))
    [path] = files([agent])
    part = next(part for part in agent.store.parts() if part.origin == "own")
    with safe_open(path, "np") as opened:
        assert sorted(opened.keys()) == ["hashes", "part"]
        assert bytes(opened.get_tensor("part")) == bytes(part.slot.bytes[HEADER_BYTES:part.content.end])
        np.testing.assert_array_equal(opened.get_tensor("hashes"), part.hashes)
    read = disk_file.read(path)
    assert read.content == part.content
    np.testing.assert_array_equal(hash_blocks(read.slot.bytes[HEADER_BYTES:part.content.end]), part.hashes)
    os.chmod(path, 0o600)
    (path.parent / "step_00000009-g0-r0.safetensors").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic"):
        disk_file.read(path.parent / "step_00000009-g0-r0.safetensors")
    both.close()


def test_a_slot_that_is_used_again_while_it_is_written_gives_no_file(tmp_path, start):
    agent = start()[0]
    both = kept_alone(tmp_path / "runs", agent, range(1, 2))
    part = agent.store.parts()[0]
    disk = LocalDisk(tmp_path / "other", "run", PartStore("other", tmp_path))
    disk.write(replace(part, hashes=part.hashes + np.uint64(1)))  # as if the bytes had changed since they were hashed
    disk.wait()
    assert "used again" in disk.take_problem()
    assert not list((tmp_path / "other").rglob("*.safetensors"))
    assert not list((tmp_path / "other").rglob(f"{local_disk.TEMPORARY}*"))
    disk.close(keep=False)
    both.close()


def test_nobody_waits_for_parts_that_a_closed_disk_never_writes(tmp_path, start, monkeypatch):
    agent = start()[0]
    both = kept_alone(tmp_path / "runs", agent, range(1, 2))
    part = agent.store.parts()[0]
    begun, release, done = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(disk_file, "write", lambda *_: (begun.set(), release.wait()))
    disk = LocalDisk(tmp_path / "other", "run", PartStore("other", tmp_path))
    disk.write(part)
    assert begun.wait(60)
    disk.write(part)
    threading.Thread(target=lambda: (disk.wait(), done.set()), daemon=True).start()
    disk.close(keep=True)
    assert not done.is_set(), "the first part is still being written"
    release.set()
    assert done.wait(60)
    both.close()


def test_a_file_that_vanishes_hides_no_other(tmp_path, start, monkeypatch):
    agent = start()[0]
    both = kept_alone(tmp_path / "runs", agent, range(1, 3))
    written([agent])
    [file] = files([agent])
    listed = Path.iterdir
    gone = file.with_name("step_00000001-g0-r0.safetensors")
    monkeypatch.setattr(Path, "iterdir", lambda path: [*([gone] if path == file.parent else []), *listed(path)])
    assert agent.disk is not None
    agent.disk.discard()
    assert not file.exists()
    both.close()


def test_a_slot_keeps_its_content_while_it_is_written(tmp_path, start, monkeypatch):
    """Ten snapshots pass while the disk is busy with the second."""
    agent = start()[0]
    release: list[bool] = []
    write = disk_file.write

    def slow(path: Path, part: object) -> int:
        while not release:
            time.sleep(0.005)
        return write(path, part)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_file, "write", slow)
    events = Events()
    both = tiers(tmp_path / "runs", [agent.address], 0, 1, 0, events)
    for step in range(1, 13):
        both.keep(step, state(step), {"step": step})
        both.is_safe(step)
    release.append(True)
    written([agent])
    assert [path.name for path in files([agent])] == ["step_00000002-g0-r0.safetensors"]
    assert len(events.of("local_disk_failed")) == 1, "the first that was late"
    both.close()
    again = Agent("127.0.0.1", TOKEN, "run", disk=(tmp_path / "nowhere", 0))
    again.stop()
    values = state(999)
    agent.stop(keep_disk=True)
    [agent] = [Agent("127.0.0.1", TOKEN, "run", disk=(tmp_path / "nvme0", 0))]
    assert tiers(tmp_path / "runs", [agent.address], 0, 1, 9, Events()).load_latest(values) == {
        "step": 2, "tier": "disk"}
    assert equal(values, state(2))
    agent.stop()


def test_settings_are_checked():
    given = {"local_disk": {"folder": "/local_nvme", "every_steps": 10, "limit_bytes": 10**12}}
    assert CheckpointConfig.model_validate(given).local_disk is not None
    for wrong, text in (({"local_disk": {"folder": "nvme"}}, "absolute path"),
                        ({"local_disk": {"folder": "/a/../etc"}}, "absolute path"),
                        ({**given, "memory_tier": {"every_steps": 0}}, "memory_tier.every_steps auto"),
                        ({"local_disk": {"folder": "/a", "every_step": 3}}, "every_step")):
        with pytest.raises((ConfigError, ValueError), match=text):
            CheckpointConfig.model_validate(wrong)
