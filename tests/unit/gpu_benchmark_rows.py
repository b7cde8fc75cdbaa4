"""Stands in for `tests.benchmarks.gpu.row_process` in tests of the runner: rows that end in every way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    """Behave as the row's function says."""
    function, case, file = sys.argv[1:]
    kind, _, argument = function.partition(":")
    rows = json.loads(case)["rows"]
    record = {"status": "ok", "valid": True}
    match kind:
        case "lines":  # how many lines are in a file already
            record["lines"] = len(Path(argument).read_text().splitlines()) if Path(argument).exists() else 0
        case "memory" if rows > int(argument):
            record = {"status": "out of memory", "reason": "too many rows"}
        case "memory_crash" if rows > int(argument):
            sys.exit("CUDA error: out of memory")
        case "crash":
            print("Segmentation fault of a kernel", flush=True)
            os.abort()
        case "hang":  # with a child in the row's group, as a compiler's worker is
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            Path(argument).write_text(str(child.pid))
            time.sleep(1000)
    Path(file).write_text(json.dumps(record))


if __name__ == "__main__":
    main()
