"""The user's own readers: named in a recipe, keyed by their source; damaged files differ from bugs in a reader."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pytest

import tidewheel as tw
from tests.plain_execution import without_ray
from tidewheel import parts
from tidewheel.config import build
from tidewheel.data import pipeline, pipeline_plan, read_config
from tidewheel.data.config import PipelineConfig
from tidewheel.errors import ConfigError, InputError

MODULE = '''
import tidewheel as tw

class Games(tw.Reader):
    """Records between lines of a mark."""
    mark: str = "----"

    def records(self, stream):
        text = stream.read().decode()
        if not text.startswith("GAMES"):
            raise ValueError("it does not begin with GAMES")
        for number, game in enumerate(text.split(f"{self.mark}\\n")[1:]):
            yield {"id": f"game-{number}", "text": game, "white": "Anna"}

class Broken(tw.Reader):
    def records(self, stream):
        yield {"text": "one"}
        yield {"text": stream.tell_me()}

class Odd(tw.Reader):
    def records(self, stream):
        yield "one"
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    name = f"readers_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.games").write_text("GAMES\n----\ne4 e5\n----\nd4 d5\n----\n\n")
    (tmp_path / "in/b.games.gz").write_bytes(gzip.compress(b"GAMES\n----\nc4 c5\n"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def recipe(given: object, **more: object) -> PipelineConfig:
    return build(PipelineConfig, {"partitions": 1, "read": {"paths": ["*.games*"], "format": given}, "steps": [
        {"write": {"formats": ["jsonl"]}}], "max_bad_fraction": 0.5, **more})


def test_its_records_become_documents(module: str, tmp_path: Path):
    config = recipe(f"{module}:Games")
    with without_ray():
        summary = pipeline.run(config, input=str(tmp_path / "in"), output=str(tmp_path / "out"))
        again = pipeline.run(config, input=str(tmp_path / "in"), output=str(tmp_path / "out"))
    assert summary.documents == 2, "the two files have records of the same ids, and one game has no text"
    assert summary.value["quarantine"] == {"duplicate_id": 1, "empty_text": 1}
    assert again.stage("ingest")["units_reused"] == 2
    plan = pipeline_plan.plan(config, input=str(tmp_path / "in"), output=str(tmp_path / "other"))
    assert sorted(line.format for line in plan.formats) == [f"{module}:Games", f"{module}:Games, gzip"]
    assert {line.is_usable for line in plan.formats} == {True}


def test_the_recipe_names_the_reader_and_its_settings(module: str, tmp_path: Path):
    plain = recipe(f"{module}:Games")
    assert recipe({"kind": f"{module}:Games", "mark": "----"}).recipe_hash() == plain.recipe_hash()
    assert build(PipelineConfig, plain.canonical()) == plain
    other = recipe({"kind": f"{module}:Games", "mark": "=="})
    assert other.recipe_hash() != plain.recipe_hash()
    user_module = __import__(module)
    made = tw.Pipeline("pipeline").set(partitions=1, max_bad_fraction=0.5).read(
        "*.games*", format=user_module.Games(mark="==")).write("jsonl")
    assert made.recipe_hash() == other.recipe_hash()
    before = plain.recipe_hash()
    (tmp_path / f"{module}.py").write_text(MODULE + "# changed\n")
    parts._source_hash.cache_clear()
    assert recipe(f"{module}:Games").recipe_hash() != before


def test_a_worker_with_another_source_refuses(module: str):
    config = recipe({"kind": f"{module}:Games", "mark": "=="}).read
    sent = read_config.bound(config, {"format": config.decisive()["format"]}, config.format)
    assert read_config.received(sent).format == config.format
    sent["reader_code"]["hash"] = "blake3-0"
    with pytest.raises(ConfigError, match="on this node differs from"):
        read_config.received(sent)


def test_a_damaged_file_goes_to_quarantine_and_a_mistake_ends_the_run(module: str, tmp_path: Path):
    (tmp_path / "in/c.games").write_text("no games")
    with without_ray():
        summary = pipeline.run(recipe(f"{module}:Games"), input=str(tmp_path / "in"), output=str(tmp_path / "out"))
        assert summary.value["quarantine"]["unreadable_file"] == 1
        with pytest.raises(InputError, match="records yielded str, which is not a mapping"):
            pipeline.run(recipe(f"{module}:Odd"), input=str(tmp_path / "in"), output=str(tmp_path / "two"))
        with pytest.raises(InputError, match="AttributeError") as raised:
            pipeline.run(recipe(f"{module}:Broken"), input=str(tmp_path / "in"), output=str(tmp_path / "two"))
    assert f"{module}.py:" in raised.value.where


@pytest.mark.parametrize(("given", "told"), [
    ("jsnl", "read.format: there is no reader 'jsnl'; did you mean 'json"), ("{}:Gamez", "'Gamez' does not exist"),
    ({"kind": "{}:Games", "marc": "x"}, "unknown key 'read.format.marc', did you mean 'mark'"),
    ({"kind": "jsonl", "lines": 3}, "unknown key 'read.format.lines'"), (3, "read.format"),
])
def test_error_messages_name_the_setting(module: str, given: object, told: str):
    named = {key: value.format(module) for key, value in given.items()} if isinstance(given, dict) and (
        "marc" in given) else given.format(module) if isinstance(given, str) else given
    with pytest.raises(ConfigError) as raised:
        recipe(named)
    assert told in str(raised.value)
