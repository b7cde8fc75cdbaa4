"""Measure filters by URL, word list, language and classifier, and deduplication of lines, on one core.

    python -m tests.benchmarks.signals [--corpus ../shared/corpus] [--files 1]

Times are CPU time, medians of 5 runs (1 for the slow peers). The peers are the same rules in plain Python, and fastText
called for each document on the same characters.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.benchmarks.edits import seconds
from tests.filtering import judged
from tests.unit.data.dedup.test_lines import by_search, order
from tidewheel.data.dedup import lines as dedup_lines
from tidewheel.data.fasttext import model as fasttext_model
from tidewheel.data.fasttext.training import TrainClassifier, train
from tidewheel.data.filters.classifier import Classifier
from tidewheel.data.filters.language import BUNDLED, Language
from tidewheel.data.filters.urls import UrlFilter
from tidewheel.data.filters.words import WordFilter

LISTED = (*(f"listed{index}" for index in range(400)), "xylophone", "sadly", "great deal", "as a matter of fact")
DOMAINS = tuple(f"site{index}.example{index % 7}.com" for index in range(300_000))
GOOD, POOR = ("encyclopedic", "books", "prose"), ("web", "lists", "boilerplate", "lowquality", "docs")
MIN_CHARACTERS = 20
PIECES = 300  # documents that plain Python deduplicates


def read(folder: Path, files: int) -> tuple[pa.Table, list[str]]:
    """Return the documents and their kinds."""
    rows = [json.loads(line) for path in sorted(folder.glob("*.jsonl.gz"))[:files]
            for line in gzip.decompress(path.read_bytes()).splitlines()]
    table = pa.table({"id": [row["id"] for row in rows], "text": pa.array([row["text"] for row in rows],
                                                                          pa.large_string()),
                      "source": [row["source"] for row in rows],
                      "meta": [json.dumps({"url": row.get("url")}) for row in rows]})
    return table, [row["kind"] for row in rows]


def by_regex(texts: list[str]) -> list[bool]:
    """Apply the word list as one regular expression."""
    pattern = re.compile(r"\b(?:" + "|".join(re.escape(entry) for entry in LISTED) + r")\b", re.IGNORECASE)
    return [bool(pattern.search(text)) for text in texts]


def by_fasttext(texts: list[str]) -> list[str]:
    """Call fastText directly."""
    model = fasttext_model.load(BUNDLED).model
    return [model.predict(text[:10_000].replace("\n", " "))[0][0].removeprefix("__label__") for text in texts]


def lines(table: pa.Table) -> dedup_lines.Cut:
    """Deduplicate the lines of one partition."""
    rows = dedup_lines.rows(table["text"], order(len(table)).set_column(0, "id", table["id"]), "line", MIN_CHARACTERS)
    repeats = dedup_lines.repeats(rows, max_repeats=1, keep="first")
    return dedup_lines.cut(table, repeats, "line", MIN_CHARACTERS)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/corpus"))
    parser.add_argument("--files", type=int, default=1)
    options = parser.parse_args()
    table, kinds = read(options.corpus, options.files)
    texts = table["text"].to_pylist()
    size = sum(len(text.encode()) for text in texts)
    print(f"{len(table):,} documents, {size / 1e6:.1f} MB\n\n| | docs/CPU-s | MB/s | |\n|---|---|---|---|")

    def line(name: str, work: Callable[[], Any], runs: int = 5, note: Callable[[Any], str] = lambda _: "",
             count: int = len(table), volume: int = size) -> tuple[float, Any]:
        work()  # compiles kernels and reads lists and models
        taken, result = seconds(work, runs)
        print(f"| {name} | {count / taken:,.0f} | {volume / taken / 1e6:.1f} | {note(result)} |", flush=True)
        return taken / volume, result

    line("urls, 300,000 domains", lambda: judged(table, UrlFilter(domains=DOMAINS, words=("casino",))))
    ours, (reasons, _) = line("words, 404 entries", lambda: judged(table["text"], WordFilter(words=LISTED)))
    theirs, matched = line("the same as a regular expression", lambda: by_regex(texts), 1)
    same = sum(bool(reason) == match for reason, match in zip(reasons, matched, strict=True)) / len(texts)
    print(f"| | | | {theirs / ours:.0f} times slower, same verdict in {same:.1%} |")
    all_languages = Language(allow=())
    ours, (_, _, metas, _) = line("language", lambda: judged(table, all_languages))
    theirs, languages = line("fastText by hand", lambda: by_fasttext(texts), 1)
    same = sum(json.loads(meta)["language"] == name for meta, name in zip(metas.to_pylist(), languages, strict=True))
    print(f"| | | | {ours / theirs:.2f} of its time, same language in {same / len(texts):.1%} |")
    whole = judged(table, Language(max_characters=0))[0]
    agreed = sum(bool(a) == bool(b) for a, b in zip(judged(table, Language())[0], whole, strict=True))
    print(f"| | | | first 10,000 characters against all: same verdict in {agreed / len(texts):.1%} |")
    good = [text for text, kind in zip(texts, kinds, strict=True) if kind in GOOD]
    poor = [text for text, kind in zip(texts, kinds, strict=True) if kind in POOR]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        trained = train(good, poor, TrainClassifier())
        Path(file.name).write_bytes(trained.model)
        settings = Classifier(file=file.name)
        line("classifier", lambda: judged(table, settings), note=lambda _: f"AUC {trained.quality.auc:.3f} on "
             f"{trained.quality.positives + trained.quality.negatives} documents held out")
    piece = table.slice(0, PIECES)
    part = sum(len(text.encode()) for text in piece["text"].to_pylist())
    ours, _ = line("dedup_lines", lambda: lines(table), note=lambda cut: f"{int((cut.pieces > 0).sum())} edited")
    theirs, cut_texts = line("the same in Python", lambda: by_search(
        piece["text"].to_pylist(), piece["id"].to_pylist(), "line", MIN_CHARACTERS, 1, "first"), 1, count=PIECES,
        volume=part)
    same = sum(a == b for a, b in zip(lines(piece).texts.to_pylist(), cut_texts, strict=True)) / PIECES
    print(f"| | | | {theirs / ours:.0f} times slower, same text in {same:.1%} |")


if __name__ == "__main__":
    main()
