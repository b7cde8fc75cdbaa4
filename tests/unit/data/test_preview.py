"""A preview judges as a run does; its page changes thresholds; no text of a document becomes markup."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess

import pytest

from tests.plain_execution import without_ray
from tidewheel.cli import run_command
from tidewheel.config import build
from tidewheel.data import pipeline
from tidewheel.data.config import PipelineConfig
from tidewheel.data.preview import Preview, Shown, look
from tidewheel.errors import ConfigError
from tidewheel.report import preview as page

STOP_WORDS = ["the", "of", "and", "to", "that", "have", "with", "be"]
WORDS = [*STOP_WORDS, *(f"{one}{two}ing" for one in "abcdefgh" for two in "klmnopqrst")]
RECIPE = {"name": "web", "partitions": 2, "read": {"paths": ["*.jsonl"]}, "max_bad_fraction": 0.5, "steps": [
    {"filter": {"gopher_repetition": {}, "gopher_quality": {"min_words": 30}}}, {"filter": {"pii": {}}}, "dedup_exact"]}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    chosen = random.Random(0)
    texts = [f"{' '.join(chosen.sample(WORDS, 16 * (number % 5) + 5))}. </script><b>{number}@example.com"
             for number in range(40)]
    lines = [json.dumps({"id": f"d{number}", "text": text}) for number, text in enumerate(texts)]
    (tmp_path / "in/a.jsonl").write_text("\n".join([*lines, "{no json"]))
    return tmp_path


def kept_of(found, thresholds=None):
    def fails(each, rule):
        value = each.statistics[rule.key]
        return value < rule.limit if rule.side == "least" else value > rule.limit

    return {document.id for document in found.documents
            if not document.fixed and not any(fails(document, rule) for rule in thresholds or found.thresholds)}


@pytest.mark.parametrize("min_words", [30, 5])
def test_a_preview_keeps_the_same_documents_as_a_run(folder, min_words):
    steps = [{"filter": {"gopher_repetition": {}, "gopher_quality": {"min_words": min_words}}}, {"filter": {"pii": {}}}]
    config = build(PipelineConfig, {**RECIPE, "steps": steps})
    result = look(config, input=str(folder / "in"), limit=100)
    assert len(result.documents) == 40
    assert result.quarantined == {"invalid_json": 1}
    with without_ray(0):
        made = pipeline.run(config, input=str(folder / "in"), output=str(folder / "out"))
    assert len(kept_of(result)) == made.documents
    names = {rule.set for rule in result.thresholds}
    assert {"steps.0.filter.gopher_quality.min_words", "steps.0.filter.gopher_quality.max_words"} <= names
    rule = next(rule for rule in result.thresholds if rule.set.endswith("min_words"))
    assert (rule.limit, rule.side, rule.statistic) == (min_words, "least", "words")


def test_a_preview_reads_up_to_the_limit_and_writes_nothing(folder):
    result = look(build(PipelineConfig, RECIPE), input=str(folder / "in"), limit=7)
    assert [document.id for document in result.documents] == [f"d{number}" for number in range(7)]
    assert {path.name for path in folder.iterdir()} == {"in"}
    with pytest.raises(ConfigError, match="no filter"):
        look(build(PipelineConfig, {**RECIPE, "steps": ["dedup_exact"]}), input=str(folder / "in"), limit=7)


def test_documents_are_escaped_in_the_page(folder):
    html = page.render(look(build(PipelineConfig, RECIPE), input=str(folder / "in"), limit=9), name="<i>", input="x")
    text = html.decode()
    assert text.count("</script>") == 2
    assert "<b>" not in text
    data = json.loads(re.search(r'id="preview-data">(.*?)</script>', text, re.DOTALL)[1])
    assert "</script><b>1@example.com" in data["documents"][1]["text"]


def test_control_characters_are_spelled_out():
    shown = Shown("a\x1b[1m", "web\u202e", "one\ntwo \x1b[31m", {}, [])
    html = page.render(Preview([shown], [], {}), name="x", input="x").decode()
    data = json.loads(re.search(r'id="preview-data">(.*?)</script>', html, re.DOTALL)[1])
    (found,) = data["documents"]
    assert (found["id"], found["source"], found["text"]) == ("a\\x1b[1m", "web\\u202e", "one\ntwo \\x1b[31m")


DOM = """
const made = {};
function node() {
  return { children: [], listeners: {}, append(...more) { this.children.push(...more); },
           addEventListener(kind, call) { this.listeners[kind] = call; } };
}
const page = { createElement: node, getElementById: (id) => (made[id.replace("preview-", "")] ??= node()) };
made["only-dropped"] = Object.assign(node(), { checked: false });
const { show, judge } = require(process.argv[2]);
const data = JSON.parse(require("fs").readFileSync(0, "utf8"));
show(page, data);
const told = [made.kept.textContent];
const row = made.thresholds.children[data.thresholds.findIndex((rule) => rule.set.endsWith("min_words"))];
const slider = row.children[2].children[0];
slider.value = String(slider.min);
slider.listeners.input();
const badge = made.documents.children[0].children[0].children[0];
told.push(made.kept.textContent, made.overrides.textContent, badge.className);
made["only-dropped"].checked = true;
made["only-dropped"].listeners.change();
told.push(made.documents.children.filter((each) => !each.hidden).length);
slider.value = "30";
slider.listeners.input();
told.push(made.kept.textContent, made.overrides.textContent);
console.log(JSON.stringify(told));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="the page's script is tried with Node.js")
def test_a_slider_changes_a_threshold(folder):
    config = build(PipelineConfig, {**RECIPE, "steps": [{"filter": {"gopher_quality": {"min_words": 30}}}]})
    result = look(config, input=str(folder / "in"), limit=100)
    assert 0 < len(kept_of(result)) < 40
    html = page.render(result, name="web", input="x").decode()
    data = re.search(r'id="preview-data">(.*?)</script>', html, re.DOTALL)[1]
    (folder / "dom.js").write_text(DOM)
    page_state = json.loads(subprocess.run(["node", str(folder / "dom.js"), str(page.SCRIPT)], input=data, text=True,
                                           capture_output=True, check=True).stdout)
    lowest = min(document.statistics["0.gopher_quality.words"] for document in result.documents)
    others = [rule for rule in result.thresholds if not rule.set.endswith("min_words")]
    first, moved, line, badge, dropped, back, nothing = page_state
    assert first == back == f"{len(kept_of(result))} of 40 documents are kept"
    assert moved == f"{len(kept_of(result, others))} of 40 documents are kept"
    assert line == f"--set steps.0.filter.gopher_quality.min_words={lowest:g}"
    assert badge == ("badge good" if "d0" in kept_of(result, others) else "badge bad")
    assert dropped == 40 - len(kept_of(result, others))
    assert nothing == "no threshold was moved"


def test_the_command_writes_a_page(folder, capsys):
    (folder / "web.yaml").write_text(json.dumps(RECIPE))
    output = folder / "page.html"
    assert run_command(["data", "preview", str(folder / "web.yaml"), "--input", str(folder / "in"), "--output",
                        str(output), "--limit", "12"]) == 0
    assert "12 documents" in capsys.readouterr().out
    assert output.read_text().startswith("<!doctype html>")
