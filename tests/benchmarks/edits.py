"""Compare the filters that edit text on one core with the same rules in plain Python and with datatrove's redaction.

    python -m tests.benchmarks.edits [--corpus ../shared/corpus] [--files 2] [--datatrove-python PATH]

Times are CPU time, medians of 5 runs (1 for the slow peers). Agreement is the share of documents.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.filtering import judged
from tests.unit.data.filters.test_refinedweb import slow
from tidewheel.data.config import FilterStep
from tidewheel.data.document import DOCUMENT_SCHEMA
from tidewheel.data.filters.pii import Pii
from tidewheel.data.filters.refinedweb import RefinedWeb
from tidewheel.data.stages.outcomes import Outcomes, grouped, groups

BATCH = 2048
DATATROVE = """
import json, sys, time
from datatrove.pipeline.formatters.pii import PIIFormatter
texts = json.load(open(sys.argv[1]))
formatter = PIIFormatter(email_replacement="<mail>", ip_replacement="<host>")
formatter.format("warm@host.org 1.2.3.4")
began = time.process_time()
replaced = [formatter.format(text) for text in texts]
print(json.dumps({"seconds": time.process_time() - began, "changed": [a != b for a, b in zip(texts, replaced)]}))
"""


def documents(folder: Path, files: int) -> pa.Table:
    """Return the corpus as a pipeline reads it."""
    lines = [line for path in sorted(folder.glob("*.jsonl.gz"))[:files]
             for line in gzip.decompress(path.read_bytes()).splitlines()]
    rows = [json.loads(line) for line in lines]
    columns = {name: [row[name] for row in rows] for name in ("id", "text", "source")}
    return pa.table({**columns, "meta": ["{}"] * len(rows)}, schema=DOCUMENT_SCHEMA)


def seconds(work: Callable[[], Any], runs: int) -> tuple[float, Any]:
    """Return the median CPU seconds and the last result of `work`."""
    times, result = [], None
    for _ in range(runs):
        began = time.process_time()
        result = work()
        times.append(time.process_time() - began)
    return statistics.median(times), result


def in_pipeline(table: pa.Table, step: FilterStep) -> Outcomes:
    """Run the step with all that a pipeline adds: verdict rows, samples, histograms and the edited table."""
    outcomes = Outcomes()
    for first in range(0, len(table), BATCH):
        outcomes.apply(groups(grouped([step])), table.slice(first, BATCH))
    return outcomes


def datatrove(python: str, texts: list[str]) -> tuple[float, list[bool]]:
    """Run datatrove's PIIFormatter in its own interpreter; return CPU seconds and whether each text changed."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as request_file:
        json.dump(texts, request_file)
        request_file.flush()
        command = [python, "-c", DATATROVE, request_file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    value = json.loads(output)
    return value["seconds"], value["changed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/corpus"))
    parser.add_argument("--files", type=int, default=2)
    parser.add_argument("--datatrove-python", help="Python of an environment with datatrove")
    options = parser.parse_args()
    table = documents(options.corpus, options.files)
    if not len(table):
        sys.exit(f"no *.jsonl.gz in {options.corpus}: name a folder with --corpus")
    texts = table["text"].combine_chunks()
    plain = texts.to_pylist()
    size = sum(len(text.encode()) for text in plain) / 1e6
    judged(texts[:8], RefinedWeb())  # compiles the kernels

    def line(name: str, took: float, note: str = "") -> None:
        print(f"{name:<34}{len(plain) / took:>14,.0f}{size / took:>10,.1f}   {note}")

    print(f"{len(plain):,} documents, {size:.1f} MB\n{'':<34}{'docs/CPU-s':>14}{'MB/s':>10}")
    ours, (reasons, _, edited) = seconds(lambda: judged(texts, RefinedWeb()), 5)
    line("refinedweb", ours, f"{sum(map(bool, reasons)):,} dropped")
    peer, slowly = seconds(lambda: [slow(text, RefinedWeb())[1] for text in plain], 1)
    same = sum(a == b for a, b in zip(edited.to_pylist(), slowly, strict=True)) / len(plain)
    line("the same rules in Python", peer, f"{peer / ours:,.0f} times slower; same text in {same:.2%}")
    ours, (_, _, redacted) = seconds(lambda: judged(texts, Pii()), 5)
    changed = [a != b for a, b in zip(plain, redacted.to_pylist(), strict=True)]
    line("pii", ours, f"{sum(changed):,} documents edited")
    if options.datatrove_python:
        peer, theirs = datatrove(options.datatrove_python, plain)
        same = sum(a == b for a, b in zip(changed, theirs, strict=True)) / len(plain)
        line("datatrove PIIFormatter", peer, f"{peer / ours:,.0f} times slower; {sum(theirs):,} documents edited, "
                                             f"the same verdict in {same:.2%}")
    combined = FilterStep.model_validate({"refinedweb": {}, "pii": {}})
    took, outcomes = seconds(lambda: in_pipeline(table, combined), 5)
    line("both, in a pipeline's pass", took, f"{outcomes.edited:,} edited, {outcomes.dropped:,} dropped")


if __name__ == "__main__":
    main()
