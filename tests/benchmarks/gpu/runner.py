"""Run the rows, each in a process group of its own, and write each result down the moment it is there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.case import Case
from tests.benchmarks.gpu.row_process import out_of_memory
from tests.benchmarks.gpu.rows import Row

TAIL = 4000
"""Characters of a row's output that are searched for the cause of a crash."""
LOG = 200_000
"""Characters of a row's output that are kept."""
ENTRY = "tests.benchmarks.gpu.row_process"


@dataclass
class Runner:
    """Runs rows until the budget is used up.

    Args:
        out: folder of rows.jsonl and log.txt.
        budget: seconds from `began`.
        environment: of the rows' processes.
        jobs: rows at a time; more than one only where times do not count.
        entry: module that a row's process runs.
        began: monotonic seconds.
    """

    out: Path
    budget: float
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    jobs: int = 1
    entry: str = ENTRY
    began: float = field(default_factory=time.monotonic)
    on_record: Callable[[dict[str, Any]], None] = lambda record: None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, rows: Sequence[Row], memory_gib: float | None = None) -> list[dict[str, Any]]:
        """Run the rows in order and return their records. A row that ran out of memory has a record for each try.

        Args:
            rows: the rows.
            memory_gib: of the GPU; None: there is none, so use the tiny shape.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(self.jobs) as pool:
            results = pool.map(lambda row: self._row(row, row.case_on(memory_gib)), rows)
            return [record for records in results for record in records]

    def _row(self, row: Row, case: Case) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        first = case
        while True:
            left = self.budget - (time.monotonic() - self.began)
            if left < row.needs:
                reason = f"{max(0.0, left):.0f} s of the budget are left, and it needs {row.needs:.0f} s"
                records.append(self._write(row, case, first, {"status": "skipped", "reason": reason}))
                return records
            began = time.monotonic()
            record = self._process(row, case, min(row.limit, left))
            record["seconds"] = round(time.monotonic() - began, 1)
            records.append(self._write(row, case, first, record))
            smaller = case.halved()
            if record["status"] != "out of memory" or smaller.rows < case.micro_batches * case.virtual_ranks:
                return records
            case = smaller

    def _write(self, row: Row, case: Case, first: Case, record: dict[str, Any]) -> dict[str, Any]:
        """Append a record to rows.jsonl, so that it survives the end of this process; return it."""
        whole = {"row": row.name, "rows": case.rows, "length": case.length, "document": case.document,
                 "halved": case.rows < first.rows, **record}
        line = json.dumps(whole) + "\n"
        with self._lock, open(self.out / "rows.jsonl", "a") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
            self.on_record(whole)
        return whole

    def _process(self, row: Row, case: Case, limit: float) -> dict[str, Any]:
        """Measure a row in a new process group, and end the whole group with it: compilers' workers too."""
        with tempfile.TemporaryDirectory(prefix="tidewheel-row-") as folder:
            result, output = Path(folder) / "result.json", Path(folder) / "output"
            command = [sys.executable, "-m", self.entry, row.function, json.dumps(case.to_json()), str(result)]
            with open(output, "wb") as file:  # a file, since children that outlive the row would hold a pipe open
                process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=self.environment,
                                           stdin=subprocess.DEVNULL, start_new_session=True)
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            text = output.read_text(errors="replace")
            self._log(row, case, code, text)
            if result.exists():
                record: dict[str, Any] = json.loads(result.read_text())
                return record
            return _without_result(code, limit, text[-TAIL:])

    def _log(self, row: Row, case: Case, code: int | None, text: str) -> None:
        ending = "time limit" if code is None else f"exit code {code}"
        with self._lock, open(self.out / "log.txt", "a") as file:
            file.write(f"==== {row.name}, {case.rows} x {case.length}: {ending}\n{text[-LOG:]}\n")


def _without_result(code: int | None, limit: float, text: str) -> dict[str, Any]:
    if code is None:
        return {"status": "time limit", "reason": f"stopped after {limit:.0f} s"}
    if out_of_memory(text):
        return {"status": "out of memory", "reason": f"ended with code {code}"}
    lines = [line for line in text.splitlines() if line.strip()]
    return {"status": "crashed", "reason": f"ended with code {code}: {lines[-1][:300] if lines else 'no output'}"}
