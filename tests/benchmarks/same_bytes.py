"""Check that output bytes do not depend on the number of CPUs, the order and number of input files, or Ray.

    python -m tests.benchmarks.same_bytes [--megabytes 20] [--cpus 1 2 4]

The corpus with four copies (`driver.corpus`) goes through the pipeline once for each number of CPUs, each time with
another number and order of files, and once without Ray. The exit code is 1 when a file differs.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from pathlib import Path

from tests.benchmarks.driver import RECIPE, Driver, corpus, set_hashes
from tidewheel.shards.verify import verify

COPIES = 4


def deal(source: Path, target: Path, seed: int) -> int:
    """Shuffle the lines of all files of `source` into other files and return their number."""
    generator = random.Random(seed)
    lines = [line for path in sorted(source.iterdir()) for line in path.read_bytes().splitlines(keepends=True)]
    generator.shuffle(lines)
    files = generator.randint(2, 12)
    target.mkdir()
    for index in range(files):
        (target / f"{generator.getrandbits(32):08x}.jsonl").write_bytes(b"".join(lines[index::files]))
    return files


def main() -> None:
    """Run the command line and print the comparison."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--cpus", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tw-same-") as name:
        root = Path(name)
        documents = corpus(root / "in", options.megabytes / COPIES, COPIES)
        plain = Driver(RECIPE, str(root / "in"), str(root / "plain"), "--plain").watch()
        expected, wrong = set_hashes(str(root / "plain")), 0
        print(f"{documents:,} documents, {len(expected)} files in both sets\n\n| run | input files | s | same bytes |\n"
              f"|---|---|---|---|\n| without Ray | {COPIES * 4} | {plain.seconds:.0f} | |", flush=True)
        for cpus in options.cpus:
            folder = root / f"{cpus}"
            files = deal(root / "in", folder, seed=cpus)
            run = Driver(RECIPE, str(folder), str(root / f"out-{cpus}"), "--cpus", f"{cpus}").watch()
            is_same = set_hashes(str(root / f"out-{cpus}")) == expected and not verify(str(root / f"out-{cpus}/shards"))
            wrong += not is_same
            print(f"| {cpus} CPUs | {files} | {run.seconds:.0f} | {'yes' if is_same else 'NO'} |", flush=True)
            shutil.rmtree(folder)
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
