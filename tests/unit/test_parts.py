"""Parts have names: built-in ones, those of installed packages, and a user's own."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

import tidewheel as tw
from tests.plain_execution import without_ray
from tidewheel import parts
from tidewheel.config import build
from tidewheel.data import pipeline, reader
from tidewheel.data.config import PipelineConfig
from tidewheel.data.filter import FILTERS
from tidewheel.data.reader import READERS
from tidewheel.data.readers import sniff
from tidewheel.data.stages import ingest, recipe_versions
from tidewheel.data.stages.resolve import resolve
from tidewheel.errors import ConfigError
from tidewheel.rewards import KIND as REWARDS

PACKAGE = '''
import tidewheel as tw

class Loud(tw.Filter):
    """Drop documents in capitals."""
    max_upper: float = 0.5

    def apply(self, batch):
        return tw.Verdicts(["loud" if sum(map(str.isupper, text)) > self.max_upper * len(text) else ""
                            for text in batch.texts.to_pylist()])

def short(document):
    return len(document["text"]) > 5

class Pairs(tw.Reader):
    """A record a line: a name and a text."""
    ENDINGS = (".pairs",)
    SIGNATURES = (b"=pairs=",)

    def records(self, stream):
        for line in stream:
            name, _, text = line.decode().partition("=")
            yield {"id": name, "text": text}
'''
NAME = "tw_test_loud_filters"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of a package with filters, laid out in a folder of sys.path as pip installs it."""
    site = tmp_path / "site"
    about = site / f"{NAME}-1.0.dist-info"
    about.mkdir(parents=True)
    (site / f"{NAME}.py").write_text(PACKAGE)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        f"[tidewheel.filters]\nloud = {NAME}:Loud\ntoo_short = {NAME}:short\ngone = {NAME}:Gone\n"
        f"[tidewheel.readers]\npairs = {NAME}:Pairs\nbroken = {NAME}:Broken\n")
    monkeypatch.syspath_prepend(str(site))
    parts._entry_points.cache_clear()
    yield NAME
    parts._entry_points.cache_clear()
    parts._load.cache_clear()
    sniff._ordered.cache_clear()
    sys.modules.pop(NAME, None)


def recipe(*filters: object) -> PipelineConfig:
    return build(PipelineConfig, {"partitions": 1, "read": {"paths": ["*.jsonl"]},
                                  "steps": [{"filter": entry} for entry in filters]})


def test_an_installed_package_offers_filters_in_recipes_and_in_python(installed: str, tmp_path: Path):
    assert {"loud", "too_short", "pii"} <= set(FILTERS.names())
    assert "loud" in dir(tw.filters)
    written = recipe({"loud": {"max_upper": 0.2}, "too_short": None})
    composed = tw.Pipeline("pipeline").set(partitions=1).read("*.jsonl").filter(
        tw.filters.loud(max_upper=0.2), FILTERS.build("too_short"))
    assert composed.recipe_hash() == written.recipe_hash() == recipe(
        {f"{NAME}:Loud": {"max_upper": 0.2}, "python": f"{NAME}:short"}).recipe_hash()
    assert build(PipelineConfig, written.canonical()) == written
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"text": "LOUD WORDS"}\n{"text": "quiet words"}\n{"text": "few"}\n')
    with without_ray():
        summary = pipeline.run(written, input=str(tmp_path / "in"), output=str(tmp_path / "out"))
    assert summary.stage("filter")["dropped"] == {"loud": 1, "short": 1}


def test_an_installed_package_offers_readers(installed: str, tmp_path: Path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.pairs").write_text("one=some words\ntwo=more of them\n")
    config = build(PipelineConfig, {"partitions": 1, "read": {"paths": ["*.pairs"], "format": "pairs"}, "steps": [
        "dedup_exact"]})
    assert config.read.canonical()["format"] == {"kind": f"{NAME}:Pairs"}
    with without_ray():
        summary = pipeline.run(config, input=str(tmp_path / "in"), output=str(tmp_path / "out"))
    assert summary.documents == 2


def test_auto_chooses_the_reader_of_an_installed_package(
        installed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.pairs").write_text("one=some words\ntwo=more of them\n")
    (tmp_path / "in/b.data").write_bytes(b"=pairs=\nthree=others\n")
    (tmp_path / "in/c.data").write_bytes(gzip.compress(b"=pairs=\nfour=packed\n"))
    (tmp_path / "in/d.data").write_text('{"id": "five", "text": "five"}\n')
    config = build(PipelineConfig, {"partitions": 1, "max_bad_fraction": 0.5, "read": {"paths": ["*"]}, "steps": [
        "dedup_exact"]})
    name = f"{NAME}:Pairs"
    job = resolve(config, input=str(tmp_path / "in"), output=str(tmp_path / "out"))
    assert [(file.name, str(file.shape)) for file in job.files] == [
        ("a.pairs", name), ("b.data", name), ("c.data", f"{name}, gzip"), ("d.data", "jsonl")]
    assert "the reader broken of an installed package" in caplog.text
    keys = [task.unit.key for task in ingest.tasks(job)]
    with without_ray():
        summary = pipeline.run(config, input=str(tmp_path / "in"), output=str(tmp_path / "out"))
    assert summary.documents == 5
    assert summary.value["quarantine"] == {"invalid_id": 2}, "the lines of the signature"
    with patch.object(reader, "source_hash", lambda part: "another"):
        changed = [task.unit.key for task in ingest.tasks(job)]
    assert [old == new for old, new in zip(keys, changed, strict=True)] == [False, False, False, True]
    assert recipe_versions.of_files(["d.jsonl"], config) == {"jsonl": 1, name: parts.source_hash(READERS.find(name))}


def test_errors_about_an_installed_package_name_the_setting(installed: str):
    for settings, message in (({"lout": {}}, "unknown key 'steps.0.filter.lout', did you mean 'loud'"),
                        ({"loud": {"max_uper": 1}}, "'steps.0.filter.loud.max_uper', did you mean 'max_upper'"),
                        ({"gone": {}}, "steps.0.filter.gone: 'Gone' does not exist")):
        with pytest.raises(ConfigError, match=message):
            recipe(settings)


@pytest.mark.parametrize("kind", [FILTERS, READERS, REWARDS], ids=lambda kind: kind.noun)
def test_built_in_names_are_their_modules(kind: parts.Kind):
    assert kind.built_in()
    for name in kind.built_in():
        part = kind.find(name)
        assert parts.name_of(part) == name
        assert part.__module__ == f"{kind.package}.{name}"
        assert part.VERSION is not None


def test_a_setting_may_not_be_named_like_a_key_of_decisive():
    with pytest.raises(TypeError, match="cannot be called 'kind'"):
        type("Odd", (tw.Filter,), {"__annotations__": {"kind": str}, "__module__": __name__})


def test_a_wrong_setting_in_python_is_refused_at_once():
    with pytest.raises(ConfigError, match="unknown key 'min_wordz', did you mean 'min_words'"):
        tw.filters.gopher_quality(min_wordz=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="gopher_quality: min_words: Input should be a valid integer"):
        tw.filters.gopher_quality(min_words="many")  # type: ignore[arg-type]
