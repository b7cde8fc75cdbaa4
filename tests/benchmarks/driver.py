"""Run a pipeline in its own process and measure its cost, for benchmarks and tests of whole pipelines.

    python -m tests.benchmarks.driver RECIPE INPUT OUTPUT MARKER [--cpus N [--folder F] | --address HOST:PORT | --plain]

prints one line of JSON. `--plain` runs the same functions one after the other, without Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.storage import store

TICKS = os.sysconf("SC_CLK_TCK")
SHARED = Path(__file__).parents[2] / "../shared"
RECIPE: dict[str, Any] = {
    "name": "bench", "partitions": 8, "read": {"paths": ["*.jsonl"]},
    "steps": [{"filter": {"gopher_repetition": {}, "gopher_quality": {}, "fineweb": {}, "annotate": True}},
              "dedup_exact", {"dedup_near": {}},
              {"tokenize": {"train": {"vocabulary_size": 2000, "sample_bytes": 200_000}}},
              {"pack": {"sequence_length": 512, "validation_fraction": 0.05, "rows_per_shard": 256}}]}


def corpus(folder: Path, megabytes: float, copies: int = 1, files: int = 4) -> int:
    """Write documents of ../shared/corpus as JSONL, and `copies` - 1 edited copies, and return their number.

    A copy alters each word with a probability of 0.3, so that five words in a row rarely stay the same. In every tenth
    document the probability is 0.01, which makes it a near-duplicate.
    """
    import gzip

    source = sorted((SHARED / "corpus").glob("*.jsonl.gz"))
    if not source:
        raise SystemExit(f"no documents in {SHARED}/corpus")
    records, size = [], 0
    for line in itertools.chain.from_iterable(gzip.decompress(path.read_bytes()).splitlines() for path in source):
        if size > megabytes * 1e6:
            break
        records.append(json.loads(line))
        size += len(line)
    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    for copy in range(copies):
        generator = random.Random(copy)
        sinks = [(folder / f"{copy:02d}-{part}.jsonl").open("w") for part in range(files)]
        for index, record in enumerate(records):
            text, chance = record["text"], (0.0 if copy == 0 else 0.01 if index % 10 == 0 else 0.3)
            if chance:
                text = re.sub(r"[a-z]{3,}", functools.partial(_altered, generator, chance), text)
            sinks[index % files].write(json.dumps({**record, "id": f"{record['id']}-{copy}", "text": text}) + "\n")
            written += 1
        for sink in sinks:
            sink.close()
    return written


def _altered(generator: random.Random, chance: float, match: re.Match[str]) -> str:
    word = match.group()
    return "".join(generator.sample(word, len(word))) if generator.random() < chance else word


def set_hashes(output: str) -> dict[str, str]:
    """Return the hash of every file of both shard sets, including the manifests."""
    output_store = store(output)
    return {entry.key: output_store.hash(entry.key)
            for name in ("shards", "validation") for entry in output_store.list(name)}


@dataclass
class Cost:
    """The cost of a run: time, CPU time and memory."""

    seconds: float
    cpu_seconds: float
    """CPU seconds of all processes of the session (driver, workers and Ray's own), without Ray's start."""
    stages: list[dict[str, Any]]
    partition_bytes: int
    """UTF-8 bytes of the texts of the largest partition."""
    cpu_by_role: dict[str, float]
    """CPU seconds of living processes by `role_of`; those of ended processes are "ended"."""
    peaks: dict[str, float] = field(default_factory=dict)
    """Highest private resident memory in MB of the largest process of each role."""


class Driver:
    """The driver's process, whose session holds all processes that it starts.

    Args:
        recipe: recipe of the pipeline.
        input: folder of the documents.
        output: folder of the output.
        arguments: further arguments of this module: --cpus, --address, --plain, --code.
    """

    def __init__(self, recipe: dict[str, Any], input: str, output: str, *arguments: str) -> None:
        handle, name = tempfile.mkstemp(prefix="tw-marker-")
        os.close(handle)
        self.marker, self.peaks = Path(name), dict[str, float]()
        self.folder = tempfile.mkdtemp(prefix="twb-", dir="/tmp")  # Ray's folder; short, since socket paths are limited
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.driver", json.dumps(recipe), input, output, name,
             "--folder", self.folder, *arguments],
            start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._output: tuple[str, str] = ("", "")
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def _listen(self) -> None:
        self._output = self.process.communicate()

    def lines(self) -> list[str]:
        """Return the progress so far, as lines "stage done/total"."""
        return self.marker.read_text().split("\n")[:-1]

    def progress(self) -> str:
        """Return the last line of the progress, or "" if there is none."""
        return (self.lines() or [""])[-1]

    def wait_for_progress(self) -> None:
        """Wait for the first progress or the end of the run."""
        while not self.progress() and not self.wait(0.05):
            pass

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the process, and return whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.poll() is not None

    def watch(self) -> Cost:
        """Wait for the end, record the memory of the processes, and return the cost.

        Raises:
            RuntimeError: the run failed.
        """
        while not self.wait(0.3):
            for pid in session_members(self.process.pid):
                role, size = _memory(pid)
                self.peaks[role] = max(self.peaks.get(role, 0.0), size)
        self._reader.join()
        self.close()
        if self.process.returncode:
            raise RuntimeError(f"the run failed:\n{self._output[1][-2000:]}")
        values = json.loads(self._output[0].splitlines()[-1])
        return Cost(**values, peaks=self.peaks)

    def kill(self) -> None:
        """Send SIGKILL to all processes of the driver's session, which include its private Ray."""
        deadline = time.monotonic() + 30
        while (alive := session_members(self.process.pid)) and time.monotonic() < deadline:
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()  # reaps the process
            time.sleep(0.05)
        self.process.wait()
        self.close()

    def close(self) -> None:
        """Remove the marker and Ray's folder."""
        self.marker.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def session_members(session: int) -> list[int]:
    """Return the living processes of a session."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                state, _, _, sid = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(sid) == session and state not in "ZX":
                    members.append(int(entry.name))
    return members


def role_of(pid: int) -> str:
    """Return the role of a process: driver, worker (including Ray's actors), raylet, gcs, or agents for Ray's other
    processes; "" if the process has ended."""
    try:
        name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
    if "tests.benchmarks.driver" in name:
        return "driver"
    if name.startswith("ray::"):
        return "worker"
    return next((role for role in ("raylet", "gcs") if f"/{role}" in name.partition(" ")[0]), "agents")


def _memory(pid: int) -> tuple[str, float]:
    """Return a process's role and its private resident memory in MB."""
    role = role_of(pid)
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return role, 0.0
    match = re.search(r"RssAnon:\s+(\d+) kB", status)
    return role, int(match.group(1)) / 1e3 if match else 0.0


def session_cpu_seconds() -> Counter[str]:
    """Return the CPU seconds of this session's living processes by role, and of reaped processes as "ended"."""
    seconds: Counter[str] = Counter()
    for pid in session_members(os.getsid(0)):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            seconds[role_of(pid) or "agents"] += sum(map(int, fields[11:13])) / TICKS  # type: ignore[assignment]
            seconds["ended"] += sum(map(int, fields[13:15])) / TICKS  # type: ignore[assignment]
    return seconds


def largest_partition(output: str) -> int:
    """Return the UTF-8 bytes of the texts in the largest published partition."""
    units = store(output).child("stages", "partition", "units")
    return max(units.read_json(entry.key)["summary"]["bytes"] for entry in units.list() if entry.key.endswith(".json"))


HOLD_SECONDS = 600.0
"""Time that a run waits at `--hold`."""


class PlainDataset:
    """The methods of a Ray dataset that the stages use, run in this process to measure the cost without Ray."""

    def __init__(self, blocks: Iterator[pa.Table]) -> None:
        self.blocks = blocks

    def map_batches(self, function: Callable[[pa.Table], Any], **_: Any) -> PlainDataset:
        """Pass every block through `function`, which returns or yields tables."""
        def outputs() -> Iterator[pa.Table]:
            for block in self.blocks:
                output = function(block)
                yield from [output] if isinstance(output, pa.Table) else output

        return PlainDataset(outputs())

    def repartition(self, blocks: int, keys: Sequence[str]) -> PlainDataset:
        """Put all rows with one value of the key into one block."""
        def outputs() -> Iterator[pa.Table]:
            rows = pa.concat_tables(list(self.blocks)).combine_chunks()
            key = rows[keys[0]]
            indices = pc.subtract(key, pc.multiply(pc.divide(key, blocks), blocks))
            for index in range(blocks):
                yield rows.filter(pc.equal(indices, index))

        return PlainDataset(outputs())


def _plain_results(tasks: Sequence[Any], chain: Callable[[Any], Any], partitions: int = 1) -> Iterator[Any]:
    from tidewheel.data.stages import execute

    dataset = chain(PlainDataset(iter([pa.table({"task": [execute._encode(task)]}) for task in tasks])))
    for table in dataset.blocks:
        yield from execute.units_of(table)


def main() -> None:
    """Run the command line and print the cost."""
    parser = argparse.ArgumentParser()
    for name in ("recipe", "input", "output", "marker"):
        parser.add_argument(name)
    parser.add_argument("--cpus", type=int)
    parser.add_argument("--address")
    parser.add_argument("--folder", help="folder of a private Ray")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--code", help="folder with the user's own modules, which only the driver knows at first")
    parser.add_argument("--hold", help="line of the progress at which the run waits to be killed")
    arguments = parser.parse_args()
    sys.path += [arguments.code] if arguments.code else []
    from tidewheel.cluster.few_processes import few_processes
    from tidewheel.cluster.patient_start import patient_start
    from tidewheel.cluster.session import KEEP_WORKERS, QUIET
    from tidewheel.config import build
    from tidewheel.data import pipeline, warm_up
    from tidewheel.data.config import PipelineConfig
    from tidewheel.data.stages import execute

    os.environ.update(QUIET)
    warm_up.warm_up()
    if arguments.plain:
        execute._results = _plain_results
    else:
        import ray

        if arguments.address:
            ray.init(address=arguments.address, logging_level=logging.ERROR)
        else:
            with few_processes(), patient_start():
                ray.init(address="local", num_cpus=arguments.cpus or 2, include_dashboard=False,
                         logging_level=logging.ERROR, _temp_dir=arguments.folder, _system_config=KEEP_WORKERS)

    def on_progress(stage: str, done: int, total: int, note: str) -> None:
        with open(arguments.marker, "a") as sink:
            sink.write(f"{stage} {done}/{total}\n")
        if arguments.hold == f"{stage} {done}/{total}":
            time.sleep(HOLD_SECONDS)

    began, cpu = time.time(), session_cpu_seconds()
    recipe = build(PipelineConfig, json.loads(arguments.recipe))
    result = pipeline.run(recipe, input=arguments.input, output=arguments.output, on_progress=on_progress)
    stages = [{name: stage[name] for name in ("name", "documents_in", "documents_out", "seconds")}
              for stage in result.value["stages"]]
    seconds, spent = time.time() - began, session_cpu_seconds()
    spent.subtract(cpu)
    print(json.dumps({"seconds": seconds, "cpu_seconds": spent.total(), "cpu_by_role": spent, "stages": stages,
                      "partition_bytes": largest_partition(arguments.output)}), flush=True)
    if not arguments.plain:
        ray.shutdown()


if __name__ == "__main__":
    main()
