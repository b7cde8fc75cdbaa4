"""Tests of averages of the parameters: their values, evaluation, checkpoints, resharding and export."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import on_ranks
from tests.unit.train.helpers import config, write_shards
from tests.unit.train.test_continuing import events, lines, losses, train_here
from tidewheel.checkpoint.conversion import export, import_
from tidewheel.checkpoint.digest import digest
from tidewheel.cli import run_command
from tidewheel.config import build
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import CheckpointError, ConfigError
from tidewheel.plan.layout import Job
from tidewheel.train.averages import named
from tidewheel.train.callbacks import EMA, LAWA
from tidewheel.train.config import TrainConfig

BASE = ("evaluation.sample_tokens=0", "evaluation.every_steps=4", "reproducible=true", "metrics.every_steps=1",
        "checkpoint.every_steps=1", "checkpoint.keep_last=99", "schedule.warmup_steps=1",
        "optimizer.learning_rate=0.02")
AVERAGES = ("callbacks=[{kind: ema, decay: 0.5, start_step: 1}, {kind: lawa, every_steps: 2, window: 3}, {kind: ema, "
            "decay: 0}]")
NAME = "blocks.0.ffn.w1.weight"


class Of_Mine(EMA):
    """An average whose name has an underscore, as that of an entry point may."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with shards and the run "whole" of 8 steps that keeps three averages."""
    folder = tmp_path_factory.mktemp("averages")
    write_shards(folder / "shards")
    write_shards(folder / "validation", shards=1, rows=11, seed=1)
    fit_local(config(folder, "whole", *BASE, AVERAGES))
    return folder


def tensors(folder: Path, run: str, step: int) -> dict[str, torch.Tensor]:
    [file] = (folder / "runs" / run / "checkpoints" / f"step_{step:08d}").glob("*.safetensors")
    return {name.split("@")[0]: value for name, value in load_file(file).items()}


def test_the_averages_are_those_of_their_formulas(folder: Path):
    steps = {step: tensors(folder, "whole", step) for step in range(1, 9)}
    weights = {step: held[f"model/{NAME}"].double() for step, held in steps.items()}
    ema = weights[2]
    for number, step in enumerate(range(3, 9), start=1):
        decay = min(0.5, (1 + number) / (10 + number))
        ema = decay * ema + (1 - decay) * weights[step]
    torch.testing.assert_close(steps[8][f"average/ema/{NAME}"].double(), ema, rtol=1e-6, atol=1e-7)
    latest = (weights[4] + weights[6] + weights[8]) / 3
    torch.testing.assert_close(steps[8][f"average/lawa/{NAME}"].double(), latest, rtol=1e-6, atol=1e-7)
    assert torch.equal(steps[3][f"average/lawa/{NAME}"], steps[2][f"model/{NAME}"]), "the mean of one"
    assert torch.equal(steps[5][f"average/ema_2/{NAME}"], steps[5][f"model/{NAME}"]), "of decay 0"


def test_averages_are_evaluated_beside_the_weights_and_change_nothing(folder: Path):
    fit_local(config(folder, "plain", *BASE))
    assert losses(folder, "plain") == losses(folder, "whole")
    whole, plain = (digest(str(folder / "runs" / run)).groups for run in ("whole", "plain"))
    assert {name: whole[name] for name in plain} == plain
    evaluated = [line for line in lines(folder, "whole", "metrics.jsonl") if "validation" in line]
    assert [line["step"] for line in evaluated] == [4, 8]
    for line in evaluated:
        assert set(line["validation"]) == {"", "ema", "lawa", "ema_2"}
        assert line["validation"]["ema_2"] == line["validation"][""], "of decay 0"
        assert len({line["validation_loss"], line["average_losses"]["ema"], line["average_losses"]["lawa"]}) == 3


def test_an_exported_average_has_the_loss_that_was_measured(folder: Path):
    exported = ["checkpoint", "export", str(folder / "runs/whole"), str(folder / "hf"), "--average", "ema"]
    assert run_command(exported) == 0
    import_(str(folder / "hf"), str(folder / "runs/imported"))
    fit_local(config(folder, "again", *BASE, f"model.init_from={folder}/runs/imported", "steps=1",
                     "optimizer.learning_rate=1e-30"))
    again = lines(folder, "again", "metrics.jsonl")[-1]["validation_loss"]
    line = [line for line in lines(folder, "whole", "metrics.jsonl") if "average_losses" in line][-1]
    assert again == pytest.approx(line["average_losses"]["ema"], rel=1e-6)
    with pytest.raises(CheckpointError, match=r"(?s)no average 'swa'.*ema, ema_2, lawa"):
        export(str(folder / "runs/whole"), str(folder / "none"), average="swa")


def half(settings: TrainConfig) -> None:
    train_here(settings.model_copy(update={"steps": 4}))


@pytest.mark.long
def test_any_number_of_workers_keeps_the_same_bits(folder: Path):
    """Two ranks with sharded parameters train half of the run, one process the rest."""
    both = (*BASE, AVERAGES, "schedule.kind=constant", "checkpoint.every_steps=4")
    fit_local(config(folder, "alone", *both))
    on_ranks(2, half, config(folder, "sharded", *both, "parallel.data=zero3"))
    train_here(config(folder, "sharded", *both, "parallel.data=zero3"))
    alone, sharded = (digest(str(folder / "runs" / run)).groups for run in ("alone", "sharded"))
    assert "average" in alone
    assert sharded == alone
    found = [[line["validation"] for line in lines(folder, run, "metrics.jsonl") if "validation" in line][-1]
             for run in ("sharded", "alone")]
    assert found[0] == found[1]


def test_a_run_may_begin_to_average_later_and_stop_to(folder: Path):
    later = (*BASE, "schedule.kind=constant")
    fit_local(config(folder, "later", *later, "steps=4"))
    fit_local(config(folder, "later", *later, "steps=6", "callbacks=[lawa, ema]"))
    assert [event["averages"] for event in events(folder, "later", "average_began")] == [["lawa", "ema"]]
    fit_local(config(folder, "later", *later, "steps=8", "callbacks=[{kind: ema, decay: 0.9}]"))
    assert events(folder, "later", "average_began")[-1] == {"step": 6, "averages": ["ema"]}, "another decay"
    fit_local(config(folder, "later", *later, "steps=9"))
    assert set(digest(str(folder / "runs/later")).groups) == {"model", "optimizer"}


def test_averages_have_names_bytes_and_a_process_that_evaluates_them():
    assert list(named((EMA(), LAWA(), EMA(decay=0.9)))) == ["ema", "lawa", "ema_2"]
    assert list(named((Of_Mine(), Of_Mine(decay=0.9)))) == ["of_mine", "of_mine_2"]
    settings = build(TrainConfig, {"callbacks": ["ema", {"kind": "lawa", "window": 3}]})
    assert Job(settings, 128, 16).optimizer_bytes == 8 + 4 + 16
    with pytest.raises(ConfigError, match=r"nearest legal choice: evaluation\.separate false"):
        build(TrainConfig, {"callbacks": ["ema"], "evaluation": {"separate": True, "every_steps": 4}})
