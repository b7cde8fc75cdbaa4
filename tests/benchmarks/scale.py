"""From 1x to 16x the corpus: documents a second by stage, memory by process, and what Ray costs.

    python -m tests.benchmarks.scale [--sizes 1 2 4 8 16] [--megabytes 127] [--plot scale.svg] [--partitions N]
        [--folder F [--prepare]]

The corpus is replicated with edits (`driver.corpus`), a file for each copy. Each size runs once on a Ray cluster of
all CPUs of this machine, and once without Ray: the same functions one after the other in a process that is pinned to a
CPU; as many of these run at a time as there are CPUs, so that they disturb each other as Ray's workers do. Overhead is
told by CPU time of all processes, Ray's own included, and as a fixed part and one that grows. Exit code 1 when a worker
takes more memory than `WORKER_BASE_MB` and `WORKER_BYTES_PER_BYTE` allow, or when Ray costs more than `OVERHEAD` CPU
time at the largest size. `--partitions 1` makes partitions as large as the corpus, to see what memory they take.
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
WORKER_BYTES_PER_BYTE = 10  # beside it, for each byte of text in the largest partition
OVERHEAD = 0.2
COLOURS = ("#2a6fdb", "#d9622b", "#2e9e5b", "#8a4fd3", "#c23b6b", "#7a7a2a", "#1f9aa8")
FLAT = ("ingest", "partition", "dedup_exact", "dedup_near", "pack")
"""Stages whose work grows with the corpus; training the tokenizer takes a sample of fixed size."""


@dataclass(frozen=True)
class Row:
    """One size: the same run on Ray and without."""

    copies: int
    documents: int
    ray: Cost
    plain: Cost

    def rates(self) -> dict[str, float]:
        """Documents a second by stage, and of the whole run, on Ray."""
        found = {stage["name"]: stage["documents_in"] / max(stage["seconds"], 1e-3) for stage in self.ray.stages}
        return {**{name: found[name] for name in FLAT}, "whole run": self.documents / self.ray.seconds}

    def bound(self) -> float:
        """MB that a worker may take."""
        return WORKER_BASE_MB + WORKER_BYTES_PER_BYTE * self.ray.partition_bytes / 1e6

    def overhead(self) -> float:
        """CPU time that Ray takes on top, as a share of that of the plain functions."""
        return self.ray.cpu_seconds / self.plain.cpu_seconds - 1

    def cells(self) -> list[str]:
        """Of the table's line, as `HEAD`."""
        memory = [self.ray.partition_bytes / 1e6, self.ray.peaks.get("worker", 0), self.bound(),
                  self.ray.peaks.get("driver", 0), self.plain.peaks.get("driver", 0)]
        return [f"{self.copies}x", *(f"{number:,.0f}" for number in (self.documents, *self.rates().values(), *memory)),
                f"{self.ray.seconds:.0f} s, {self.plain.seconds:.0f} s",
                f"{self.ray.cpu_seconds:.1f} s, {self.plain.cpu_seconds:.1f} s, {self.overhead():+.0%}"]


HEAD = ("size", "documents", *(f"{name}, docs/s" for name in (*FLAT, "whole run")), "largest partition, MB",
        "worker MB", "at most", "driver MB", "without Ray MB", "wall: Ray, plain on one CPU",
        "CPU: Ray, plain, overhead")


@dataclass(frozen=True)
class Sweep:
    """The first files of `everything`, size by size, under `root`."""

    root: Path
    everything: Path
    partitions: int | str

    def run(self, copies: int, name: str, *arguments: str) -> Cost:
        """One pipeline over the first `copies` files."""
        source = self.root / f"{copies}-in"
        source.mkdir(exist_ok=True)
        for path in sorted(self.everything.iterdir())[:copies]:
            if not (source / path.name).exists():
                (source / path.name).hardlink_to(path)
        recipe = {**RECIPE, "partitions": self.partitions}
        return Driver(recipe, str(source), str(self.root / f"{copies}-{name}"), *arguments).watch()

    def plain(self, sizes: Sequence[int]) -> dict[int, Future[Cost]]:
        """Without Ray, the largest first, one at a time on each CPU; all of them."""
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
        """The outputs must be the same; they are removed."""
        places = [self.root / f"{copies}-{name}" for name in ("ray", "plain")]
        if set_hashes(str(places[0])) != set_hashes(str(places[1])):
            raise SystemExit("with and without Ray gave other bytes")
        for place in places:
            shutil.rmtree(place)


def fit(rows: list[Row]) -> tuple[float, float]:
    """(a, b) of Ray's extra CPU seconds = a + b x those of the plain functions, by least squares."""
    plain = np.array([row.plain.cpu_seconds for row in rows])
    extra = np.array([row.ray.cpu_seconds for row in rows]) - plain
    a, b = np.linalg.lstsq(np.stack([np.ones_like(plain), plain], axis=1), extra, rcond=None)[0]
    return float(a), float(b)


def plot(path: str, sizes: list[int], lines: dict[str, list[float]]) -> None:
    """Documents a second over the size of the corpus, both axes logarithmic, as SVG."""
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
    for place, name, colour in ends:
        free = max(place, free)  # labels of lines that end together stand below each other
        figure.text(860, free + 4, f"{name}, documents/s", fill=colour)
        free += 15
    body = "".join(str(part) for part in figure.parts)
    Path(path).write_text(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1060 420" font-family="sans-serif" '
                          f'font-size="13"><rect width="1060" height="420" fill="white"/>{body}</svg>\n')


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--megabytes", type=float, default=127, help="of ../shared/corpus: all of it")
    parser.add_argument("--plot", default="")
    parser.add_argument("--partitions", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keeps the corpus for another run")
    parser.add_argument("--prepare", action="store_true", help="make the corpus in --folder, and no more")
    given = parser.parse_args()
    sizes = sorted(given.sizes)
    os.environ["RAYON_NUM_THREADS"] = "1"  # a worker has one CPU
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tw-scale-", dir=given.folder) as name:
        everything = (given.folder or Path(name)) / f"corpus-{given.megabytes:g}x{sizes[-1]}"
        if not everything.exists():
            corpus(everything, given.megabytes, sizes[-1], files=1)
        documents = [sum(1 for _ in path.open("rb")) for path in sorted(everything.iterdir())]
        if given.prepare:
            return
        sweep, cpus = Sweep(Path(name), everything, given.partitions or "auto"), len(os.sched_getaffinity(0))
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
    if given.plot:
        plot(given.plot, sizes, {name: [row.rates()[name] for row in rows] for name in rows[0].rates()})
    wrong = [f"{row.copies}x: a worker took more memory than its bound" for row in rows
             if row.ray.peaks.get("worker", 0) > row.bound()]
    if largest.overhead() > OVERHEAD:
        wrong.append(f"{largest.copies}x: Ray took {largest.overhead():.0%} CPU time on top, more than {OVERHEAD:.0%}")
    raise SystemExit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
