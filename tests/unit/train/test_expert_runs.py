"""Runs of a mixture of experts: what they record, resume, withhold, and keep in checkpoints of any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.train.helpers import FileCheckpoints, Replaced, Script, config, write_shards
from tests.unit.train.parallel import layouts
from tests.unit.train.parallel.test_experts import MODEL
from tidewheel import jsonlog, storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.report.run import write_run_report
from tidewheel.train import parallel
from tidewheel.train.collectives import Collectives
from tidewheel.train.loop import train
from tidewheel.train.optim.build import build_optimizer, model_state, training_state
from tidewheel.train.precision import LossScale
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import train_step

SETTINGS = [f"model.{name}={value}" for name, value in {**MODEL, "ffn_dim": 32}.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    write_shards(folder / "shards")
    write_shards(folder / "validation", shards=1, rows=11, seed=1)
    run(folder, "whole")
    return folder


def run(folder: Path, name: str, generation: int = 0, **script: int) -> None:
    settings = config(folder, name, *SETTINGS)
    (folder / "runs").mkdir(exist_ok=True)
    checkpoints = FileCheckpoints(folder / "runs" / f"{name}.npz")
    train(settings, Runtime(generation=generation, checkpoints=checkpoints, control=Script(**script)))


def lines(folder: Path, name: str) -> dict[int, dict[str, Any]]:
    records = jsonlog.read(storage.store(folder / "runs" / name), "metrics.jsonl")
    return {record["step"]: record for record in records if "loss" in record}


def test_a_run_records_the_load_of_every_expert(folder: Path):
    for record in lines(folder, "whole").values():
        assert list(record["expert_tokens"]) == ["0", "1"]
        assert all(sum(counts) == 8 * 16 * 2 for counts in record["expert_tokens"].values())
        ratios = [max(counts) * 4 / sum(counts) for counts in record["expert_tokens"].values()]
        assert record["expert_load_max"] == pytest.approx(max(ratios))
        assert record["expert_load_mean_max"] == pytest.approx(sum(ratios) / 2)
        assert 0 < record["router_entropy"] <= 1.3863
        assert record["dropped_share"] == 0


def test_a_killed_run_continues_with_the_same_biases(folder: Path):
    with pytest.raises(Replaced):
        run(folder, "killed", die=5)
    run(folder, "killed", generation=1)
    assert {step: line["loss"] for step, line in lines(folder, "killed").items()} == {
        step: line["loss"] for step, line in lines(folder, "whole").items()}
    assert [line["expert_tokens"] for line in lines(folder, "killed").values()] == [
        line["expert_tokens"] for line in lines(folder, "whole").values()]


def test_the_report_shows_the_loads(folder: Path):
    page = storage.store(folder / "runs" / "whole")
    write_run_report(page.uri)
    text = page.read("report.html").decode()
    assert "Load of each expert" in text
    assert "layer 1, expert 3: " in text
    assert "Largest load of each layer over time" in text


def test_a_withheld_step_moves_no_bias():
    wanted = layouts.config({}, model=MODEL)
    model = parallel.build(wanted, layouts.VOCABULARY, Runtime())
    parallel.init_weights(model, seed=3)
    optimizer = build_optimizer(model, wanted.optimizer)
    for bad in (True, False):
        weight = next(parameter for name, parameter in model.named_parameters() if name == "output.weight")
        with torch.no_grad():
            weight[0, 0] = torch.nan if bad else 0.0
        result = train_step(model, optimizer, layouts.micro_batches(0), Collectives(Runtime()), virtual_ranks=4,
                            loss_scale=LossScale())
        assert (result.loss != result.loss) == bad
        assert all(bool(bias.any()) != bad for _, bias in model.named_buffers())


LAYOUTS: tuple[dict[str, Any], ...] = ({"pipeline": 2}, {"data": "zero3"}, {"tensor": 2})


def save_under_each_layout(folder: str) -> None:
    """Train two steps under each layout, save, and load into another layout."""
    runtime = Runtime(dist.get_rank(), dist.get_world_size())
    for number, layout in enumerate(LAYOUTS):
        wanted = layouts.config(layout, model=MODEL)
        model = parallel.build(wanted, layouts.VOCABULARY, runtime)
        parallel.init_weights(model, seed=3)
        optimizer = build_optimizer(model, wanted.optimizer)
        for step in range(2):
            train_step(model, optimizer, layouts.micro_batches(step, model.mesh.data_rank, model.mesh.data_size),
                       Collectives(runtime), virtual_ranks=4, clip_norm=0.5)
        uri = f"{folder}/{number}"
        CheckpointManager(storage.store(uri), asynchronous=False).save(2, training_state(model, optimizer), {"step": 2})
        other = parallel.build(layouts.config(LAYOUTS[number - 1], model=MODEL), layouts.VOCABULARY, runtime)
        CheckpointManager(storage.store(uri)).load_latest({"model": model_state(other)})
        assert all(bool(bias.any()) for _, bias in other.named_buffers())


def test_biases_are_in_checkpoints_of_every_layout(tmp_path: Path):
    on_ranks(2, save_under_each_layout, str(tmp_path))
    reference, _ = layouts.train(layouts.config({}, model=MODEL), 1, 2)
    for number, layout in enumerate(LAYOUTS):
        model = parallel.build(layouts.config({}, model=MODEL), layouts.VOCABULARY, Runtime())
        state = model_state(model)
        CheckpointManager(storage.store(tmp_path / str(number))).load_latest({"model": state})
        for name, value in model_state(reference).items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-4, msg=f"{layout}: {name}")
        assert len([name for name in state if name.endswith("selection_bias")]) == 2
