"""Measure decontamination on labelled documents: recall on planted items, false positives, and speed.

Items are planted into documents of the corpus in every way of `decontam_plants.KINDS`. The labelled set
`labels/decontam` was made independently, with other seeds and changes. Run `python -m tests.benchmarks.decontam`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.benchmarks.decontam_plants import KINDS, plant
from tidewheel.console import print_table
from tidewheel.data import text
from tidewheel.data.decontaminate import EvalIndex, EvalItem, Match, find, read_eval_items

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
_MOST_CHARACTERS = 20_000  # longest document into which an item is planted


def _lines(path: Path) -> list[Any]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _row(kind: str, flags: list[bool], right: int | None, expected: bool) -> dict[str, str]:
    share = sum(flags) / len(flags)
    return {"kind": kind, "documents": f"{len(flags)}", "flagged": f"{sum(flags)}", "share": f"{share:.1%}",
            "right item": "" if right is None else f"{right}", "should be": "all" if expected else "none"}


def planted(index: EvalIndex, items: list[EvalItem], carriers: list[str], each: int, seed: int) -> list[dict[str, str]]:
    """Return a row for each kind of plant."""
    plants = plant(items, carriers, each, seed)
    matches_of = find(index, [entry.text for entry in plants])
    rows = []
    for kind, (_, _, present) in KINDS.items():
        of_kind = [(entry, matches) for entry, matches in zip(plants, matches_of, strict=True) if entry.kind == kind]
        right = sum(_names(entry.item, matches) for entry, matches in of_kind) if present else None
        rows.append(_row(kind, [bool(matches) for _, matches in of_kind], right, present))
    return rows


def _names(item: EvalItem | None, matches: list[Match]) -> bool:
    return item is not None and any((match.benchmark, match.item) == (item.name, item.item) for match in matches)


def labelled(index: EvalIndex, folder: Path) -> tuple[list[dict[str, str]], list[Match]]:
    """Return a row for each kind of label by document, and the best matches in documents labelled as clean."""
    documents, truth = _lines(folder / "docs.jsonl.gz"), _lines(folder / "truth.jsonl.gz")
    found_matches = find(index, [document["text"] for document in documents])
    matches_of = dict(zip((document["id"] for document in documents), found_matches, strict=True))
    positive = {row["doc"] for row in truth if row["contaminated"]}
    flags, right, wrong = defaultdict(list), Counter[str](), []
    for row in truth:
        if row["contaminated"] is None or (not row["contaminated"] and row["doc"] in positive):
            continue  # unclear, or a negative next to a planted item
        matches = matches_of[row["doc"]]
        flags[row["kind"], row["contaminated"]].append(bool(matches))
        right[row["kind"]] += any(match.item == row["item"] for match in matches)
        if matches and not row["contaminated"]:
            wrong.append(max(matches, key=lambda match: match.score))
    return [_row(kind, flagged, right[kind] if present else None, present)
            for (kind, present), flagged in sorted(flags.items(), key=lambda entry: not entry[0][1])], wrong


def speed(index: EvalIndex, texts: list[str], rounds: int) -> list[dict[str, str]]:
    """Return rows of the best CPU time of `rounds` on one thread, with words alone for comparison."""
    column = pa.array(texts, pa.large_string())
    size = sum(len(entry.encode()) for entry in texts)

    def best(work: Any) -> float:
        times = []
        for _ in range(rounds):
            began = time.process_time()
            work()
            times.append(time.process_time() - began)
        return min(times)

    rows = []
    for name, work in (("words alone", lambda: list(text.scan(column, keep_digits=True))),
                       ("search", lambda: find(index, column))):
        seconds = best(work)
        rows.append({"pass": name, "MB/s": f"{size / seconds / 1e6:.1f}", "documents/s": f"{len(texts) / seconds:,.0f}",
                     "µs a document": f"{seconds / len(texts) * 1e6:.0f}"})
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evals", default=str(SHARED / "evals"), help="evaluation items")
    parser.add_argument("--corpus", default=str(SHARED / "corpus/dev-00003.jsonl.gz"), help="a gzipped JSONL file")
    parser.add_argument("--labels", type=Path, default=SHARED / "labels/decontam", help="labelled documents")
    parser.add_argument("--each", type=int, default=300, help="documents for each kind of plant")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    items = read_eval_items(options.evals)
    began = time.process_time()
    index = EvalIndex.build(items)
    print(f"{len(items):,} items, indexed in {time.process_time() - began:.1f} s, {len(index.to_bytes()) / 1e6:.0f} MB")
    texts = [record["text"] for record in _lines(Path(options.corpus))]
    natural = find(index, texts)
    carriers = [entry for entry, matches in zip(texts, natural, strict=True)
                if not matches and len(entry) <= _MOST_CHARACTERS]
    print_table(planted(index, items, carriers, options.each, options.seed), title="planted by this benchmark")
    if options.labels.is_dir():
        rows, wrong = labelled(index, options.labels)
        print_table(rows, title=f"labels of {options.labels.name}")
        for match in wrong:
            print(f"flagged against the label: {match.item} {match.score:.2f} {match.text!r}")
    print_table(speed(index, texts, options.rounds), title=f"one core, all items, {Path(options.corpus).name}")
    print(f"of its {len(texts):,} documents as they are {sum(map(bool, natural))} are flagged:")
    for matches in natural:
        if matches:
            best = max(matches, key=lambda match: match.score)
            print(f"  {best.score:.2f} {best.item}: {' '.join(best.text.split())[:110]!r}")


if __name__ == "__main__":
    main()
