"""Tests of groups that meet over storage: their bits, their data, who is left out, and repeating steps."""

import contextlib
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tidewheel as tw
from tests.ranks import on_ranks
from tests.unit.outer.groups import BASE, gate, group, model, train_together
from tests.unit.train.helpers import FileCheckpoints, Replaced, Script, config, write_shards
from tests.unit.train.test_continuing import events, lines
from tidewheel import storage
from tidewheel.checkpoint.digest import digest
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.cli import run_command
from tidewheel.cluster.s3_server import S3Server
from tidewheel.config import build
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import CheckpointError, ConfigError
from tidewheel.outer.exchange import Exchange
from tidewheel.outer.meeting import GONE
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.record import positions, recorded_source
from tidewheel.train.runtime import Runtime


class Averaging(tw.Optimizer):
    """An optimizer that sets the model's weights from those that it keeps."""

    STATE = ("z", "x")
    AVERAGE = "x"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path / "shards")
    return tmp_path


def tensors(uri: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a set that one rank has written."""
    [file] = uri.glob("*.safetensors")
    return load_file(file)


def step_ids(run: Path, step: int) -> list[str]:
    """Return the sequences of a step, as the plan of run.json has them."""
    values = json.loads((run / "run.json").read_text())
    source = recorded_source(values)
    return list(source.ids_at(positions(values, source).of(step)))


def test_one_group_with_rate_1_has_the_bits_of_a_plain_run(folder: Path):
    fit_local(config(folder, "plain", *BASE))
    fit_local(group(folder, 0, 1, every=3, learning_rate=1, momentum=0))
    plain, alone = (digest(str(folder / "runs" / run)) for run in ("plain", "g0"))
    assert alone.groups == plain.groups
    assert model(folder / "outer") == plain.groups["model"], "8 steps end in a round"
    assert [line["loss"] for line in lines(folder, "g0", "metrics.jsonl") if "loss" in line] == [
        line["loss"] for line in lines(folder, "plain", "metrics.jsonl") if "loss" in line]


def test_two_groups_end_with_the_weights_of_torchs_outer_step_and_share_the_data(folder: Path):
    train_together([group(folder, number, 2, keep=8) for number in range(2)])
    outer = folder / "outer"
    assert model(outer) == model(folder / "runs/g0") == model(folder / "runs/g1")
    assert digest(str(folder / "runs/g0")).groups["optimizer"] != digest(str(folder / "runs/g1")).groups["optimizer"]
    [first] = outer.glob("checkpoints/step_00000000-*")
    states = [tensors(first), *(tensors(outer / f"checkpoints/step_{number:08d}") for number in range(1, 5))]
    weights = {name: torch.nn.Parameter(value) for name, value in states[0].items() if name.startswith("model/")}
    oracle = torch.optim.SGD(weights.values(), lr=0.7, momentum=0.9, nesterov=True)
    for number in range(1, 5):
        members = json.loads((outer / f"decisions/{number:08d}.json").read_text())["members"]
        assert [member["group"] for member in members] == [0, 1]
        offers = [tensors(outer / "offers" / member["offer"]) for member in members]
        for name, weight in weights.items():
            key = name.replace("model/", "values/")
            weight.grad = (offers[0][key] + offers[1][key]) / 2
        oracle.step()
        for name, weight in weights.items():
            torch.testing.assert_close(states[number][name], weight.detach(), rtol=2e-7, atol=1e-7)
    fit_local(config(folder, "whole", *BASE, "batch.global_sequences=16", "steps=4"))
    for step in (1, 2, 4):
        both = step_ids(folder / "runs/g0", step) + step_ids(folder / "runs/g1", step)
        assert both == step_ids(folder / "runs/whole", step)
    for run in ("g0", "g1"):
        assert audit(str(folder / "runs" / run)).ok
    sent = [line["outer_sent_bytes"] for line in lines(folder, "g1", "metrics.jsonl") if "outer_sent_bytes" in line]
    assert len(sent) == 4
    assert run_command(["checkpoint", "verify", str(outer)]) == 0
    assert run_command(["checkpoint", "export", str(outer), str(folder / "hf")]) == 0


def test_a_group_that_is_late_is_left_out_and_comes_back(folder: Path):
    """Group 1 is held for two rounds, then both meet again; each waits for a file of the other."""
    outer = folder / "outer"
    gates = ", ".join([gate("g1", 1, outer / "decisions/00000002.json"),
                       gate("g0", 5, outer / "takes/group_0001/00000001.json"),
                       gate("g0", 6, outer / "meetings/00000003/0001-offer.json"),
                       gate("g0", 8, outer / "meetings/00000004/0001-offer.json")])
    train_together([group(folder, 0, 2, f"callbacks=[{gates}]", patience_seconds=0.2),
                    group(folder, 1, 2, f"callbacks=[{gates}]", patience_seconds=300)])
    rounds = [(event["step"], event["members"]) for event in events(folder, "g0", "outer_round")]
    assert rounds == [(2, [0]), (4, [0]), (6, [0, 1]), (8, [0, 1])]
    assert [event["step"] for event in events(folder, "g1", "outer_left_out")] == [2]
    rounds = [(event["step"], event["round"], event["members"]) for event in events(folder, "g1", "outer_round")]
    assert rounds == [(4, 3, [0, 1]), (6, 4, [0, 1]), (8, 5, [1])], "its last round is its own: group 0 has finished"
    state = tensors(outer / "checkpoints/step_00000004")
    [file] = (folder / "runs/g0/checkpoints/step_00000008").glob("*.safetensors")
    saved = load_file(file)
    assert all(torch.equal(saved[name], value) for name, value in state.items() if name.startswith("model/"))
    for run in ("g0", "g1"):
        assert audit(str(folder / "runs" / run)).ok


def train_with(settings: TrainConfig, generation: int, **script: Any) -> Script:
    """Train in this process with checkpoints in storage, and a script that ends the worker."""
    control = Script(**script)
    manager = CheckpointManager(storage.store(settings.run_uri).child("checkpoints"), asynchronous=False)
    train(settings, Runtime(generation=generation, checkpoints=manager, control=control, outer=Exchange))
    return control


STREAMING = {"every": 4, "fragments": 2, "overlap": 1, "merge": 0.25, "quantise": "int8"}
"""The first fragment is sent after steps 2 and 6, the second after step 4; outcomes come a step later, or last."""


@pytest.mark.parametrize(("outer", "save", "dies"), [
    ({"every": 3}, 2, (1, 3, 5, 7)), ({"every": 3}, 5, (4, 7)), (STREAMING, 2, (1, 3, 5, 7)), (STREAMING, 5, (4, 7)),
    ({"every": 3, "quantise": "int4", "error_feedback": True}, 2, (1, 3, 5, 7)),
    ({**STREAMING, "error_feedback": True}, 5, (4, 7))])
def test_a_worker_that_repeats_steps_takes_the_same_outcomes(folder: Path, outer: dict[str, Any], save: int,
                                                             dies: tuple[int, ...]):
    """The worker dies before rounds and behind them, after checkpoints and with rounds since the last one."""
    settings = group(folder, 0, 1, f"checkpoint.every_steps={save}", keep=3, **outer)
    train_with(settings, 0)
    undisturbed = digest(str(folder / "runs/g0")).groups
    offers = sorted(path.parent.name for path in (folder / "outer").rglob("offers/*/manifest.json"))
    for name in ("runs", "outer"):
        shutil.rmtree(folder / name)
    for generation, die in enumerate(dies):
        with pytest.raises(Replaced):
            train_with(settings, generation, die=die)
    before = {path: path.read_bytes() for path in (folder / "outer").rglob("decisions/*.json")}
    train_with(settings, len(dies))
    assert digest(str(folder / "runs/g0")).groups == undisturbed
    assert all(path.read_bytes() == content for path, content in before.items())
    again = sorted(path.parent.name for path in (folder / "outer").rglob("offers/*/manifest.json"))
    assert [name[:13] for name in again] == [name[:13] for name in offers], "no outer gradient was published twice"


class KeepsAtOnce(FileCheckpoints):
    """A memory tier that the next worker finds, in which every worker copies what it has loaded before it trains."""

    def has_memory(self) -> bool:
        return True

    def keep(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        self.save(step, state, extra)


@pytest.mark.parametrize("outer", [{"every": 3}, {**STREAMING, "error_feedback": True}])
def test_the_first_copy_of_a_new_worker_has_the_groups_progress(folder: Path, outer: dict[str, Any]):
    """Workers die behind a checkpoint and a round, before they have copied anything but what they had loaded."""
    settings = group(folder, 0, 1, "checkpoint.every_steps=5", keep=3, **outer)

    def results(dies: Sequence[int]) -> list[bytes]:
        """Train with these deaths, one after the other, and return the weights."""
        copy = folder / "copy.npz"
        for generation, die in enumerate((*dies, -1)):
            runtime = Runtime(generation=generation, checkpoints=KeepsAtOnce(copy), control=Script(die=die),
                              outer=Exchange)
            with pytest.raises(Replaced) if die > 0 else contextlib.nullcontext():
                train(settings, runtime)
        with np.load(copy) as saved:
            weights = [saved[name].tobytes() for name in sorted(saved) if name.startswith("model/")]
        copy.unlink()
        for name in ("runs", "outer"):
            shutil.rmtree(folder / name)
        return weights

    undisturbed = results([])
    assert undisturbed
    assert results([6, 6, 7]) == undisturbed


def test_an_outcome_that_others_decide_meanwhile_comes_as_late_as_without_the_failure(folder: Path):
    """The worker dies in the step after the publication; the other group decides the round before it is back."""
    calm = [group(folder, number, 2, f"run.uri={folder / 'calm'}", store=folder / "calm-outer", overlap=1)
            for number in range(2)]
    train_together(calm)
    dies, goes_on = (group(folder, number, 2, overlap=1) for number in range(2))
    other = Thread(target=fit_local, args=(goes_on,))
    other.start()
    with pytest.raises(Replaced):
        train_with(dies, 0, die=3)
    while not (folder / "outer/decisions/00000001.json").exists():
        time.sleep(0.01)
    train_with(dies, 1)
    other.join()
    for disturbed, undisturbed in zip((dies, goes_on), calm):
        assert digest(disturbed.run_uri).state == digest(undisturbed.run_uri).state


def test_steps_that_were_sent_before_a_failure_count_once(folder: Path):
    """Group 1 sends steps 1 to 3, dies and goes on from step 2 while the other group has done two more rounds."""
    outer = folder / "outer"
    settings = [group(folder, number, 2, "checkpoint.every_steps=2", every=3, overlap=1, patience_seconds=patience)
                for number, patience in enumerate((0.2, 300))]
    gates = gate("g0", 8, outer / "takes/group_0001/00000001.json")
    other = Thread(target=fit_local, args=(build(TrainConfig, settings[0].canonical(), [f"callbacks=[{gates}]"]),))
    with pytest.raises(Replaced):
        train_with(settings[1], 0, die=4)
    other.start()
    while not (outer / "decisions/00000002.json").exists():
        time.sleep(0.01)
    train_with(settings[1], 1)
    other.join()
    decisions = [json.loads((outer / f"decisions/{number:08d}.json").read_text()) for number in (1, 2)]
    assert [[member["group"] for member in decision["members"]] for decision in decisions] == [[0, 1], [0]]
    take = json.loads((outer / "takes/group_0001/00000001.json").read_text())
    assert (take["step"], take["round"], take["sent"]) == (4, 2, -1), "step 3 is not done again from round 2"


def test_no_group_leaves_before_the_round_that_covers_its_last_steps(folder: Path):
    """The outcome of the steps up to 4 comes after step 5, the last one, which has a round of its own."""
    groups = [group(folder, number, 2, "steps=5", overlap=1) for number in range(2)]
    train_together(groups)
    for number in range(2):
        rounds = [(event["step"], event["members"]) for event in events(folder, f"g{number}", "outer_round")]
        assert rounds == [(3, [0, 1]), (5, [0, 1]), (5, [0, 1])]
    assert not list((folder / "outer/meetings/00000003").glob(f"*-{GONE}.json"))
    assert len(list((folder / "outer/meetings/00000004").glob(f"*-{GONE}.json"))) == 2
    assert model(folder / "runs/g0") == model(folder / "runs/g1")


def test_steps_that_go_on_meanwhile_are_merged(folder: Path):
    """With rate 1 and no momentum the outcome is the weights as they were when they were sent."""
    every = ("checkpoint.every_steps=1", "checkpoint.keep_last=99")
    fit_local(config(folder, "plain", *BASE, *every, "steps=6"))
    fit_local(group(folder, 0, 1, *every, "steps=6", every=4, overlap=1, merge=0.25, learning_rate=1, momentum=0))

    def weights(run: str, step: int) -> dict[str, torch.Tensor]:
        held = tensors(folder / f"runs/{run}/checkpoints/step_{step:08d}")
        return {name: value for name, value in held.items() if name.startswith("model/")}

    sent, now, taken = weights("plain", 4), weights("plain", 5), weights("g0", 5)
    for name, value in taken.items():
        torch.testing.assert_close(value, 0.75 * sent[name] + 0.25 * now[name])
    assert model(folder / "outer") == model(folder / "runs/g0"), "the last round has no steps behind it"


def test_fragments_of_two_groups_meet_in_rounds_of_their_own(folder: Path):
    train_together([group(folder, number, 2, **STREAMING) for number in range(2)])
    assert model(folder / "runs/g0") == model(folder / "runs/g1")
    whole = tensors(folder / "runs/g0/checkpoints/step_00000008")
    held: dict[str, torch.Tensor] = {}
    for index, rounds in ((0, 3), (1, 2)):
        steps = [event["step"] for event in events(folder, "g0", "outer_round") if event["fragment"] == index]
        assert steps == [[3, 7, 8], [5, 8]][index]
        held |= tensors(folder / f"outer/fragment_{index:02d}/checkpoints/step_{rounds:08d}")
    assert all(torch.equal(whole[name], value) for name, value in held.items() if name.startswith("model/"))
    assert {name for name in held if name.startswith("model/")} == {name for name in whole if name.startswith("model/")}


def test_a_stop_interrupts_the_wait_for_others(folder: Path):
    """The group stops before the round is decided; the next generation takes part in it."""
    settings = group(folder, 0, 2, patience_seconds=600)
    with pytest.raises(Replaced, match="after step 2"):
        train_with(settings, 0, leave=3)  # asked once a step, then while it waits
    train_together([settings, group(folder, 1, 2)])
    assert model(folder / "runs/g0") == model(folder / "runs/g1")
    members = json.loads((folder / "outer/decisions/00000001.json").read_text())["members"]
    assert [member["group"] for member in members] == [0, 1]


def test_a_group_that_waits_writes_its_ledger(folder: Path):
    waiting = Thread(target=fit_local, args=(group(folder, 0, 2, patience_seconds=600),))
    waiting.start()

    def idle() -> bool:
        return any(line["category"] == "idle" for line in lines(folder, "g0", "ledger.jsonl"))

    while not events(folder, "g0", "outer_waits"):
        time.sleep(0.05)
    until = time.monotonic() + 60
    while not idle() and time.monotonic() < until:
        time.sleep(0.05)
    seen = idle()
    fit_local(group(folder, 1, 2))
    waiting.join()
    assert seen


def test_a_state_that_nobody_committed_follows_from_the_offers(folder: Path):
    train_together([group(folder, number, 2, "steps=6", quantise="int8") for number in range(2)])
    final = folder / "outer/checkpoints/step_00000003"
    before = model(folder / "outer")
    shutil.rmtree(final)
    fit_local(group(folder, 0, 2, "run.id=other", "steps=2", quantise="int8", patience_seconds=0.01,
                    store=joined(folder)))
    assert model(final) == before


def joined(folder: Path) -> Path:
    """Let another run take the place of group 0, which has lost its folder, and return the groups' store."""
    outer = folder / "outer"
    shutil.rmtree(outer / "groups/0000")
    shutil.rmtree(outer / "takes/group_0000")
    return outer


def test_a_damaged_offer_is_named(folder: Path):
    train_together([group(folder, number, 2, "steps=4") for number in range(2)])
    decision = json.loads((folder / "outer/decisions/00000002.json").read_text())
    shutil.rmtree(folder / "outer/checkpoints/step_00000002")
    [file] = (folder / "outer/offers" / decision["members"][1]["offer"]).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank_00000-.*is damaged"):
        fit_local(group(folder, 0, 2, "run.id=other", store=joined(folder)))


def test_groups_must_agree_and_be_one_run_each(folder: Path):
    fit_local(group(folder, 0, 2, "steps=2", patience_seconds=0.01))
    with pytest.raises(ConfigError, match=r"every is 2 there, 4 here"):
        fit_local(group(folder, 1, 2, every=4))
    with pytest.raises(ConfigError, match=r"keep is 4 there, 8 here"):
        fit_local(group(folder, 1, 2, keep=8))
    with pytest.raises(ConfigError, match=r"group 0 of the groups that meet here is the run .*runs/g0"):
        fit_local(group(folder, 0, 2, "run.id=other"))
    with pytest.raises(ConfigError, match=r"outer\.momentum was 0\.9, now 0"):
        fit_local(group(folder, 0, 2, "steps=4", momentum=0))


def test_settings_that_cannot_work_name_the_nearest_that_can():
    def refused(expected: str, *overrides: str, **outer: Any) -> None:
        values = {"groups": 2, "store": "outer", **outer}
        with pytest.raises(ConfigError, match=expected):
            build(TrainConfig, {"outer": values}, overrides)

    refused(r"group 2 of 2 groups.*nearest legal choice: 1", group=2)
    refused(r"fragments 9 .*nearest legal choice: fragments 4", every=4, fragments=9)
    refused(r"(?s)every_step.*did you mean.*every", every_step=4)
    refused(r"parallel\.tensor 2.*nearest legal choice: parallel\.tensor 1", "parallel.tensor=2",
            "elastic.max_workers=2")
    refused(r"error_feedback with quantise fp32.*nearest legal choice: bf16", error_feedback=True)
    refused(r"overlap 50.*nearest legal choice: overlap 49", overlap=50)
    refused(r"(?s)rolls back.*nearest legal choice: skip", "guards.spike=rollback")
    refused(r"nearest legal choice: offload false", "parallel.offload=true")
    refused(r"nearest legal choice: fp32", "parameters=bf16", "precision=bf16")
    refused(r"nearest legal choice: no adapter", "adapter.kind=lora")
    refused(r"weights of its own.*nearest legal choice: optimizer\.kind adamw",
            "optimizer.kind=tests.unit.outer.test_exchange:Averaging")
    refused(r"nearest legal choice: checkpoint\.every_steps 200", "checkpoint.every_steps=1000")


def test_where_and_how_patiently_groups_meet_is_no_part_of_the_recipe():
    def recipe(**outer: Any) -> str:
        return build(TrainConfig, {"outer": {"groups": 2, "store": "a", **outer},
                                   "checkpoint": {"every_steps": 0}}).recipe_hash()

    assert recipe() == recipe(store="b", patience_seconds=1, keep=9)
    assert len({recipe(), recipe(group=1), recipe(every=3), build(TrainConfig, {}).recipe_hash()}) == 4


def test_groups_meet_in_a_bucket(folder: Path):
    with S3Server() as server:
        server.create_bucket("bucket")
        store = "s3://bucket/outer"
        train_together([group(folder, number, 2, "steps=4", store=store, quantise="int4") for number in range(2)])
        assert model(store) == model(folder / "runs/g0") == model(folder / "runs/g1")


def two_ranks(settings: TrainConfig) -> None:
    import torch.distributed as dist

    manager = CheckpointManager(storage.store(settings.run_uri).child("checkpoints"), asynchronous=False)
    train(settings, Runtime(dist.get_rank(), 2, checkpoints=manager, outer=Exchange))


@pytest.mark.long
@pytest.mark.parametrize("data", ["zero2", "zero3", "zero1", "ddp"])
def test_a_group_of_two_workers_has_the_bits_of_a_group_of_one(folder: Path, data: str):
    fit_local(group(folder, 0, 1, every=3, quantise="int4"))
    alone = digest(str(folder / "runs/g0")).groups
    outer = model(folder / "outer")
    for name in ("runs", "outer"):
        shutil.rmtree(folder / name)
    on_ranks(2, two_ranks, group(folder, 0, 1, f"parallel.data={data}", every=3, quantise="int4"))
    assert digest(str(folder / "runs/g0")).groups == alone
    assert model(folder / "outer") == outer
