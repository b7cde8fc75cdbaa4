"""Keys: what changes reaches exactly the steps behind it, and nothing that does not decide a result changes a key."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import tidewheel as tw
from tidewheel.data.filter import FILTERS
from tidewheel.data.filters.gopher_quality import GopherQuality
from tidewheel.errors import ConfigError, InputError
from tidewheel.parts import Kind
from tidewheel.workflow import graph
from tidewheel.workflow.data_kinds import PipelineKind
from tidewheel.workflow.kinds import KINDS
from tidewheel.workflow.launch import RayLauncher
from tidewheel.workflow.plan import rows
from tidewheel.workflow.records import Records
from tidewheel.workflow.step_kind import Task

MODEL = {"dim": 32, "num_layers": 1, "num_heads": 2}


def count_words(output: str, run: str, least: int = 1) -> dict[str, int]:
    """A function step."""
    return {"words": least}


def flow(words: int = 10, steps: int = 4, least: int = 1, workers: int = 2) -> tw.Workflow:
    """One corpus, two trainings that share it, and what hangs on each."""
    tokenizer = tw.Tokenizer("bpe", "raw/*.jsonl", vocabulary_size=512)
    corpus = (tw.Pipeline("web").read("raw/*.jsonl").filter(tw.filters.gopher_quality(min_words=words))
              .tokenize(tokenizer).pack(sequence_length=64))
    other = tw.Pipeline("code").read("raw/*.jsonl").tokenize(tokenizer).pack(sequence_length=64)
    small, large = (tw.Train({"run": {"id": name}, "model": MODEL, "steps": count,
                              "elastic": {"max_workers": workers}}, data=corpus)
                    for name, count in (("small", 4), ("large", steps)))
    mixed = tw.Train({"run": {"id": "mixed"}, "model": MODEL, "data": {"mixture": {"domains": {
        "web": {"weight": 1}, "code": {"weight": 1}}}}}, data={"web": corpus, "code": other}, init_from=small)
    return tw.Workflow("first", small, large, mixed, tw.Evaluate("score", small, {"code": other}),
                       tw.Export("model", large), tw.Call("count", count_words, inputs={"run": small}, least=least))


@pytest.fixture
def raw(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.jsonl").write_text('{"text": "one"}\n')
    return tmp_path


def keys(workflow: tw.Workflow, raw) -> dict[str, str]:
    return {node.name: node.key for node in workflow.nodes(str(raw / "out"), input=str(raw))}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


def test_every_step_once_and_after_what_it_reads(raw):
    nodes = flow().nodes(str(raw / "out"), input=str(raw))
    names = [node.name for node in nodes]
    assert sorted(names) == sorted(["bpe", "web", "code", "small", "large", "mixed", "score", "model", "count"])
    for node in nodes:
        assert all(names.index(need) < names.index(node.name) for need in node.needs.values())
        assert node.key in node.place
        assert node.place.startswith(str(raw / "out"))
    assert {node.name: dict(node.needs) for node in nodes}["mixed"] == {"init": "small", "data.web": "web",
                                                                       "data.code": "code"}


@pytest.mark.parametrize(("changes", "reached"), [
    ({"words": 11}, {"web", "small", "large", "mixed", "score", "model", "count"}),  # not code, nor the tokenizer
    ({"steps": 5}, {"large", "model"}),
    ({"least": 2}, {"count"}),
    ({"workers": 8}, set()),  # the run does not depend on the cluster
])
def test_a_change_reaches_what_depends_on_it(raw, changes, reached):
    assert changed(keys(flow(), raw), keys(flow(**changes), raw)) == reached


@pytest.mark.parametrize(("kind", "reached"), [
    ("gopher_quality", {"web", "small", "large", "mixed", "score", "model", "count"}),  # not code, which has no filter
    ("c4", set()),  # no recipe here uses it
])
def test_a_raised_version_reaches_what_uses_the_part(raw, monkeypatch, kind, reached):
    before = keys(flow(), raw)
    part = FILTERS.find(kind)
    monkeypatch.setattr(part, "VERSION", replace(part.VERSION, number=2))
    assert changed(before, keys(flow(), raw)) == reached


def test_a_filter_that_is_added_or_a_default_that_is_spelled_out_changes_no_key(raw, monkeypatch):
    before = keys(flow(words=50), raw)
    built_in = Kind.built_in
    monkeypatch.setattr(Kind, "built_in", lambda kind: (*built_in(kind), "new") if kind is FILTERS else built_in(kind))
    assert GopherQuality().min_words == 50
    plain = flow(words=50).nodes(str(raw / "out"), input=str(raw))
    assert {node.name: node.key for node in plain} == before
    assert "min_words" not in json.dumps(next(node.recipe for node in plain if node.name == "web"))


def test_other_input_and_other_places(raw, tmp_path):
    before = keys(flow(), raw)
    moved = {node.name: node.key for node in flow().nodes("s3://bucket/out", input=str(raw))}
    assert moved == before
    (raw / "raw/a.jsonl").write_text('{"text": "two"}\n')
    assert changed(before, keys(flow(), raw)) == set(before)


def test_the_spec_survives_json_and_gives_the_same_graph(raw):
    spec = json.loads(json.dumps(flow().spec(str(raw / "out"), str(raw))))
    again = graph.resolve(spec["steps"], output=spec["output"], input=spec["input"])
    assert {node.name: node.key for node in again} == keys(flow(), raw)


def test_damaged_specs_are_refused(raw):
    steps = flow().spec(str(raw / "out"), str(raw))["steps"]
    with pytest.raises(ConfigError, match="does not come before it"):
        graph.resolve(steps[::-1], output="/o", input=str(raw))
    with pytest.raises(ConfigError, match="unknown kind"):
        graph.resolve([{**steps[0], "kind": "magic"}], output="/o", input=str(raw))


def test_missing_input_is_told_before_anything_starts(tmp_path):
    with pytest.raises(InputError, match="no file matches"):
        flow().nodes(str(tmp_path / "out"), input=str(tmp_path))


def test_one_name_for_two_steps(raw):
    twice = tw.Workflow("w", tw.Tokenizer("a", "raw/*", vocabulary_size=300), tw.Tokenizer("a", "raw/*"))
    with pytest.raises(ConfigError, match="two different steps"):
        twice.nodes(str(raw / "out"), input=str(raw))


def test_trainings_read_what_their_steps_made(raw):
    nodes = {node.name: node for node in flow().nodes(str(raw / "out"), input=str(raw))}
    launcher = RayLauncher(list(nodes.values()), input=str(raw), output=str(raw / "out"))
    config = KINDS["train"].config(launcher.task(nodes["small"], 1))
    assert config.data.uri == nodes["web"].place + "/shards"
    assert config.data.validation == nodes["web"].place + "/validation"
    assert config.run_uri == nodes["small"].place
    assert config.elastic.max_workers == 1
    mixed = KINDS["train"].config(launcher.task(nodes["mixed"], None))
    assert mixed.model.init_from == nodes["small"].place
    assert {name: domain.shards for name, domain in mixed.data.mixture.domains.items()} == {
        "web": nodes["web"].place + "/shards", "code": nodes["code"].place + "/shards"}
    assert mixed.elastic.max_workers == 1


def test_functions_are_imported_by_name_and_return_json(tmp_path):
    entry = tw.Call("count", count_words, least=3).entry()
    made = KINDS["function"].run(Task(entry, str(tmp_path), "k", ".", {"run": "r"}), print)
    assert made["value"] == {"words": 3}
    assert KINDS["function"].intact(str(tmp_path), made)
    (tmp_path / "new").write_text("x")
    assert not KINDS["function"].intact(str(tmp_path), made)
    with pytest.raises(ConfigError, match="not JSON"):
        KINDS["function"].run(Task(entry, str(tmp_path), "k", ".", function=lambda **_: {1, 2}), print)
    with pytest.raises(ConfigError, match="cannot be imported"):
        KINDS["function"].run(Task({**entry, "function": "nowhere:f"}, str(tmp_path), "k", "."), print)


def test_a_function_with_another_source_on_the_cluster_is_refused(tmp_path):
    entry = tw.Call("count", count_words, least=3).entry()
    submitted = {**entry, "code": "0123456789abcdef"}
    for handed in (None, count_words):  # by its name in the entry, or by a pickle that only holds the name
        with pytest.raises(ConfigError) as refused:
            KINDS["function"].run(Task(submitted, str(tmp_path), "k", ".", {"run": "r"}, function=handed), print)
        message = str(refused.value)
        assert all(part in message for part in (entry["function"], entry["code"], "0123456789abcdef", "working_dir"))
    assert not list(tmp_path.iterdir())
    scope: dict[str, object] = {"__name__": "flow"}
    exec("def made_elsewhere(output, least): return least", scope)  # pickled with its code
    made = KINDS["function"].run(Task(submitted, str(tmp_path), "k", ".", function=scope["made_elsewhere"]), print)
    assert made["value"] == 3


def test_a_function_without_a_source_is_refused_where_it_is_given():
    with pytest.raises(ConfigError, match="source of the function is not known"):
        tw.Call("length", len).entry()


def test_the_plan_says_what_would_run_and_why(raw, monkeypatch):
    monkeypatch.setattr(PipelineKind, "intact", lambda self, place, artifact: True)
    out, records = str(raw / "out"), Records(str(raw / "out"))
    first = flow().plan(out, input=str(raw))
    assert {item.why for item in first} == {"it is new"}
    tokenizer, web = (next(item.node for item in first if item.node.name == name) for name in ("bpe", "web"))
    folder = raw / "out/tokenizers" / tokenizer.id
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    records.publish(tokenizer, {}, {"hash": records.store.hash(f"tokenizers/{tokenizer.id}/tokenizer.json")}, 1.0)
    records.publish(web, {"tokenizer": tokenizer.key}, {"hash": "h"}, 30.0)
    results = {item.node.name: item for item in flow(words=11).plan(out, input=str(raw))}
    assert results["bpe"].state == "published"
    assert results["web"].why == "changed: steps.0.filter.gopher_quality.min_words"
    assert results["web"].seconds == 30
    assert {item.node.name: item for item in flow().plan(out, input=str(raw))}["web"].state == "published"
    (folder / "tokenizer.json").write_text("damaged")
    damaged = {item.node.name: item for item in flow().plan(out, input=str(raw))}["bpe"]
    assert (damaged.state, damaged.why) == ("to run", "its output is gone or was changed")
    assert {row["step"]: row["storage"] for row in rows(list(results.values()))}["small"] != "-"
