"""Measure the first use of the text kernels on a new machine, and their speed at each processor level.

    python -m tests.benchmarks.first_use [--compile] [--megabytes 8]

Each line is its own process with an empty cache: seconds until every kernel has been called once, the number of
compiled functions, and the megabytes per second of one pass with all filters, hash and signature. --compile also
measures a package without compiled kernels (a minute or two), and the compilation time of each kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from tidewheel.console import print_table
from tidewheel.data.text import kernel_objects


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="also compile all kernels here")
    parser.add_argument("--megabytes", type=float, default=8.0, help="size of the text that is measured")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_process:
        print(json.dumps(measure(options.megabytes)))
        return 0
    rows, parts = [], list[dict[str, Any]]()
    best = kernel_objects.level()
    runs = [(level, level) for level in kernel_objects.LEVELS if best]
    if options.compile or best is None:
        runs += [("compiled here", "compile"), ("again", "compile")]
    with tempfile.TemporaryDirectory() as cache_folder:
        for name, setting in runs:
            with tempfile.TemporaryDirectory() as empty:
                measured = in_process(setting, cache_folder if setting == "compile" else empty, options.megabytes)
            if measured["level"] is None and setting != "compile":
                continue  # this processor lacks the level
            parts = parts or measured["kernels"]
            rows.append({"kernels": name, "first use s": measured["first_use"],
                         "of it processor s": measured["processor"], "functions compiled": measured["compiled"],
                         "MB/s": measured["speed"]})
    print_table(rows, title=f"first use of all text kernels with an empty cache; by itself this machine takes {best}")
    if parts:
        print_table(parts, title="compiled here, the slowest")
    return 0


def in_process(setting: str, cache: str, megabytes: float) -> dict[str, Any]:
    """Run `measure` in a new process and return its result."""
    environment = {**os.environ, "XDG_CACHE_HOME": cache, kernel_objects.SETTING: setting}
    command = [sys.executable, "-m", "tests.benchmarks.first_use", "--in-process", "--megabytes", str(megabytes)]
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def measure(megabytes: float) -> dict[str, Any]:
    """Use every kernel for the first time in this process, then measure documents repeatedly."""
    began, processor = time.monotonic(), time.process_time()
    counted = count_compilations()
    from tidewheel.data import warm_up

    warm_up.warm_up()
    first = {"first_use": round(time.monotonic() - began, 2), "processor": round(time.process_time() - processor, 2),
             "compiled": len(counted), "level": kernel_objects.level(),
             "kernels": [{"kernel": name, "processor s": round(seconds, 2)} for name, seconds in sorted(
                 ((name, seconds) for name, seconds in counted if name.startswith("tidewheel.")),
                 key=lambda pair: -pair[1])[:24]]}
    return {**first, "speed": round(speed(megabytes), 1)}


def count_compilations() -> list[tuple[str, float]]:
    """Return a list to which each compilation adds (function, processor seconds including its callees)."""
    from numba.core import event

    class Listener(event.Listener):
        def __init__(self) -> None:
            self.found: list[tuple[str, float]] = []
            self._begun: list[float] = []

        def on_start(self, event: Any) -> None:
            self._begun.append(time.process_time())

        def on_end(self, event: Any) -> None:
            function = event.data["dispatcher"].py_func
            self.found.append((f"{function.__module__}.{function.__qualname__}",
                               time.process_time() - self._begun.pop()))

    listener = Listener()
    event.register("numba:compile", listener)
    return listener.found


def speed(megabytes: float) -> float:
    """Return the megabytes per processor second of one pass over this machine's Python files, the best of five."""
    import inspect
    import pydoc_data.topics

    from tests.filtering import everything
    from tidewheel.data import textpass

    texts = [*pydoc_data.topics.topics.values(), inspect.getsource(argparse), inspect.getsource(subprocess)]
    size = sum(len(text.encode()) for text in texts)
    texts *= max(1, round(megabytes * 1e6 / size))
    best = 0.0
    for _ in range(5):
        began = time.process_time()
        textpass.measure(texts, everything(), minhash=(5, 112, 1), hashes=True)
        best = max(best, sum(len(text.encode()) for text in texts) / 1e6 / (time.process_time() - began))
    return best


if __name__ == "__main__":
    sys.exit(main())
