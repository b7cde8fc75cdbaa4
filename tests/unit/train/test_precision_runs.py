"""Tests of whole runs in each precision: they learn, and a killed run resumes bit for bit."""

from pathlib import Path

import pytest
import torch

from tests.unit.train.helpers import LENGTH, Replaced, Script, config, write_shards
from tests.unit.train.test_step import fresh, micro, rows
from tidewheel import jsonlog, storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.train.loop import train
from tidewheel.train.precision import LossScale
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import train_step

SHORT = ("steps=5", "evaluation.every_steps=0", "evaluation.sample_tokens=0", "checkpoint.every_steps=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("precision")
    write_shards(base / "shards")
    write_shards(base / "validation", shards=1, rows=5, seed=1)
    return base


def ran(folder: Path, run: str, *overrides: str, **script: int) -> tuple[dict[int, float], list]:
    """Train in one process with the real checkpoints and return the losses by step and the events."""
    settings, control = config(folder, run, *SHORT, *overrides), Script(**script)
    run_store = storage.store(settings.run_uri)
    saved = CheckpointManager(run_store.child("checkpoints"), asynchronous=False)
    try:
        train(settings, Runtime(generation=int("die" not in script), checkpoints=saved, control=control))
    except Replaced:
        pass  # the script ends the worker
    lines = jsonlog.read(run_store, "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if "loss" in line}, control.events


@pytest.mark.parametrize("overrides", [
    ("precision=bf16",), ("precision=fp16",), ("precision=bf16", "parameters=bf16"),
    ("optimizer.kind=adamw8bit", "model.dim=256"), ("optimizer.kind=muon",)], ids=" ".join)
def test_a_killed_run_resumes_bit_for_bit(folder: Path, overrides: tuple[str, ...]):
    name = "".join(c if c.isalnum() else "-" for c in "".join(overrides))
    whole, _ = ran(folder, f"{name}-whole", *overrides)
    exact, _ = ran(folder, "exact", *[setting for setting in overrides if "precision" not in setting
                                      and "parameters" not in setting]) if "precision" in name else (whole, [])
    assert whole == pytest.approx(exact, rel=2e-2)
    ran(folder, f"{name}-killed", *overrides, die=3)
    killed, events = ran(folder, f"{name}-killed", *overrides)
    assert events[0][0] == "resume"
    assert killed == whole


def test_warm_up_may_be_in_tokens(folder: Path):
    ran(folder, "tokens", "schedule.unit=tokens", f"schedule.warmup_tokens={2 * 8 * LENGTH}", "schedule.warmup_steps=0")
    lines = jsonlog.read(storage.store(folder / "runs" / "tokens"), "metrics.jsonl")
    rates = [line["learning_rate"] for line in lines if "loss" in line]
    assert rates[:2] == pytest.approx([1.5e-3, 3e-3]), "two steps of 8 sequences"
    assert rates[-1] == pytest.approx(3e-4)


def test_an_overflow_is_left_out_and_the_scale_halved():
    batch, scale = [micro(rows(4), 0, 4, 0)], LossScale(scale=2.0**40)
    model, optimizer, collectives = fresh()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    losses = []
    for _ in range(60):
        result = train_step(model, optimizer, batch, collectives, virtual_ranks=2, clip_norm=1.0, precision="fp16",
                            loss_scale=scale)
        finite = torch.tensor(result.gradient_norm).isfinite().item()
        scale.update(bool(finite))
        if not finite:
            assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
        losses.append(result.loss)
    assert 1.0 <= scale.scale < 2.0**32, "far too large at first"
    assert losses[-1] < losses[0] - 0.5
    plain, other, _ = fresh()
    exact = train_step(plain, other, batch, collectives, virtual_ranks=2, clip_norm=1.0)
    assert losses[0] == pytest.approx(exact.loss, rel=1e-2)


def test_the_norm_does_not_depend_on_the_scale():
    batch = [micro(rows(4), 0, 4, 0)]
    model, optimizer, collectives = fresh()
    low = train_step(model, optimizer, batch, collectives, virtual_ranks=2, precision="fp16", loss_scale=LossScale())
    plain, other, _ = fresh()
    exact = train_step(plain, other, batch, collectives, virtual_ranks=2)
    assert low.gradient_norm == pytest.approx(exact.gradient_norm, rel=1e-2)
