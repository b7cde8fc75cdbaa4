"""Tests of evaluation tasks during training: figures for every layout, no trace in the training, and the report."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.unit.inference.tasks.models import write_task
from tests.unit.train.helpers import config, write_shards
from tidewheel import jsonlog
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import ConfigError, InputError
from tidewheel.inference import during_training
from tidewheel.inference.scorer import open_scorer
from tidewheel.inference.tasks.evaluation import Options, evaluate
from tidewheel.report.run import write_run_report
from tidewheel.storage import store
from tidewheel.train.loop import train
from tidewheel.train.metrics.scalars import scalars
from tidewheel.train.runtime import Runtime

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ITEMS = [{"text": LETTERS[number:number + 3], "options": [LETTERS[number + 3], LETTERS[number + 6] + "x", "qq"],
          "label": 0, "answer": LETTERS[number + 6]} for number in range(9)]
CHOICES: dict[str, Any] = {"output_type": "multiple_choice", "doc_to_text": "text", "doc_to_choice": "options",
                           "doc_to_target": "label", "target_delimiter": "", "num_fewshot": 1,
                           "fewshot_delimiter": " "}
WRITTEN: dict[str, Any] = {"doc_to_text": "text", "doc_to_target": "answer",
                           "generation_kwargs": {"max_gen_toks": 2, "until": ["z"]}}


def task_files(folder: Path) -> list[str]:
    return [write_task(folder / "tasks", "choices", CHOICES, ITEMS), write_task(folder / "tasks", "written", WRITTEN,
                                                                                ITEMS)]


def recorded(uri: str) -> dict[int, dict[str, Any]]:
    lines = [line for line in jsonlog.read(store(uri), "metrics.jsonl") if "tasks" in line]
    assert len({line["step"] for line in lines}) == len(lines), "each step once"
    return {line["step"]: line["tasks"] for line in lines}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_shards(folder / "shards")
    return folder


def settings(folder: Path, run: str, *more: str) -> Any:
    return config(folder, run, "data.validation=''", "evaluation.sample_tokens=0", "steps=6", *more)


def asking(files: list[str]) -> list[str]:
    return [f"evaluation.tasks.files={json.dumps(files)}", "evaluation.tasks.every_steps=2", "checkpoint.every_steps=2"]


def test_tasks_leave_no_trace_in_the_training(folder: Path):
    files = task_files(folder)
    plain, watched = settings(folder, "plain"), settings(folder, "watched", *asking(files))
    after = []
    for run in (plain, watched):
        torch.manual_seed(5)
        random.seed(5)
        fit_local(run)
        after.append((torch.get_rng_state().tolist(), random.getstate()))
    assert after[0] == after[1]
    assert digest(watched.run_uri).state == digest(plain.run_uri).state
    assert watched.recipe_hash() == plain.recipe_hash()
    curves = recorded(watched.run_uri)
    assert sorted(curves) == [2, 4, 6]
    # afterwards the checkpoint has the same figures
    results = evaluate(open_scorer(watched.run_uri, device="cpu"), Options(tuple(files)), str(folder / "after"))
    for result in results:
        for figure in result.figures:
            assert curves[6][result.task][figure.name] == pytest.approx(figure.value)
            assert curves[6][result.task][f"{figure.name}_stderr"] == pytest.approx(figure.stderr)
    [line] = [line for line in jsonlog.read(store(watched.run_uri), "metrics.jsonl")
              if "tasks" in line and line["step"] == 4]
    assert scalars(line)["tasks/choices/acc"] == curves[4]["choices"]["acc"]
    page = Path(write_run_report(watched.run_uri)).read_text()
    assert "metrics of evaluation tasks by step" in page
    assert "choices acc_norm" in page


def layouts(folder: Path, files: list[str]) -> None:
    """Train under FSDP and under tensor parallelism; two ranks call it."""
    for name, layout in LAYOUTS.items():
        run = settings(folder, name, *asking(files), *layout)
        train(run, Runtime(dist.get_rank(), 2, tasks=during_training.task_scores))


LAYOUTS = {"fsdp": ["parallel.data=zero3"], "tensor": ["parallel.tensor=2"]}


@pytest.mark.long
def test_every_layout_gives_the_same_figures(folder: Path):
    files = task_files(folder)
    single = settings(folder, "single", *asking(files))
    train(single, Runtime(tasks=during_training.task_scores))
    on_ranks(2, layouts, folder, files)
    expected = recorded(single.run_uri)
    for name in LAYOUTS:
        found = recorded(settings(folder, name).run_uri)
        assert sorted(found) == [2, 4, 6]
        for step, tasks in expected.items():
            for task, figures in tasks.items():
                assert found[step][task] == pytest.approx(figures), (name, step, task)


def test_a_run_that_ends_before_its_evaluation_makes_it_up_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    run = settings(folder, "ended", *asking(task_files(folder)))
    asked: list[int] = []

    def breaks_at_second(*arguments: Any) -> Any:
        asked.append(1)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return scores(*arguments)

    scores = during_training.task_scores
    monkeypatch.setattr(during_training, "task_scores", breaks_at_second)
    with pytest.raises(KeyboardInterrupt):
        fit_local(run)
    assert sorted(recorded(run.run_uri)) == [2]
    fit_local(run)
    assert sorted(recorded(run.run_uri)) == [2, 4, 6]
    assert len(asked) == 4, "step 4 was broken off and made up, 2 is not repeated"


def test_tasks_that_cannot_be_asked_are_refused_before_a_step(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="files is empty"):
        settings(folder, "x", "evaluation.tasks.every_steps=2")
    with pytest.raises(ConfigError, match="did you mean 'every_steps'"):
        settings(folder, "x", "evaluation.tasks.every_step=2")
    broken = write_task(tmp_path, "broken", {**CHOICES, "doc_to_text": "{{texxt}}"}, ITEMS)
    for files, error in (([str(tmp_path / "none.yaml")], ConfigError), ([broken], InputError)):
        run = settings(folder, "refused", *asking(files))
        with pytest.raises(error):
            fit_local(run)
        assert not store(run.run_uri).exists("metrics.jsonl")
