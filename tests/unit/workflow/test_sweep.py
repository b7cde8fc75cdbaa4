"""A sweep is a grid of trainings and a law that is fitted to their results."""

from __future__ import annotations

import pytest

import tidewheel as tw
from tests.unit.plan.test_scaling import TRUE, runs
from tests.unit.workflow.test_run import raw as raw
from tests.unit.workflow.test_run import run_here
from tidewheel.errors import ConfigError
from tidewheel.plan.scaling.budget import read_law
from tidewheel.storage import join, store
from tidewheel.workflow.kinds import KINDS
from tidewheel.workflow.step_kind import Task

SIZES = [{"model": {"dim": 32 * size}, "optimizer": {"learning_rate": 0.01 / size}} for size in (1, 2, 3)]


def law(**changes) -> tw.ScalingLaw:
    return tw.sweep("law", {"model": {"num_layers": 2}}, "data/web", sizes=SIZES, steps=[10, 20], precision="fp32",
                    **changes)


def test_a_grid_of_trainings(tmp_path):
    configs = [run.resolve() for run in law().runs]
    assert [config.run.id for config in configs] == [f"law-{size}-{steps}" for size in range(3) for steps in (10, 20)]
    assert [(config.model.dim, config.model.num_layers, config.steps) for config in configs[:3]] == [
        (32, 2, 10), (32, 2, 20), (64, 2, 10)]
    assert configs[-1].optimizer.learning_rate == pytest.approx(0.01 / 3)
    nodes = tw.Workflow("scaling", law()).nodes(str(tmp_path))
    assert [node.kind for node in nodes] == ["train"] * 6 + ["scaling_law"]
    again = tw.Workflow("scaling", law(confidence=0.8)).nodes(str(tmp_path))
    assert [a.key == b.key for a, b in zip(nodes, again)] == [True] * 6 + [False]


@pytest.mark.parametrize(("changes", "message"), [({"confidence": 1.5}, "between 0 and 1"), ({"resamples": 3},
                                                                                             "100 or more")])
def test_wrong_settings(changes: dict, message: str, tmp_path):
    with pytest.raises(ConfigError, match=message):
        tw.Workflow("scaling", law(**changes)).nodes(str(tmp_path))


def task(tmp_path, validation: bool = True) -> Task:
    """A law over finished runs, whose losses are those of a known law."""
    needs = {}
    for index, run in enumerate(runs(2, 0.002)):
        folder = tmp_path / f"run-{index}"
        needs[f"run.{index}"] = str(folder)
        store(folder).write_json("run.json", {"id": f"run-{index}", "parameters": run.parameters})
        store(folder).write_json("result.json", {"tokens": run.tokens,
                                                 "validation_loss": run.loss if validation else None})
    entry = {**law().entry(), "inputs": {role: role for role in needs}}
    return Task(entry, str(tmp_path / "law"), "key", str(tmp_path), needs)


def test_the_law_of_finished_runs(tmp_path):
    step, lines = task(tmp_path), []
    artifact = KINDS["scaling_law"].run(step, lines.append)
    found = read_law(join(step.place, "law.json")).law
    assert (found.alpha, found.beta, found.e) == pytest.approx((TRUE.alpha, TRUE.beta, TRUE.e), rel=0.1)
    value, low, high = artifact["intervals"]["alpha"]
    assert low <= value <= high
    assert b"<svg" in store(step.place).read("report.html")
    assert "alpha" in lines[0]
    assert KINDS["scaling_law"].intact(step.place, artifact)
    store(step.place).write("law.json", b"{}")
    assert not KINDS["scaling_law"].intact(step.place, artifact)


def test_runs_without_a_validation_set_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no validation loss"):
        KINDS["scaling_law"].run(task(tmp_path, validation=False), print)


@pytest.mark.long
def test_a_sweep_from_raw_text(raw, tmp_path):
    """Nine trainings on the demo's text, and the law of their losses, by the workflow's own schedule."""
    tokenizer = tw.Tokenizer("bpe", "corpus/*.jsonl", vocabulary_size=512, sample_bytes=100_000)
    corpus = (tw.Pipeline("web").set(partitions=1).read("corpus/*.jsonl").tokenize(tokenizer)
              .pack(sequence_length=64, validation_fraction=0.1))
    settings = {"model": {"num_layers": 2, "num_heads": 2}, "schedule": {"warmup_steps": 5},
                "evaluation": {"sample_tokens": 0, "sequences": 64},
                "batch": {"global_sequences": 16, "micro_sequences": 16, "virtual_ranks": 1}}
    swept = tw.sweep("law", settings, corpus, steps=[40, 80, 160], sizes=[
        {"model": {"dim": dim}, "optimizer": {"learning_rate": 0.3 / dim}} for dim in (16, 32, 64)])
    flow = tw.Workflow("scaling", swept)
    done, _ = run_here(flow, tmp_path, raw)
    artifact = done["law"].artifact
    assert len(store(done["law"].place).read_json("law.json")["runs"]) == 9
    assert artifact["law"]["alpha"] > 0
    assert artifact["law"]["beta"] > 0
    result = flow.run(str(tmp_path), input=str(raw), address="127.0.0.1:1")  # nothing to do: no cluster is needed
    assert result.laws["law"].beta == pytest.approx(artifact["law"]["beta"])
