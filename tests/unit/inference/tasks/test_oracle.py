"""Tests that tasks have the prompts, log-likelihoods, texts and figures of lm-evaluation-harness.

Its own `hf` model evaluates the exported folder, and our class drives the run through it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from tests.unit.inference.tasks.models import ITEMS, TASKS, WRITTEN, write_adapter, write_model, write_run, write_task
from tidewheel.cli import run_command
from tidewheel.errors import ConfigError
from tidewheel.inference import lm_eval_model
from tidewheel.inference.scorer import open_scorer
from tidewheel.inference.tasks.evaluation import Options, TaskResult, evaluate

MODELS = ("hf", lm_eval_model.NAME)


class Oracle:
    """A model, its run, tasks, and what lm-evaluation-harness finds with each of `MODELS`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_model(folder / "model")
        self.run = write_run(folder / "run", self.model)
        self.scorer = open_scorer(self.run, device="cpu")
        self.files = [write_task(folder / "tasks", name, settings) for name, settings in TASKS.items()
                      if name != "written"]
        # the right answers of some items are what the model writes, so that not every item is wrong
        [first] = self.ours([write_task(folder / "tasks", "written", WRITTEN)], "first")
        texts = [line["answers"][0] for line in lines(folder / "first", first)]
        items = [{**item, "answer": "nothing" if number % 2 else re.findall(r"\w+|$", text)[0].upper()}
                 for number, (item, text) in enumerate(zip(ITEMS, texts))]
        self.files.append(write_task(folder / "tasks", "written", WRITTEN, items))
        self.manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)

    def theirs(self, model: str, tasks: list[str], *, peft: str = "", **settings: Any) -> dict[str, Any]:
        """Return the results and samples of lm-evaluation-harness."""
        arguments = {"pretrained": str(self.model), "dtype": "float32"} if model == "hf" else {"run": self.run}
        if peft:
            arguments["peft" if model == "hf" else "adapter"] = peft
        return lm_eval.simple_evaluate(model=model, model_args=arguments, tasks=tasks, task_manager=self.manager,
                                       log_samples=True, device="cpu", batch_size=8, bootstrap_iters=2, **settings)

    def ours(self, files: list[str], name: str, **settings: Any) -> list[TaskResult]:
        """Return our results."""
        return evaluate(self.scorer, Options(tuple(files), **settings), str(self.folder / name))


def lines(output: Path, result: TaskResult) -> list[dict[str, Any]]:
    units = json.loads(Path(result.uri).read_text())["units"]
    return [json.loads(line) for unit in units
            for line in (output / f"stages/tasks/units/{unit}/answers.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("DISABLE_MULTIPROC", "1")
        yield Oracle(tmp_path_factory.mktemp("oracle"))


def compare(output: Path, results: list[TaskResult], theirs: dict[str, Any]) -> None:
    """Assert that all prompts, answers and figures are equal."""
    for result in results:
        samples = {sample["doc_id"]: sample for sample in theirs["samples"][result.task]}
        for line in lines(output, result):
            sample = samples[line["item"]]
            given = [tuple(arguments) for arguments in sample["arguments"]]
            for request, answer, arguments, (their, *_) in zip(line["requests"], line["answers"], given,
                                                               sample["resps"], strict=True):
                if "continuation" in request:
                    assert (request["context"], request["continuation"]) == arguments
                    assert answer["log_likelihood"] == pytest.approx(their[0], abs=1e-4)
                    assert answer["greedy"] == their[1]
                elif "text" in request:
                    assert request["text"] == arguments[0]
                    assert answer["log_likelihood"] == pytest.approx(their, abs=1e-4)
                else:
                    assert (request["prompt"], answer) == (arguments[0], their)
        for figure in result.figures:
            key = f"{figure.metric},{figure.filter}"
            assert figure.value == pytest.approx(theirs["results"][result.task][key], rel=1e-5)
            if figure.stderr is not None and figure.metric != "perplexity":  # theirs of a perplexity is a bootstrap
                assert figure.stderr == pytest.approx(
                    theirs["results"][result.task][f"{figure.metric}_stderr,{figure.filter}"], rel=1e-9)


def test_all_output_types_are_those_of_the_harness(oracle: Oracle):
    results = oracle.ours(oracle.files, "plain")
    for model in MODELS:
        compare(oracle.folder / "plain", results, oracle.theirs(model, list(TASKS)))
    written = next(result for result in results if result.task == "written")
    assert any(0 < figure.value < 1 for figure in written.figures)


def test_chat_prompts_are_those_of_the_harness(oracle: Oracle):
    names = ["letters", "written"]
    files = [file for file in oracle.files if Path(file).stem in names]
    results = oracle.ours(files, "chat", chat=True, num_fewshot=1)
    for model in MODELS:
        compare(oracle.folder / "chat", results, oracle.theirs(
            model, names, apply_chat_template=True, fewshot_as_multiturn=True, num_fewshot=1))


def test_an_adapter_answers_as_in_the_harness(oracle: Oracle, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("peft")
    adapter = write_adapter(oracle.folder / "peft", oracle.model)
    scorer = open_scorer(str(oracle.model), device="cpu", adapters={"tuned": adapter})
    names = ["choices", "written"]
    files = [file for file in oracle.files if Path(file).stem in names]
    results = {name: evaluate(scorer.of(name), Options(tuple(files)), str(oracle.folder / "adapters"))
               for name in ("", "tuned")}
    assert [result.answered for result in results["tuned"]] == [len(ITEMS)] * 2  # answers of the base are not taken
    for model in MODELS:
        compare(oracle.folder / "adapters", results["tuned"], oracle.theirs(model, names, peft=adapter))
    assert [result.figures for result in results[""]] != [result.figures for result in results["tuned"]]
    assert run_command(["evaluate", str(oracle.model), "--adapter", f"tuned={adapter}", "--tasks", *files,
                        "--output", f"{oracle.folder}/adapters", "--device", "cpu", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    for name, tasks in (("", shown["tasks"]), ("tuned", shown["adapters"]["tuned"])):
        for result in results[name]:
            assert tasks[result.task]["answered"] == 0
            assert {figure.name: figure.value for figure in result.figures} == {
                key: value["value"] for key, value in tasks[result.task].items() if isinstance(value, dict)}


def test_the_command_hands_over_to_the_harness(oracle: Oracle, capsys: pytest.CaptureFixture[str],
                                               monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["tidewheel"])
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda *_, **__: oracle.manager)
    assert run_command(["lm-eval", "run", "--model", "tidewheel", "--model_args", f"run={oracle.run}", "--tasks",
                        "last", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "tidewheel" in shown
    assert "perplexity" in shown


def test_settings_that_our_class_does_not_have_are_refused(oracle: Oracle):
    with pytest.raises(ConfigError, match="no precision"):
        lm_eval_model.TidewheelLM(oracle.run, precision="int3")
    with pytest.raises(ConfigError, match="num_beams"):
        lm_eval_model._generate("a", {"num_beams": 3}, 0)
