"""Compare four filters, exact hash and MinHash signature on one core with datatrove: speed and verdicts.

    python -m tests.benchmarks.datatrove --datatrove-python PATH [--corpus ../shared/corpus] [--files 2]
        [--documents 2000] [--timed 200] [--rounds 5] [--english]

Times are CPU time, medians of `--rounds`. Tidewheel is measured on all documents of the files, datatrove on `--timed`
of them. Verdicts are compared on `--documents`, against datatrove as shipped (spaCy's words) and with Tidewheel's words
on both sides.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.filtering import everything
from tests.unit.data.filters.test_gopher_repetition import clean
from tidewheel.data import textpass
from tidewheel.data.filter import FILTERS, Batch
from tidewheel.data.text.textpass_kernels import SENTENCES

CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
FILTER_PARTS = {name: FILTERS.build(name) for name in ("gopher_quality", "gopher_repetition", "c4", "fineweb")}
ASKED: dict[str, dict[str, Any]] = {
    **{name: {"asked": part.measures()} for name, part in FILTER_PARTS.items()}, "minhash": {"minhash": (5, 112, 1)}}
EVERYTHING: dict[str, Any] = {"asked": everything(), "minhash": (5, 112, 1), "hashes": True}


def documents(folder: Path, files: int, english: bool) -> list[dict[str, Any]]:
    """Return documents of the corpus; with `english` only those marked as English."""
    rows = [json.loads(line) for path in sorted(folder.glob("*.jsonl.gz"))[:files]
            for line in gzip.decompress(path.read_bytes()).splitlines()]
    return [row for row in rows if row["text"] and (not english or row.get("lang") == "en")]


def judged(texts: pa.Array, measured: textpass.Measured) -> dict[str, tuple[list[str], list[str] | None]]:
    """Return the reasons and the edited texts of each filter."""
    batch = Batch(Batch.of(texts).table, measured)
    applied = {name: part.apply(batch) for name, part in FILTER_PARTS.items()}
    return {name: (list(verdicts.reasons), verdicts.texts.to_pylist() if part.EDITS else None)
            for (name, verdicts), part in zip(applied.items(), FILTER_PARTS.values(), strict=True)}


def seconds(texts: pa.Array, rounds: int, asked: dict[str, Any]) -> float:
    """Return the median CPU seconds of one pass and of the filters' verdicts."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        measured = textpass.measure(texts, **asked)
        if len(asked) > 1:
            judged(texts, measured)
        times.append(time.process_time() - began)
    return statistics.median(times)


def tokens(texts: pa.Array) -> list[list[str]]:
    """Return the tokens of each text: the clean text without white space, cut where the pass cuts it."""
    result = []
    for part in textpass.scan(texts):
        for d in range(part.last - part.first):
            first, last = part.token_offsets[d] + d, part.token_offsets[d + 1] + d
            bare = "".join(clean(texts[part.first + d].as_py()).split())
            offsets = part.places[first : last + 1].tolist()
            result.append([bare[a:b] for a, b in itertools.pairwise(offsets)])
    return result


def sentences(texts: list[str]) -> dict[str, int]:
    """Return the number of sentences of every line for which datatrove's C4 filter may ask."""
    lines = list({CITATION.sub("", line.strip()) for text in texts for line in text.splitlines()})
    counts = [int(part.lines[part.line_offsets[d] : part.line_offsets[d + 1], SENTENCES].sum())
              for part in textpass.scan(pa.array(lines, pa.large_string()), words=False)
              for d in range(part.last - part.first)]
    return dict(zip(lines, counts, strict=True))


def ask(python: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run datatrove in its own interpreter and return its answer."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as request_file:
        json.dump(request, request_file)
        request_file.flush()
        command = [python, "-P", Path(__file__).with_name("datatrove_peer.py"), request_file.name]
        process = subprocess.run(command, text=True, stdout=subprocess.PIPE)  # -P: this file has the package's name
    if process.returncode:
        sys.exit(f"{python} cannot run datatrove (see above); make its environment as tests/benchmarks/README.md says")
    answer: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return answer


def same(ours: list[str], theirs: list[list[str]], chosen: np.ndarray) -> float:
    """Return the share of the chosen documents that both sides keep or both drop."""
    return float(np.mean(np.array([(a == "") == (b[0] == "") for a, b in zip(ours, theirs, strict=True)])[chosen]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/corpus"))
    parser.add_argument("--files", type=int, default=2)
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--timed", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--english", action="store_true", help="English documents only")
    parser.add_argument("--datatrove-python", help="Python of an environment with datatrove and spaCy")
    options = parser.parse_args()
    rows = documents(options.corpus, options.files, options.english)
    if not rows:
        sys.exit(f"no *.jsonl.gz in {options.corpus}: name a folder with --corpus")
    texts = pa.array([row["text"] for row in rows], pa.large_string())
    size = sum(len(row["text"].encode()) for row in rows) / 1e6
    textpass.measure(texts[:8], **EVERYTHING)  # compiles the kernels
    took = {name: seconds(texts, options.rounds, asked) for name, asked in ASKED.items()}
    took["everything"] = seconds(texts, options.rounds, EVERYTHING)
    print(f"{len(rows):,} documents, {size:.1f} MB; datatrove: {options.timed} of {options.documents}")
    print(f"{'':<20}{'docs/CPU-s':>12}{'MB/s':>8}")
    for name, value in took.items():
        print(f"{name:<20}{len(rows) / value:>12,.0f}{size / value:>8.1f}")
    if not options.datatrove_python:
        print("datatrove was not asked: give --datatrove-python (tests/benchmarks/README.md says how to make it)")
        return
    chosen = rows[:: max(len(rows) // options.documents, 1)][: options.documents]
    few = pa.array([row["text"] for row in chosen], pa.large_string())
    plain = few.to_pylist()
    answer = ask(options.datatrove_python, {"texts": plain, "rounds": options.rounds, "timed": options.timed,
                                          "words": tokens(few), "sentences": sentences(plain)})
    print(f"\n{'datatrove 0.10.1':<20}{'docs/CPU-s':>12}{'ratio':>8}{'MB/s':>8}{'ratio':>8}")
    count, megabytes = answer["timed"]
    for name, value in answer["seconds"].items():
        rate, speed = count / value, megabytes / value
        print(f"{name:<20}{rate:>12,.1f}{len(rows) / took[name] / rate:>8,.0f}"
              f"{speed:>8.3f}{size / took[name] / speed:>8,.0f}")
    english = np.array([row.get("lang") == "en" for row in chosen])
    ours = judged(few, textpass.measure(few, **EVERYTHING))
    print(f"\n{'same verdict':<20}{'as shipped':>12}{'English':>10}{'others':>10}{'our words':>12}"
          f"   of {len(chosen):,}")
    for name, (reasons, edited) in ours.items():
        shares = [same(reasons, answer["shipped"][name], part) for part in (english | ~english, english, ~english)
                  if part.any()]
        shares = shares if len(shares) == 3 else [*shares, float("nan")]
        shares.append(same(reasons, answer["ours"][name], english | ~english))
        print(f"{name:<20}" + "".join(f"{share:>{width}.2%}" for share, width in zip(shares, (12, 10, 10, 12))))
        if edited is not None:
            pairs = [(a, b[1]) for a, b, reason in zip(edited, answer["shipped"][name], reasons)
                     if not (reason or b[0])]
            print(f"  the same text left in {np.mean([a == b for a, b in pairs]):.2%} of {len(pairs):,} that both keep")


if __name__ == "__main__":
    main()
