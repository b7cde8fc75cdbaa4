from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tidewheel import storage
from tidewheel.demo.corpus import CorpusInfo, build_corpus
from tidewheel.demo.eval_items import QUESTIONS
from tidewheel.storage import Store, store


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, CorpusInfo]:
    folder_store = store(tmp_path_factory.mktemp("corpus"))
    return folder_store, build_corpus(folder_store, max_bytes=3_000_000)


def documents(place: Store, info: CorpusInfo) -> tuple[dict[str, dict], list[bytes]]:
    good, bad = {}, []
    for key in info.files:
        for line in place.read(key).splitlines():
            try:
                record = json.loads(line.decode("utf-8"))
                assert isinstance(record["text"], str)
            except (ValueError, KeyError, AssertionError):
                bad.append(line)
                continue
            assert record["id"] not in good
            good[record["id"]] = record
    return good, bad


def words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def test_info_is_what_was_written(built: tuple[Store, CorpusInfo]) -> None:
    place, info = built
    good, bad = documents(place, info)
    assert len(info.files) == 16
    assert (len(good), len(bad)) == (info.documents, 5) == (info.documents, info.bad_records)
    assert sum(len(record["text"].encode()) for record in good.values()) == info.bytes
    assert 0.9 * 3_000_000 < info.bytes <= 1.01 * 3_000_000
    assert Counter(record["source"] for record in good.values()) == info.sources
    assert {"docstrings", "licences", "readmes", "sources", "topics", "bundled"} == set(info.sources)
    for record in good.values():
        assert set(record) == {"id", "text", "source", "meta"}
        assert set(json.loads(record["meta"])) == {"licence", "path"}


def test_planted_items_are_there_and_the_others_are_not(built: tuple[Store, CorpusInfo]) -> None:
    place, info = built
    good, _ = documents(place, info)
    items = [json.loads(line) for key in info.evals for line in place.read(key).splitlines()]
    placed = place.read_json("planted.json")
    assert len(items) >= 40 - 2
    assert sorted(placed.values()) == list(info.planted)
    assert len(info.planted) == len(set(info.planted)) >= 30
    everything = {key: words(record["text"]) for key, record in good.items()}
    for item in items:
        wanted = words(item.get("text") or item["question"])
        assert len(item["id"]) > 3
        holders = [key for key, text in everything.items() if wanted in text]
        assert holders == ([placed[item["id"]]] if item["id"] in placed else [])
    assert 0 < len(items) - len(placed) < 12  # some are clean, so that false alarms would show
    assert any(len(question.split()) < 13 for question, _ in QUESTIONS)


def test_it_is_deterministic_and_tells_nothing_of_this_machine(built: tuple[Store, CorpusInfo], tmp_path: Path) -> None:
    place, info = built
    code = ("from tidewheel.demo.corpus import build_corpus\nfrom tidewheel.storage import store\n"
            f"build_corpus(store({str(tmp_path)!r}), max_bytes=3_000_000)")
    environment = {**os.environ, "PYTHONPATH": str(Path(storage.__file__).parents[2]), "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd="/", timeout=120)
    again = store(tmp_path)
    for key in (*info.files, *info.evals, "planted.json"):
        assert again.read(key) == place.read(key)
    text = b"".join(place.read(key) for key in info.files).decode("utf-8", "replace")
    for private in (sys.prefix, sys.base_prefix, str(tmp_path), os.uname().nodename):
        assert len(private) < 6 or private not in text


def test_another_seed_plants_elsewhere(tmp_path: Path, built: tuple[Store, CorpusInfo]) -> None:
    other = build_corpus(store(tmp_path), max_bytes=3_000_000, seed=1, bad_records=False)
    assert other.bad_records == 0
    assert other.planted != built[1].planted
    assert documents(store(tmp_path), other)[1] == []


def test_licences_repeat_each_other(built: tuple[Store, CorpusInfo]) -> None:
    good, _ = documents(*built)
    licences = [words(record["text"]) for record in good.values() if record["source"] == "licences"]
    apache = [text for text in licences if "apache license version 2 0" in text]
    assert len(apache) > len(set(apache)) > 1  # exact and near duplicates


def test_a_tiny_corpus_works(tmp_path: Path) -> None:
    info = build_corpus(store(tmp_path), max_bytes=100_000)
    assert info.documents > 10
    assert info.bytes < 110_000
