from __future__ import annotations

import importlib.util
import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tidewheel.errors import StorageError
from tidewheel.jsonlog import JsonLog
from tidewheel.report import events, page, plots
from tidewheel.report.events import Event
from tidewheel.report.pipeline import write_pipeline_report
from tidewheel.report.plots import Scale
from tidewheel.report.run import _workers, redact, write_run_report
from tidewheel.report.training_plots import _merged
from tidewheel.storage import Store, store

_spec = importlib.util.spec_from_file_location("runs", Path(__file__).parent / "runs.py")
assert _spec is not None
assert _spec.loader is not None
runs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(runs)

VOID = {"meta", "br", "hr"}


class Checker(HTMLParser):
    """Fails on tags that do not nest; collects text, tags and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check(uri: str) -> tuple[str, Checker]:
    folder, name = uri.rsplit("/", 1)
    html = store(folder).read(name).decode()
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    assert "script" not in checker.tags
    assert "link" not in checker.tags
    assert checker.addresses == []  # nothing is fetched from anywhere
    for drawing in re.findall(r"<svg.*?</svg>", html, re.S):
        ElementTree.fromstring(drawing)
        assert "nan" not in re.sub(r"<title>.*?</title>|<text.*?</text>|aria-label=\"[^\"]*\"", "", drawing)
    return html, checker


@pytest.fixture
def data(tmp_path: Path) -> Store:
    folder_store = store(tmp_path / "data")
    runs.write_pipeline(folder_store)
    return folder_store


@pytest.fixture
def run(tmp_path: Path, data: Store) -> Store:
    run_store = store(tmp_path / "runs" / "demo")
    runs.write_run(run_store, data.uri)
    return run_store


def test_run_report_says_everything(run: Store) -> None:
    uri = write_run_report(run.uri)  # the pipeline is found from the shard set
    assert uri == run.at("report.html")
    html, checker = check(uri)
    text = " ".join(checker.text)
    for word in ("Run demo-20260301-101500", "finished", "4.521", "unigram 6.01, bigram 2.87", "2 → 1 → 2", "Goodput",
                 "node lost → 1 worker", "node joined → 2 workers", "checkpoint refused", "12 checkpoints",
                 "gopher too few words", "near duplicate", "licences/aiohttp/LICENSE.txt", "invalid json",
                 "Return the number of elements", "Where the time went", "Versions", "2.60.0"):
        assert word in text, word
    assert "&lt;b&gt;If&lt;/b&gt;" in html
    assert "&lt;script&gt;alert(1)" in html
    assert "hunter2" not in html
    assert "tokens_per_step: 8192" in html


def test_validation_has_a_curve_for_each_domain(run: Store, tmp_path: Path) -> None:
    html, checker = check(write_run_report(run.uri))
    text = " ".join(checker.text)
    assert "bits per byte" in text
    drawing = next(found for found in re.findall(r"<svg.*?</svg>", html, re.S) if "validation loss and bits" in found)
    assert drawing.count("<polyline") == 4
    assert "The function returns <b>25</b>" in text  # as text, not as a tag
    lone = store(tmp_path / "lone")
    lone.write_json("run.json", {"id": "lone"})
    score = {"loss": 2.0, "perplexity": 7.389, "bits_per_byte": None, "tokens": 5}
    lone.write("metrics.jsonl", json.dumps({"time": 1, "step": 4, "validation": {"": score}}).encode())
    html, checker = check(write_run_report(lone.uri))
    assert "7.389" in checker.text
    assert "validation loss and bits per byte" not in html  # one point is no curve


def test_costs_go_to_their_cause(run: Store) -> None:
    from tidewheel import jsonlog

    read = events.read_events(jsonlog.read(run, "events.jsonl"), jsonlog.read(run, "metrics.jsonl"),
                              jsonlog.read(run, "ledger.jsonl"))
    lost = next(event for event in read if event.kind == "node_lost")
    joined = next(event for event in read if event.kind == "node_joined")
    began = next(event for event in read if event.kind == "start")
    assert lost.step == 123
    assert lost.cost["detection"] == pytest.approx(3.1)
    assert lost.cost["restart"] == pytest.approx(6.4)
    assert lost.cost["redone"] == pytest.approx(9.7, abs=1.5)
    assert joined.cost == {"restart": pytest.approx(10.2)}
    assert began.cost == {"restart": pytest.approx(8.4)}
    assert not any(event.cost for event in read if event.kind in ("resize", "resume", "finish"))
    every = sum(sum(event.cost.values()) for event in read)
    ledger = sum(part["end"] - part["start"] for part in jsonlog.read(run, "ledger.jsonl")
                 if part["category"] in events.LOST)
    assert every == pytest.approx(ledger)


def test_pipeline_report(data: Store) -> None:
    html, checker = check(write_pipeline_report(data.uri))
    text = " ".join(checker.text)
    for word in ("Pipeline demo", "979", "of 1,555 read", "16 (3 reused)", "threshold 50 and 100,000", "0.938", "289",
                 "By source", "look here", "gsm8k-17", "0 of 12,034 segments", "14 × 8", "99.4 %", "pii replaced", "41",
                 "Would be dropped",
                 "fineweb duplicate lines", "write to email@example.com"):
        assert word in text, word
    assert text.index("gopher too few words  · gopher_quality") < text.index("near duplicate  · dedup_near")
    assert html.count("<svg") == 7


def test_a_run_on_a_mixture(data: Store, tmp_path: Path) -> None:
    folder_store = store(tmp_path / "mixed")
    runs.write_run(folder_store, data.uri)
    run = folder_store.read_json("run.json")
    run["data"] = {"mixture": {
        "proportions": [{"domain": "web", "sequences": 1800, "share": 0.75, "rows": 2400, "tokens": 9_800_000,
                         "epochs": 0.75},
                        {"domain": "code", "sequences": 600, "share": 0.25, "rows": 200, "tokens": 810_000,
                         "epochs": 3.0}],
        "spans": [{"start": 0, "end": 1200, "shares": {"web": 0.9, "code": 0.1}},
                  {"start": 1200, "end": None, "shares": {"web": 0.6, "code": 0.4}}]}}
    folder_store.write_json("run.json", run)
    _, checker = check(write_run_report(folder_store.uri))
    text = " ".join(checker.text)
    for word in ("Mixture", "web", "1,800", "75.00 %", "3.000", "810,000", "1,200", "the end", "40.00 %"):
        assert word in text, word


def test_an_unfinished_run_without_a_pipeline(tmp_path: Path) -> None:
    run_store = store(tmp_path / "run")
    runs.write_run(run_store, str(tmp_path / "none"), finished=False)
    _, checker = check(write_run_report(run_store.uri))
    text = " ".join(checker.text)
    assert "unfinished: step 123 of 300" in text
    assert "What each stage kept" not in text


def test_a_run_that_only_just_began(tmp_path: Path) -> None:
    run_store = store(tmp_path / "run")
    run_store.write_json("run.json", {"id": "new", "config": {}})
    _, checker = check(write_run_report(run_store.uri))
    assert "unfinished: step 0" in " ".join(checker.text)
    run_store.write("metrics.jsonl", b'{"step":1,"loss":7.5,"time":1.0}\n{"step":2,"loss":NaN,"time":2.0}\n{"ste')
    run_store.write("ledger.jsonl", b'{"rank":0,"category":"restart","start":0.5,"end":0.9,"time":0.9,"generation":0,'
                b'"node":"a"}\n{"rank":0}\n')
    check(write_run_report(run_store.uri))


def test_a_pipeline_that_kept_nothing(tmp_path: Path) -> None:
    folder_store = store(tmp_path)
    folder_store.write_json("summary.json", {"name": "empty", "stages": [], "quarantine": {}, "histograms": {}})
    check(write_pipeline_report(folder_store.uri))
    folder_store.write_json("summary.json", {"name": "none", "stages": [
        {"name": "read", "documents_in": 0, "documents_out": 0, "dropped": {}}], "documents": 0})
    check(write_pipeline_report(folder_store.uri))


def test_missing_things_are_told(tmp_path: Path, run: Store) -> None:
    with pytest.raises(StorageError, match=r"no run.json"):
        write_run_report(str(tmp_path / "nothing"))
    with pytest.raises(StorageError, match=r"no summary.json"):
        write_pipeline_report(str(tmp_path / "nothing"))
    with pytest.raises(StorageError, match=r"no readable summary.json"):
        write_run_report(run.uri, str(tmp_path / "nothing"))
    run.write("result.json", b"{")
    with pytest.raises(StorageError, match="not valid JSON"):
        write_run_report(run.uri)


def test_redaction() -> None:
    assert redact({"api_key": "x", "aws_secret_access_key": "y", "password": "z", "hf_token": "t", "empty_token": "",
                   "tokens": 5, "tokenizer": "file", "author": "me", "nested": [{"secret": "s"}],
                   "uri": "s3://me:pw@host/x"}) == {
        "api_key": "•••", "aws_secret_access_key": "•••", "password": "•••", "hf_token": "•••", "empty_token": "",
        "tokens": 5, "tokenizer": "file", "author": "me", "nested": [{"secret": "•••"}], "uri": "s3://•••@host/x"}


def test_builder_escapes_all_but_html() -> None:
    assert page.tag("p", "<b>", page.tag("i", "&"), title='"', class_="a") == (
        '<p title="&quot;" class="a">&lt;b&gt;<i>&amp;</i></p>')
    assert page.table(["<"], [["<x>"]]).count("&lt;") == 2


@pytest.mark.parametrize(("value", "text"), [(0.5, "0.50 s"), (12.34, "12.3 s"), (245, "4 min 05 s"),
                                             (12000, "3 h 20 min"), (None, "–")])
def test_seconds(value: float | None, text: str) -> None:
    assert page.seconds(value) == text


def test_ticks_are_round_and_inside() -> None:
    assert plots.ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert plots.ticks(2.87, 7.5, 6) == [3, 4, 5, 6, 7]
    assert plots.ticks(5, 5) == [5]
    for low, high in ((0, 1e-6), (0.1, 93_111), (-3, 4)):
        result = plots.ticks(low, high)
        assert 2 <= len(result) <= 6
        assert min(result) >= low
        assert max(result) <= high


def test_labels_never_overlap() -> None:
    labels = [(float(at), f"event number {at}") for at in range(0, 900, 7)]
    spans: dict[int, list[tuple[float, float]]] = {}
    for (at, text), (place, anchor, lane) in zip(labels, plots.lanes(labels, 900)):
        begin = at if anchor == "start" else at - len(text) * plots.CHARACTER
        assert place == at
        for other in spans.setdefault(lane, []):
            assert begin >= other[1] or begin + len(text) * plots.CHARACTER <= other[0]
        spans[lane].append((begin, begin + len(text) * plots.CHARACTER))
    moved = plots.move_apart([10.0, 11.0, 12.0, 300.0], 16, 0, 400)
    assert all(b - a >= 16 for a, b in itertools.pairwise(moved))


def test_marks_name_consequences_with_their_cause() -> None:
    shown = events.marks([Event(0, "start", {"world_size": 2}, 0), Event(5, "save", {}, 50),
                          Event(9, "node_lost", {}, 70), Event(9.5, "resize", {"to": 1}, 70)])
    assert [mark.label for mark in shown] == ["start → 2 workers", "node lost → 1 worker"]
    refused = [Event(at, "checkpoint_refused", {}, 70) for at in range(3)]
    assert [mark.label for mark in events.marks(refused)] == ["checkpoint refused ×3"]


def test_bad_steps_are_dots_on_the_loss_curve(run: Store) -> None:
    log = JsonLog(run, "events.jsonl")
    for step, reason, action in ((31, "loss spike", "ignore"), (40, "non-finite loss", "rollback")):
        log.append({"time": runs.BEGAN + step, "kind": "guard", "detail": {
            "step": step, "reason": reason, "action": action, "loss": "nan", "digest": "ab" * 16}})
    log.append({"time": runs.BEGAN + 41, "kind": "rollback", "detail": {"step": 40, "back_to": 30, "position": 320,
                                                                       "count": 8, "reason": "non-finite loss"}})
    log.flush()
    html, checker = check(write_run_report(run.uri))
    for label in ("loss spike at step 31: ignore", "non-finite loss at step 40: rollback"):
        assert html.count(f"<title>{label}</title>") == 1
    assert "rollback" in " ".join(checker.text)


def test_a_workers_row_shows_what_most_of_its_time_went_to():
    """Also where every interval is narrower than what can be drawn."""
    steps = [{"category": category, "start": at + start, "end": at + end}
             for at in range(1000) for category, start, end in (("save_stall", 0.0, 0.1), ("productive", 0.1, 1.0))]
    restart, later = ({"category": "restart", "start": start, "end": start + 100} for start in (1000, 1200))
    drawn = _merged([*steps, restart, later], Scale(0, 1300, 0, 130), 0)
    assert drawn == [("productive", 0, 100), ("restart", 100, 110), ("restart", 120, 130)]


def test_many_sizes_are_not_spelt_out():
    assert _workers([]) == ("–", "")
    assert _workers([2, 1, 2]) == ("2 → 1 → 2", "")
    assert _workers([4, 2, 4, 2, 4, 1]) == ("4 … 1", "5 changes, between 1 and 4")
