"""The user's own filters: found by name, applied as built-in ones, keyed by their source."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pytest

import tidewheel as tw
from tests.plain_execution import without_ray
from tidewheel import parts
from tidewheel.config import build
from tidewheel.data import pipeline
from tidewheel.data.config import PipelineConfig, Step
from tidewheel.data.stages import filters
from tidewheel.data.stages.outcomes import groups
from tidewheel.errors import ConfigError, InputError
from tidewheel.report.pipeline import write_pipeline_report

MODULE = '''
"""Filters of a user."""
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tidewheel as tw

class Shouting(tw.Filter):
    """Drop documents in capitals."""
    max_upper: float = 0.3

    def limits(self):
        return {"upper": (None, self.max_upper)}

    def apply(self, batch):
        upper = pc.count_substring_regex(batch.texts, "[A-Z]").to_numpy() / np.maximum(
            pc.utf8_length(batch.texts).to_numpy(), 1)
        return tw.Verdicts(["shouting" if value > self.max_upper else "" for value in upper], {"upper": upper})

class Trim(tw.Filter):
    """Cut the text after a bar."""
    EDITS = "trimmed"

    def apply(self, batch):
        return tw.Verdicts([""] * len(batch), texts=[text.as_py().partition("|")[0] for text in batch.texts])

def short(document):
    return len(document["text"]) > 5 or "too_short"

def from_web(document):
    return document["meta"].get("url", "").startswith("http")

def broken(document):
    return document["txt"]

def odd(document):
    return 1

class Wrong(tw.Filter):
    def apply(self, batch):
        return tw.Verdicts(["", ""])

class Secret(tw.Filter):
    def apply(self, batch):
        return tw.Verdicts([""], texts=["changed"])

class Ranks(tw.Filter):
    def apply(self, batch):
        return tw.Verdicts([""], quality=np.ones(1, np.float32))

nothing = 5
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Name of a module in the working folder; each test has its own, because Python caches imported modules."""
    name = f"mine_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def table(*texts: str) -> pa.Table:
    count = len(texts)
    return pa.table({"id": [f"d{number}" for number in range(count)], "text": pa.array(texts, pa.large_string()),
                     "source": ["s"] * count, "meta": ['{"url": "http://x"}'] * count})


def rules(*filters_of_step: object) -> list:
    step = build(Step, {"filter": dict(filters_of_step) if filters_of_step else {}}).filter
    assert step is not None
    return list(step.filters)


def test_own_classes_and_functions_run_beside_built_in_filters(module: str):
    lenient = {"min_sentences": 0, "min_words_per_line": 0, "terminal_punctuation": False}
    compiled_rules = rules(("c4", lenient), (f"{module}:Shouting", None), (f"{module}:Trim", {}),
                  ("python", f"{module}:short"))
    assert [parts.name_of(type(filter)) for filter in compiled_rules] == ["c4", f"{module}:Shouting", f"{module}:Trim",
                                                                 f"{module}:short"]
    judged = filters.judge(compiled_rules, table("LOUD WORDS ARE LOUD", "quiet words that stay | cut", "ab|cdefgh",
                                        "all is well"))
    assert judged.reasons.tolist() == ["shouting", "", "too_short", ""]
    assert judged.texts.to_pylist()[1] == "quiet words that stay "
    assert judged.statistics["upper"][1] == 0
    assert judged.histograms["upper"]["threshold"] == 0.3
    assert [edit.reason for edit in judged.edits] == ["trimmed"]
    assert [filter.changes() for filter in compiled_rules] == [True, False, True, False]


def test_a_function_gets_the_whole_document(module: str):
    judged = filters.judge(rules(("python", f"{module}:from_web")), table("a"))
    assert judged.reasons.tolist() == [""]
    off = filters.judge(rules(("python", f"{module}:from_web")), table("a").set_column(3, "meta", [["{}"]]))
    assert off.reasons.tolist() == ["from_web"]


@pytest.mark.parametrize(("name", "told"), [
    ("broken", "KeyError: 'txt'"), ("odd", "returned int for document d0"), ("Wrong", "reasons are 2, for 1 documents"),
    ("Secret", "the class must set EDITS"), ("Ranks", "the class must set WRITES = True"),
])
def test_the_error_of_a_failing_filter_names_its_line(module: str, name: str, told: str):
    with pytest.raises(InputError, match=told) as raised:
        filters.judge(rules((f"{module}:{name}", {})), table("a"))
    assert f"{module}:{name}" in raised.value.what
    if name == "broken":
        assert f"{module}.py:" in str(raised.value.where)


@pytest.mark.parametrize(("name", "settings", "told"), [
    ("{}:Shoutin", {}, "'Shoutin' does not exist"), ("{}:nothing", {}, "is no filter"),
    ("no_such_module_at_all:x", {}, "there is no module 'no_such_module_at_all'"),
    ("{}:Shouting", {"max_uper": 1}, "did you mean 'max_upper'"), ("{}:short", {"a": 1}, "a"),
])
def test_invalid_filters_are_refused_before_the_run(module: str, name: str, settings: dict, told: str):
    with pytest.raises(ConfigError, match=told):
        rules((name.format(module), settings))


def test_several_functions_under_one_key_are_refused():
    with pytest.raises(ConfigError, match="name one function"):
        rules(("python", ["a:b", "a:c"]))


def recipe(module: str, **settings: object) -> PipelineConfig:
    return build(PipelineConfig, {"partitions": 1, "read": {"paths": ["*.jsonl"]}, "steps": [
        {"filter": {f"{module}:Shouting": settings}}]})


def test_keys_depend_on_source_and_settings(module: str, tmp_path: Path):
    plain = recipe(module).recipe_hash()
    assert recipe(module, max_upper=0.3).recipe_hash() == plain
    assert recipe(module, max_upper=0.4).recipe_hash() != plain
    assert build(PipelineConfig, recipe(module).canonical()).recipe_hash() == plain
    (tmp_path / f"{module}.py").write_text(MODULE + "# changed\n")
    parts._source_hash.cache_clear()
    assert recipe(module).recipe_hash() != plain


def test_a_worker_with_a_different_source_raises(module: str):
    (rule,) = rules((f"{module}:Shouting", {"max_upper": 0.4}))
    name, settings, code = filters.bound(rule)
    ((_, [arrived]),) = groups([[False, [[name, settings, code]]]])
    assert arrived == rule
    with pytest.raises(ConfigError, match="on this node differs from"):
        filters.received(name, settings, {**code, "hash": "blake3-0"})


def test_yaml_and_sdk_give_the_same_pipeline(module: str, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "LOUD WORDS"}\n{"text": "quiet words"}\n')
    with without_ray():
        summary = pipeline.run(recipe(module), input=str(tmp_path), output=str(tmp_path / "out"))
    assert summary.documents == 1
    user_module = __import__(module)
    made = tw.Pipeline("pipeline").set(partitions=1).read("*.jsonl")
    assert made.filter(user_module.Shouting()).recipe_hash() == recipe(module).recipe_hash()
    assert made.filter(user_module.Shouting(max_upper=0.4)).recipe_hash() == recipe(module, max_upper=0.4).recipe_hash()
    assert made.filter(user_module.short).config().step("filter").filters == tuple(rules(("python", f"{module}:short")))
    with pytest.raises(ConfigError, match="given twice"):
        made.filter(user_module.Shouting(), user_module.Shouting(max_upper=0.4))
    with pytest.raises(ConfigError, match="workers cannot import"):
        made.filter(lambda document: True)
    with pytest.raises(ConfigError, match="is not a filter"):
        made.filter(user_module.Shouting)  # type: ignore[arg-type]


def test_costs_are_reported_and_not_published(module: str, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "LOUD WORDS"}\n{"text": "quiet words stay here"}\n')
    lenient = {"gopher_quality": {"min_words": 1, "min_stop_words": 0}}
    config = build(PipelineConfig, {"partitions": 1, "read": {"paths": ["*.jsonl"]}, "steps": [
        {"filter": {**lenient, f"{module}:Shouting": {}}}, "dedup_exact",
        {"filter": {**lenient, f"{module}:Trim": {}}}]})
    with without_ray():
        first = pipeline.run(config, input=str(tmp_path), output=str(tmp_path / "one"))
        other = pipeline.run(config, input=str(tmp_path), output=str(tmp_path / "two"))
        again = pipeline.run(config, input=str(tmp_path), output=str(tmp_path / "one"))
    results = {(row["stage"], row["filter"]): row["documents"] for row in first.filter_speeds()}
    counts = {"filter": "2", "filter_2": "1"}
    names = {"filter": f"{module}:Shouting", "filter_2": f"{module}:Trim"}
    assert results == {(stage, name): counts[stage] for stage in counts
                     for name in (names[stage], "gopher_quality", filters.MEASURING)}
    assert all(cost["seconds"] > 0 for cost in first.stage("filter")["filters"])
    assert again.filter_speeds() == [], "nothing was judged"
    units = [sorted(path.relative_to(tmp_path / name).as_posix() + path.read_text() for path in
                    (tmp_path / name / "stages").rglob("units/*.json")) for name in ("one", "two")]
    assert units[0] == units[1]
    assert other.documents == first.documents


def test_speeds_are_not_listed_for_built_in_filters_alone(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "A few words."}\n')
    config = build(PipelineConfig, {"partitions": 1, "read": {"paths": ["*.jsonl"]}, "steps": [{"filter": "pii"}]})
    with without_ray():
        summary = pipeline.run(config, input=str(tmp_path), output=str(tmp_path / "out"))
    assert summary.filter_speeds() == []
    (cost,) = summary.stage("filter")["filters"]
    assert (cost["name"], cost["documents"]) == ("pii", 1)
    report = Path(write_pipeline_report(str(tmp_path / "out"))).read_text()
    assert "What filters cost" in report
