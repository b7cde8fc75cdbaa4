"""Measure one GPU and print the table.

    python -m tests.benchmarks.gpu [--budget 570] [--out gpu-results] [--only TEXT ...] [--list] [--table FILE]

Each row of the table is measured in a process of its own, most valuable first, and is appended to rows.jsonl in the
output folder at once. Rows that run out of memory are tried again with half the batch. Rows that the budget does not
allow are skipped. The folder also gets table.md and log.txt. Without a GPU, every row runs at a tiny shape, which shows
that it works and nothing else. See docs/gpu_benchmark.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu import wheels
from tests.benchmarks.gpu.rows import Row, chosen
from tests.benchmarks.gpu.runner import Runner
from tests.benchmarks.gpu.table import page

RESERVE = 5.0
"""Seconds of the budget that the table and the end of the last row take."""
CPU_JOBS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows that the command line asks for, print the table and return the exit code."""
    began = time.monotonic()
    options = _options(arguments)
    try:
        rows = chosen(options.only)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.table is not None:
        records = [json.loads(line) for line in options.table.read_text().splitlines()]
        print(page(records, next((record["device"] for record in records if "device" in record), "unknown")), end="")
        return 0
    if options.list:
        for row in rows:
            print(f"{row.name:34} {row.function:24} {row.case.rows} x {row.case.length}, documents of "
                  f"{row.case.document or 'a row'}, needs {row.needs:.0f} s, at most {row.limit:.0f} s")
        return 0
    _run(rows, options, began)
    return 0


def _options(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=570.0, help="seconds for all rows")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the results")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="rows whose name contains a text")
    parser.add_argument("--list", action="store_true", help="list the rows and stop")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a rows.jsonl and stop")
    return parser.parse_args(arguments)


def _run(rows: Sequence[Row], options: Any, began: float) -> None:
    import torch

    installed = wheels.install()
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else "CPU"
    runner = Runner(options.out, options.budget - RESERVE, _environment(installed, cuda), jobs=1 if cuda else CPU_JOBS,
                    began=began, on_record=lambda record: print(_line(record, time.monotonic() - began), flush=True))
    for old in ("rows.jsonl", "log.txt", "table.md"):
        (options.out / old).unlink(missing_ok=True)
    records = runner.run(rows, torch.cuda.get_device_properties(0).total_memory / 2**30 if cuda else None)
    text = page(records, device)
    (options.out / "table.md").write_text(text)
    print(f"\n{text}")


def _environment(installed: str | None, cuda: bool) -> dict[str, str]:
    """Return the variables of the rows' processes.

    Args:
        installed: folder of packages from wheels.
        cuda: there is a GPU.
    """
    root = wheels.ROOT
    paths = [str(root / "platform"), str(root), os.environ.get("PYTHONPATH", ""), installed or ""]
    cache = Path(tempfile.gettempdir()) / "tidewheel-gpu-compiled"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1",
                 "PYTHONWARNINGS": "ignore", "TORCHINDUCTOR_CACHE_DIR": str(cache),  # later rows find compiled blocks
                 "TRITON_CACHE_DIR": str(cache / "triton"), "TOKENIZERS_PARALLELISM": "false",
                 "HF_HUB_OFFLINE": "1"}
    if not cuda:
        variables |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return variables


def _line(record: dict[str, Any], seconds: float) -> str:
    speed = f", {record['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in record else ""
    reason = f": {record['reason']}" if record.get("reason") else ""
    return f"[{seconds:5.0f} s] {record['row']}: {record['status']}{speed}{reason}"


if __name__ == "__main__":
    sys.exit(main())
