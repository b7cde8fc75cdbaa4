"""A whole workflow in this process: tokenizer, pipeline, two trainings, evaluation, export and a function, without Ray.

What each kind of step does is the real thing; only its work units and its workers run here instead of on a cluster.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest

import tidewheel as tw
from tests.plain_execution import without_ray
from tidewheel.demo.corpus import build_corpus
from tidewheel.elastic.trainer import fit_local
from tidewheel.lease import Holder, Leases
from tidewheel.storage import store
from tidewheel.workflow import workflow
from tidewheel.workflow.graph import Node
from tidewheel.workflow.launch import RayLauncher, execute
from tidewheel.workflow.records import Records
from tidewheel.workflow.schedule import Schedule


def size_of_model(output: str, model: str, run: str, unit: int = 1) -> dict[str, int]:
    """A function step that reads two steps and writes a file."""
    config = store(model).read_json("config.json")
    store(output).write_json("card.json", {"layers": config["num_hidden_layers"]})
    return {"layers": config["num_hidden_layers"] * unit, "steps": store(run).read_json("result.json")["steps"]}


class Here(RayLauncher):
    """Runs steps in this process, one after the other."""

    begun: list[str]

    def launch(self, node: Node, max_workers: int | None) -> dict[str, Any]:
        self.begun.append(node.name)
        return execute(self.task(node, max_workers), self._output, node.id)

    def places(self, node: Node, *, spare_cpus: float = 0) -> int | None:
        return None


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    build_corpus(store(folder), max_bytes=300_000)
    return folder


def flow(min_words: int = 50) -> tw.Workflow:
    tokenizer = tw.Tokenizer("bpe", "corpus/*.jsonl", vocabulary_size=512, sample_bytes=100_000)
    corpus = (tw.Pipeline("web").set(partitions=1).read("corpus/*.jsonl")
              .filter(tw.filters.gopher_quality(min_words=min_words))
              .tokenize(tokenizer).pack(sequence_length=64, validation_fraction=0.1))
    other = (tw.Pipeline("other").set(partitions=1, seed=1).read("corpus/*.jsonl").dedup_exact().tokenize(tokenizer)
             .pack(sequence_length=64, validation_fraction=0.1))
    settings = {"model": {"dim": 32, "num_layers": 1, "num_heads": 2}, "steps": 2, "reproducible": True,
                "evaluation": {"sample_tokens": 0, "sequences": 4},
                "batch": {"global_sequences": 2, "micro_sequences": 1, "virtual_ranks": 2}}
    first = tw.Train({**settings, "run": {"id": "first"}}, data=corpus)
    second = tw.Train({**settings, "run": {"id": "second"}, "data": {"mixture": {"domains": {
        "web": {"weight": 1}, "other": {"weight": 1}}}}}, data={"web": corpus, "other": other}, init_from=first)
    model = tw.Export("model", second)
    return tw.Workflow("all", tw.Evaluate("score", first, {"other": other}, sequences=4), model,
                       tw.Call("card", size_of_model, inputs={"model": model, "run": first}, unit=2))


def run(output, raw, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    """Records by step, and the steps that were run."""
    return run_here(flow(**changes), output, raw)


def run_here(of: tw.Workflow, output, raw) -> tuple[dict[str, Any], list[str]]:
    """Run a workflow in this process; return records by step, and the steps that were run."""
    spec = of.spec(str(output), str(raw))
    nodes, records = workflow.nodes_of(spec), Records(str(output))
    launcher = Here(nodes, input=str(raw), output=str(output))
    launcher.begun = []
    leases = Leases(records.store.child("leases"), Holder.me())
    one_at_a_time = patch("tidewheel.workflow.schedule.ThreadPoolExecutor",
                          lambda count, **more: ThreadPoolExecutor(1, **more))
    with without_ray(), patch("tidewheel.elastic.trainer.fit", fit_local), one_at_a_time:
        done = Schedule(nodes, records, leases, launcher, say=lambda text: None).run()
    return done, launcher.begun


def test_every_kind_of_step_and_then_nothing(raw, tmp_path):
    done, begun = run(tmp_path, raw)
    assert sorted(begun) == ["bpe", "card", "first", "model", "other", "score", "second", "web"]
    assert done["card"].artifact["value"] == {"layers": 2, "steps": 2}
    assert done["score"].artifact["step"] == 2
    scores = json.loads(store(tmp_path).read(done["score"].place.removeprefix(f"{tmp_path}/")))
    assert set(scores["sets"]) == {"other"}
    assert store(done["second"].place).read_json("run.json")["config"]["model"]["init_from"] == done["first"].place
    assert done["first"].artifact["state"] != done["second"].artifact["state"]
    assert {row["state"] for row in flow().status(str(tmp_path), input=str(raw))} == {"published"}
    result = flow().run(str(tmp_path), input=str(raw), address="127.0.0.1:1")  # nothing to do: no cluster is needed
    assert result.runs["first"].steps == 2
    assert result.pipelines["web"].tokens > 0
    assert result.hashes == {name: record.artifact["hash"] for name, record in done.items()}

    elsewhere, _ = run(tmp_path / "again", raw)  # the same artifacts, wherever and whenever
    same = {name for name, record in done.items() if elsewhere[name].artifact["hash"] == record.artifact["hash"]}
    assert same == set(done)

    store(done["web"].place).delete("shards/manifest.json")
    _, begun = run(tmp_path, raw)
    assert begun == ["web"]  # what is gone is made again, with the same key: nothing behind it changes
    _, begun = run(tmp_path, raw, min_words=51)
    assert sorted(begun) == ["card", "first", "model", "score", "second", "web"]
    stated = {item.node.name: item.why for item in flow(min_words=52).plan(str(tmp_path), input=str(raw))}
    assert stated["web"] == "changed: steps.0.filter.gopher_quality.min_words"
    assert stated["first"] == "reads the new web"
    assert stated["bpe"] == stated["other"] == "nothing has changed"
