"""Reinforcement learning on a cluster that loses nodes and gains some: no rollout is lost and no bit differs."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.cluster.jobs import submitting
from tests.engine_parts import StandIn
from tests.unit.post.runs import rollout_run
from tidewheel.checkpoint.digest import digest
from tidewheel.cluster.groups import Group as NodeGroup
from tidewheel.cluster.local import LocalCluster
from tidewheel.elastic.trainer import fit, fit_local
from tidewheel.errors import RolloutError
from tidewheel.inference.passes import Beat, PassCounter
from tidewheel.jsonlog import read
from tidewheel.placement import GROUP_LABEL
from tidewheel.post import generator
from tidewheel.post.audit import audit_rollouts
from tidewheel.post.groups import Group, Job
from tidewheel.post.policy import Version
from tidewheel.post.pool import RayPool
from tidewheel.post.prompts import Prompt
from tidewheel.post.replay import replayed
from tidewheel.storage import store
from tidewheel.train.audit import audit
from tidewheel.train.policy.config import GeneratorsConfig

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 24


@pytest.mark.parametrize("passes", [(), ("rollouts.epochs=2", "rollouts.minibatches=2")])
def test_killed_trainers_and_generators_change_nothing(tmp_path: Path, passes: tuple[str, ...]):
    """Also amid the passes over a wave: nodes go and come after steps 3, 7, 11 and 15, or some steps later."""
    config = rollout_run(tmp_path, "elastic", f"steps={STEPS}", "rollouts.generators.processes=2", *passes,
                         "rollouts.look_ahead=1", "elastic.min_workers=1", "elastic.max_workers=2",
                         "elastic.join_wait_seconds=0.5", "elastic.resize_interval_seconds=1")
    with LocalCluster(nodes=4, cpus_per_node=1) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        changes: list[int] = []

        def on_progress(progress: dict[str, Any]) -> None:
            step = progress.get("step", 0)
            if step >= 3 + 4 * len(changes) and len(changes) < 4:
                changes.append(step)
                if len(changes) % 2:
                    cluster.kill_node(cluster.nodes[-1])
                else:
                    cluster.add_node()

        try:
            result = fit(config, on_progress=on_progress)
        finally:
            ray.shutdown()
    assert result.steps == STEPS
    assert len(changes) == 4
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "runs/elastic/rollouts.jsonl").read_text().splitlines()]
    assert config.rollouts is not None
    assert kinds.count("step") == STEPS // config.rollouts.wave_steps
    for proof in (audit(config.run_uri), audit_rollouts(config.run_uri)):
        assert proof is not None
        assert proof.ok, proof.summary()
    alone = rollout_run(tmp_path, "alone", f"steps={STEPS}", "rollouts.look_ahead=1", *passes)
    fit_local(alone)
    assert digest(config.run_uri).state == digest(alone.run_uri).state


def test_engines_of_another_environment_lose_no_rollout_with_their_nodes(tmp_path: Path):
    """The job's runtime environment names the engine's Python; two generators, each with an engine, lose a node."""
    config = rollout_run(tmp_path, "engines", "rollouts.engine=tests.engine_parts:StandIn", "steps=10",
                         "rollouts.generators.processes=2", "rollouts.look_ahead=1", "rollouts.schedule=recorded",
                         "objective.correction=truncated", "elastic.min_workers=1", "elastic.max_workers=1",
                         "elastic.join_wait_seconds=0.5", "elastic.resize_interval_seconds=1")
    with LocalCluster(nodes=4, cpus_per_node=1) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR",
                 runtime_env={"env_vars": {StandIn.PYTHON: sys.executable}})
        killed: list[int] = []

        def on_progress(progress: dict[str, Any]) -> None:
            if progress.get("step", 0) >= 4 and not killed:
                killed.append(progress["step"])
                cluster.kill_node(cluster.nodes[-1])
                cluster.add_node()

        try:
            assert fit(config, on_progress=on_progress).steps == 10
        finally:
            ray.shutdown()
    assert killed
    for proof in (audit(config.run_uri), audit_rollouts(config.run_uri)):
        assert proof is not None
        assert proof.ok, proof.summary()
    again = replayed(config.run_uri, f"{tmp_path}/runs/again")
    fit_local(again)
    assert digest(again.run_uri).groups["model"] == digest(config.run_uri).groups["model"]


def test_turns_have_the_same_bits_for_any_number_of_generators_and_trainers(tmp_path: Path):
    """The answers talk to an environment; one run is in this process, the other has two processes of each kind."""
    game = ("rollouts.environment={kind: guess_number, turn_tokens: 2, turns: 3, turn_end: '', none: 'no '}",
            "rollouts.answer_tokens=11", "steps=8")
    alone = rollout_run(tmp_path, "alone", *game)
    fit_local(alone)
    config = rollout_run(tmp_path, "two", *game, "rollouts.generators.processes=2", "elastic.min_workers=2")
    with LocalCluster(nodes=4, cpus_per_node=1) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            assert fit(config).steps == 8
        finally:
            ray.shutdown()
    assert digest(config.run_uri).state == digest(alone.run_uri).state
    for run in (alone, config):
        proof = audit_rollouts(run.run_uri)
        assert proof is not None
        assert proof.ok, proof.summary()


def first(pool: RayPool) -> Group:
    """Return the first group that is done."""
    group = None
    while group is None:
        group = pool.next(1.0)
    return group


def test_generators_that_cannot_start_end_the_run_with_the_reason():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        pool = RayPool(({}, [], {}, 8), GeneratorsConfig(), lambda kind, **_: None)
        with pytest.raises(RolloutError, match="a generator cannot start"):
            first(pool)
        pool.close()
    finally:
        ray.shutdown()


class Sleeper:
    """A generator that needs no model.

    Args:
        arguments: of `Generator`.
    """

    def __init__(self, *arguments: Any) -> None:
        self._identity = torch.nn.Identity()
        self._passes = PassCounter(self._identity)

    def beat(self) -> Beat:
        return self._passes.beat

    def make(self, job: Job) -> Group:
        time.sleep(0.05)
        return Group(job.position, job.prompt.id, job.version.number)


class Freezer(Sleeper):
    """Hangs with the first job of a prompt, as the prompt's text says; the file named by the id has its process."""

    def make(self, job: Job) -> Group:
        with contextlib.suppress(FileExistsError), open(job.prompt.id, "x") as file:
            file.write(str(os.getpid()))
            file.flush()
            if job.prompt.text == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif job.prompt.text == "hang in a pass":
                self._identity.register_forward_hook(lambda *_: time.sleep(3600), prepend=True)
                self._identity(torch.zeros(1))
            elif job.prompt.text == "hold the interpreter":
                ctypes.PyDLL(None).sleep(3600)
        return super().make(job)


def test_a_generator_that_hangs_is_found_long_before_its_lease_is_over(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a second generator the group is done before the first one is found."""
    monkeypatch.setattr(generator, "Generator", Freezer)
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        for kind, processes in (("stop", 1), ("stop", 2), ("hang in a pass", 1), ("hold the interpreter", 1)):
            folder = tmp_path / f"{kind}-{processes}"
            folder.mkdir()
            frozen(folder, kind, processes)
    finally:
        ray.shutdown()


def frozen(folder: Path, kind: str, processes: int) -> None:
    """Have a pool make 8 groups, with the fifth of which a generator hangs once."""
    events: list[tuple[str, dict[str, Any]]] = []
    pool = RayPool((), GeneratorsConfig(processes=processes, cpus=1, stall_seconds=3),
                   lambda kind, **detail: events.append((kind, detail)))
    files = [folder / str(position) for position in range(8)]
    for file in files[:4]:
        file.write_text("does not hang")
    try:
        for position, file in enumerate(files):
            text = kind if position == 4 else ""
            pool.submit(Job(position, Prompt(str(file), text, None, (1,)), Version(0, ())))
        done = sorted(first(pool).position for _ in files)
        while not any(name == "generator_lost" for name, _ in events):
            assert pool.next(0.1) is None, "no group counts twice"
    finally:
        pool.close()
    assert done == list(range(8))
    [lost] = [detail for name, detail in events if name == "generator_lost"]
    assert lost["position"] == 4
    assert lost["why"].startswith("no progress for ")
    assert lost["jobs"] == (processes == 1), "the job of two generators is not lost"
    assert any(name == "group_begun_again" for name, _ in events) == (processes == 2)


def test_a_pool_that_shrinks_and_grows_loses_no_job(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generator, "Generator", Sleeper)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        pool = RayPool((), GeneratorsConfig(processes=3, cpus=1), lambda kind, **_: pytest.fail(kind))
        jobs = [Job(position, Prompt("p", "a", None, (1,)), Version(0, ())) for position in range(60)]
        for job in jobs:
            pool.submit(job)
        done: list[int] = []
        sizes: list[int] = []
        while len(done) < len(jobs):
            pool.resize({0: 3, 1: 1, 2: 2}[len(done) // 20])
            done.append(first(pool).position)
            sizes.append(len(pool._idle) + len(pool._leases) + len(pool._starting))
        assert sorted(done) == list(range(60))
        assert (sizes[10], sizes[35], sizes[55]) == (3, 1, 2)
        pool.close()
    finally:
        ray.shutdown()


def generator_groups() -> set[str]:
    """Return the groups of the nodes that have generators, or had."""
    groups = {row["NodeID"]: row["Labels"].get(GROUP_LABEL, "head") for row in ray.nodes()}
    generators = [actor for actor in ray._private.state.actors().values() if actor["ActorClassName"] == "Generator"]
    return {groups[actor["Address"]["NodeID"]] for actor in generators if actor["Address"]["NodeID"] in groups}


def test_a_recorded_run_on_spot_generators_replays_on_another_number_of_trainers(tmp_path: Path):
    """Trainers run on demand and generators on spot nodes, which are killed; the replay starts no generator."""
    config = rollout_run(
        tmp_path, "recorded", f"steps={STEPS}", "rollouts.schedule=recorded", "rollouts.look_ahead=2",
        "rollouts.generators={processes: 2, min_processes: 1, placement: {groups: [rollouts-spot]}}",
        "elastic.placement.groups=[cpu-on-demand]", "elastic.max_workers=1")
    homes: set[str] = set()
    with LocalCluster(nodes=0) as cluster:
        nodes = [cluster.add_node(group=NodeGroup(name, cpus=1)) for name in (
            "cpu-on-demand", "rollouts-spot", "rollouts-spot")]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        changes: list[int] = []

        def on_progress(progress: dict[str, Any]) -> None:
            homes.update(generator_groups())
            if progress.get("step", 0) >= 6 + 6 * len(changes) and len(changes) < 2:
                changes.append(progress["step"])
                if len(changes) == 1:
                    cluster.kill_node(nodes[-1])
                else:
                    cluster.add_node(group=NodeGroup("rollouts-spot", cpus=1))

        try:
            assert fit(config, on_progress=on_progress).steps == STEPS
        finally:
            ray.shutdown()
    assert len(changes) == 2
    assert homes == {"rollouts-spot"}
    for proof in (audit(config.run_uri), audit_rollouts(config.run_uri)):
        assert proof is not None
        assert proof.ok, proof.summary()
    with LocalCluster(nodes=2, cpus_per_node=1) as cluster:
        again = replayed(config.run_uri, f"{tmp_path}/again", [
            "elastic.placement.groups=[]", "elastic.min_workers=2", "elastic.max_workers=2"])
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            assert fit(again).steps == STEPS
            assert not generator_groups()
        finally:
            ray.shutdown()
    assert digest(again.run_uri).state == digest(config.run_uri).state
    assert audit(again.run_uri).world_sizes == (2,)


def test_a_submitted_run_loses_a_node_of_its_generators(tmp_path: Path):
    """`ray job submit` to three nodes in two groups: a trainer on demand, two generators on spot nodes."""
    config = rollout_run(
        tmp_path, "submitted", f"steps={STEPS}", "rollouts.look_ahead=1",
        "rollouts.generators={processes: 2, min_processes: 1, placement: {groups: [rollouts-spot]}}",
        "elastic.placement.groups=[cpu-on-demand]", "elastic.max_workers=1")
    file = tmp_path / "submitted.yaml"
    file.write_text(json.dumps(config.canonical()))
    with LocalCluster(nodes=0, dashboard=True) as cluster:
        nodes = [cluster.add_node(group=NodeGroup(name, cpus=1)) for name in (
            "cpu-on-demand", "rollouts-spot", "rollouts-spot")]
        job = submitting(cluster, "python", "-m", "jobs.train", "--config", str(file))
        run = store(config.run_uri)
        while sum(line["kind"] == "step" for line in read(run, "rollouts.jsonl")) < 4:
            assert job.poll() is None, job.communicate()[0]
            time.sleep(0.1)
        cluster.kill_node(nodes[-1])
        output = job.communicate()[0]
    assert job.returncode == 0, output
    for proof in (audit(config.run_uri), audit_rollouts(config.run_uri)):
        assert proof is not None
        assert proof.ok, proof.summary()
    alone = rollout_run(tmp_path, "alone", f"steps={STEPS}", "rollouts.look_ahead=1")
    fit_local(alone)
    assert digest(config.run_uri).state == digest(alone.run_uri).state
