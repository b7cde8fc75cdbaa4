"""Measure documents per second by stage, memory by process and Ray's cost, from 1x to 16x the corpus.

    python -m tests.benchmarks.scale [--sizes 1 2 4 8 16] [--megabytes 127] [--plot scale.svg] [--partitions N]
        [--folder F [--prepare]]

The corpus is replicated with edits (`driver.corpus`), one file per copy. Each size runs once on a Ray cluster with all
CPUs of this machine, and once without Ray: the same functions run one after the other in a process that is pinned to a
CPU. One such process runs per CPU, so that they compete as Ray's workers do. The overhead is measured in CPU time of
all processes, including Ray's own, as a fixed part and a part that grows. The exit code is 1 when a worker takes more
memory than `WORKER_BASE_MB` and `WORKER_BYTES_PER_BYTE` allow, or when Ray costs more than `OVERHEAD` CPU time at the
largest size. `--partitions 1` makes one partition of the corpus, to measure its memory.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.benchmarks.driver import RECIPE, Cost, Driver, corpus, set_hashes
from tidewheel.report.plots import Svg

WORKER_BASE_MB = 650  # Python, Arrow, machine code, tables, a batch of encodings (100 bytes a token), a shuffle's input
WORKER_BYTES_PER_BYTE = 10  # in addition, for each byte of text in the largest partition
OVERHEAD = 0.2
COLOURS = ("#2a6fdb", "#d9622b", "#2e9e5b", "#8a4fd3", "#c23b6b", "#7a7a2a", "#1f9aa8")
FLAT = ("ingest", "partition", "dedup_exact", "dedup_near", "pack")
"""Stages whose work grows with the corpus; the tokenizer trains on a sample of fixed size."""


@dataclass(frozen=True)
class Row:
    """One size: the same run with and without Ray."""

    copies: int
    documents: int
    ray: Cost
    plain: Cost

    def rates(self) -> dict[str, float]:
        """Return the documents per second on Ray, by stage and for the whole run."""
        rate_of = {stage["name"]: stage["documents_in"] / max(stage["seconds"], 1e-3) for stage in self.ray.stages}
        return {**{name: rate_of[name] for name in FLAT}, "whole run": self.documents / self.ray.seconds}

    def bound(self) -> float:
        """Return the MB that a worker may take."""
        return WORKER_BASE_MB + WORKER_BYTES_PER_BYTE * self.ray.partition_bytes / 1e6

    def overhead(self) -> float:
        """Return Ray's extra CPU time as a share of the plain functions'."""
        return self.ray.cpu_seconds / self.plain.cpu_seconds - 1

    def cells(self) -> list[str]:
        """Return the cells of the table's row, in the order of `HEAD`."""
        memory = [self.ray.partition_bytes / 1e6, self.ray.peaks.get("worker", 0), self.bound(),
                  self.ray.peaks.get("driver", 0), self.plain.peaks.get("driver", 0)]
        return [f"{self.copies}x", *(f"{figure:,.0f}" for figure in (self.documents, *self.rates().values(), *memory)),
                f"{self.ray.seconds:.0f} s, {self.plain.seconds:.0f} s",
                f"{self.ray.cpu_seconds:.1f} s, {self.plain.cpu_seconds:.1f} s, {self.overhead():+.0%}"]


HEAD = ("size", "documents", *(f"{name}, docs/s" for name in (*FLAT, "whole run")), "largest partition, MB",
        "worker MB", "at most", "driver MB", "without Ray MB", "wall: Ray, plain on one CPU",
        "CPU: Ray, plain, overhead")


@dataclass(frozen=True)
class Sweep:
    """Runs over the first files of `everything`, size by size, with outputs under `root`."""

    root: Path
    everything: Path
    partitions: int | str

    def run(self, copies: int, name: str, *arguments: str) -> Cost:
        """Run the pipeline over the first `copies` files."""
        source = self.root / f"{copies}-in"
        source.mkdir(exist_ok=True)
        for path in sorted(self.everything.iterdir())[:copies]:
            if not (source / path.name).exists():
                (source / path.name).hardlink_to(path)
        recipe = {**RECIPE, "partitions": self.partitions}
        return Driver(recipe, str(source), str(self.root / f"{copies}-{name}"), *arguments).watch()

    def plain(self, sizes: Sequence[int]) -> dict[int, Future[Cost]]:
        """Start all runs without Ray, the largest first and one at a time on each CPU."""
        cpus: queue.Queue[int] = queue.Queue()
        for cpu in os.sched_getaffinity(0):
            cpus.put(cpu)

        def one(copies: int) -> Cost:
            cpu = cpus.get()
            os.sched_setaffinity(0, {cpu})  # this thread, and the process it starts
            try:
                return self.run(copies, "plain", "--plain")
            finally:
                cpus.put(cpu)

        with ThreadPoolExecutor(cpus.qsize()) as pool:
            return {copies: pool.submit(one, copies) for copies in sorted(sizes, reverse=True)}

    def compare(self, copies: int) -> None:
        """Assert that the outputs of a size are the same, and remove them."""
        outputs = [self.root / f"{copies}-{name}" for name in ("ray", "plain")]
        if set_hashes(str(outputs[0])) != set_hashes(str(outputs[1])):
            raise SystemExit("runs with and without Ray gave different bytes")
        for output in outputs:
            shutil.rmtree(output)


def fit(rows: list[Row]) -> tuple[float, float]:
    """Return (a, b) in Ray's extra CPU seconds = a + b x those of the plain functions, by least squares."""
    plain = np.array([row.plain.cpu_seconds for row in rows])
    extra = np.array([row.ray.cpu_seconds for row in rows]) - plain
    a, b = np.linalg.lstsq(np.stack([np.ones_like(plain), plain], axis=1), extra, rcond=None)[0]
    return float(a), float(b)


def plot(path: str, sizes: list[int], lines: dict[str, list[float]]) -> None:
    """Draw documents per second over the size of the corpus as SVG, with logarithmic axes."""
    import math

    figure = Svg(height=420, label="documents a second by size of the corpus")
    top, low = max(map(max, lines.values())) * 1.5, min(map(min, lines.values())) / 1.5
    def across(size: float) -> float:
        return 70 + 780 * math.log2(max(size, 1)) / max(1.0, math.log2(sizes[-1]))
    def up(rate: float) -> float:
        return 380 - 350 * math.log(rate / low) / math.log(top / low)
    for size in sizes:
        figure.line(across(size), 30, across(size), 380, stroke="#ddd")
        figure.text(across(size), 400, f"{size}x", anchor="middle")
    power = math.ceil(math.log10(low))
    while 10 ** power < top:
        figure.line(70, up(10 ** power), 850, up(10 ** power), stroke="#ddd")
        figure.text(60, up(10 ** power) + 4, f"{10 ** power:,.0f}", anchor="end")
        power += 1
    for values, colour in zip(lines.values(), COLOURS):
        for (size, value), (next_size, next_value) in zip(zip(sizes, values), zip(sizes[1:], values[1:])):
            figure.line(across(size), up(value), across(next_size), up(next_value), stroke=colour, width=2)
    ends = sorted((up(values[-1]), name, colour) for (name, values), colour in zip(lines.items(), COLOURS))
    free = 0.0
    for height, name, colour in ends:
        free = max(height, free)  # labels of lines with nearby ends go below each other
        figure.text(860, free + 4, f"{name}, documents/s", fill=colour)
        free += 15
    body = "".join(str(part) for part in figure.parts)
    Path(path).write_text(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1060 420" font-family="sans-serif" '
                          f'font-size="13"><rect width="1060" height="420" fill="white"/>{body}</svg>\n')


def main() -> None:
    """Run the command line and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--megabytes", type=float, default=127, help="size of the corpus; default: all of it")
    parser.add_argument("--plot", default="")
    parser.add_argument("--partitions", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="folder in which to keep the corpus")
    parser.add_argument("--prepare", action="store_true", help="only write the corpus to --folder")
    options = parser.parse_args()
    sizes = sorted(options.sizes)
    os.environ["RAYON_NUM_THREADS"] = "1"  # a worker has one CPU
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tw-scale-", dir=options.folder) as name:
        everything = (options.folder or Path(name)) / f"corpus-{options.megabytes:g}x{sizes[-1]}"
        if not everything.exists():
            corpus(everything, options.megabytes, sizes[-1], files=1)
        documents = [sum(1 for _ in path.open("rb")) for path in sorted(everything.iterdir())]
        if options.prepare:
            return
        sweep, cpus = Sweep(Path(name), everything, options.partitions or "auto"), len(os.sched_getaffinity(0))
        on_ray = {copies: sweep.run(copies, "ray", "--cpus", str(cpus)) for copies in sizes}
        plain = sweep.plain(sizes)
        print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
        for copies in sizes:
            rows.append(Row(copies, sum(documents[:copies]), on_ray[copies], plain[copies].result()))
            sweep.compare(copies)
            print(f"| {' | '.join(rows[-1].cells())} |", flush=True)
    largest = rows[-1]
    roles = sorted(set(largest.ray.cpu_by_role) | set(largest.plain.cpu_by_role))
    print(f"\nCPU seconds at {largest.copies}x by process: " + ", ".join(
        f"{role} {largest.ray.cpu_by_role.get(role, 0):.1f}" for role in roles))
    if len(rows) > 1:
        fixed, share = fit(rows)
        print(f"Ray's CPU time: {fixed:.1f} s whatever the size, and {share:.1%} of the plain functions'")
    if options.plot:
        plot(options.plot, sizes, {name: [row.rates()[name] for row in rows] for name in rows[0].rates()})
    wrong = [f"{row.copies}x: a worker took more memory than its bound" for row in rows
             if row.ray.peaks.get("worker", 0) > row.bound()]
    if largest.overhead() > OVERHEAD:
        wrong.append(f"{largest.copies}x: Ray took {largest.overhead():.0%} CPU time on top, more than {OVERHEAD:.0%}")
    raise SystemExit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
