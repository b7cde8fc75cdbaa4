"""Run a pipeline on a failing object store: its bytes must equal those of a run on a local folder.

    python -m tests.benchmarks.storage_faults [--rate 0.05] [--megabytes 2] [--seed 0]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.benchmarks.driver import RECIPE, Driver, corpus, set_hashes
from tidewheel.cluster.s3_faults import Faults
from tidewheel.cluster.s3_server import S3Server
from tidewheel.storage import store


def main() -> None:
    """Run the command line and print the faults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--megabytes", type=float, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tw-faults-") as name:
        root = Path(name)
        documents = corpus(root / "in", options.megabytes)
        quiet = Driver(RECIPE, str(root / "in"), str(root / "out"), "--cpus", "2").watch()
        expected = set_hashes(str(root / "out"))
        with S3Server(faults=Faults(options.rate, options.seed)) as server:
            uri = server.create_bucket("faulty")
            for path in sorted((root / "in").iterdir()):
                store(f"{uri}/in").write(path.name, path.read_bytes())
            faulty = Driver(RECIPE, f"{uri}/in", f"{uri}/out", "--cpus", "2").watch()
            counts = server.fault_counts()
            is_same = set_hashes(f"{uri}/out") == expected
    print(f"{documents:,} documents, {len(expected)} files in both sets; {quiet.seconds:.0f} s on a folder, "
          f"{faulty.seconds:.0f} s on the failing store")
    for kind, count in counts.items():
        print(f"{kind:16} {count:6}  {count / counts['requests']:7.2%}")
    print("same bytes" if is_same else "OTHER BYTES")
    raise SystemExit(not is_same)


if __name__ == "__main__":
    main()
