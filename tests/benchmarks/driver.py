"""One run of a pipeline in a process of its own, with what it costs; benchmarks and tests of whole pipelines share it.

    python -m tests.benchmarks.driver RECIPE INPUT OUTPUT MARKER [--cpus N [--folder F] | --address HOST:PORT | --plain]

prints one line of JSON. `--plain` runs the same stages without Ray: the same functions, one after the other.
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
    """Documents of ../shared/corpus as JSONL, and `copies` - 1 times again with edits; returns their number.

    In a copy every word is altered with a chance of 0.3, so that five words in a row rarely stay the same; in every
    tenth document with a chance of 0.01, so that it is a near-duplicate.
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
    number = 0
    for copy in range(copies):
        generator = random.Random(copy)
        sinks = [(folder / f"{copy:02d}-{part}.jsonl").open("w") for part in range(files)]
        for place, record in enumerate(records):
            text, chance = record["text"], (0.0 if copy == 0 else 0.01 if place % 10 == 0 else 0.3)
            if chance:
                text = re.sub(r"[a-z]{3,}", functools.partial(_altered, generator, chance), text)
            sinks[place % files].write(json.dumps({**record, "id": f"{record['id']}-{copy}", "text": text}) + "\n")
            number += 1
        for sink in sinks:
            sink.close()
    return number


def _altered(generator: random.Random, chance: float, found: re.Match[str]) -> str:
    word = found.group()
    return "".join(generator.sample(word, len(word))) if generator.random() < chance else word


def set_hashes(output: str) -> dict[str, str]:
    """Hash of every file of both shard sets, manifests included."""
    place = store(output)
    return {entry.key: place.hash(entry.key) for name in ("shards", "validation") for entry in place.list(name)}


@dataclass
class Cost:
    """What a run took."""

    seconds: float
    cpu_seconds: float
    """Of all processes of the session: driver, workers, Ray's own; without Ray's start."""
    stages: list[dict[str, Any]]
    partition_bytes: int
    """UTF-8 bytes of the texts of the largest partition."""
    cpu_by_role: dict[str, float]
    """CPU seconds by `role_of`, of living processes; those of ended ones are "ended"."""
    peaks: dict[str, float] = field(default_factory=dict)
    """Private resident memory in MB at its highest, of the largest process of each role."""


class Driver:
    """The driver's process; everything it starts is in its session.

    Args:
        arguments: of this module, behind the output: --cpus, --address, --plain, --code.
    """

    def __init__(self, recipe: dict[str, Any], input: str, output: str, *arguments: str) -> None:
        handle, name = tempfile.mkstemp(prefix="tw-marker-")
        os.close(handle)
        self.marker, self.peaks = Path(name), dict[str, float]()
        self.folder = tempfile.mkdtemp(prefix="twb-", dir="/tmp")  # of its Ray; short: socket paths are limited
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.driver", json.dumps(recipe), input, output, name,
             "--folder", self.folder, *arguments],
            start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._said: tuple[str, str] = ("", "")
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def _listen(self) -> None:
        self._said = self.process.communicate()

    def told(self) -> list[str]:
        """Progress so far, "stage done/total" each."""
        return self.marker.read_text().split("\n")[:-1]

    def progress(self) -> str:
        """The last of them."""
        return (self.told() or [""])[-1]

    def begun(self) -> None:
        """Wait for the first progress, or the end."""
        while not self.progress() and not self.wait(0.05):
            pass

    def wait(self, seconds: float) -> bool:
        """True when the process has ended within so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.poll() is not None

    def watch(self) -> Cost:
        """Wait for the end, with an eye on memory; RuntimeError when the run failed."""
        while not self.wait(0.3):
            for pid in session_members(self.process.pid):
                role, size = _memory(pid)
                self.peaks[role] = max(self.peaks.get(role, 0.0), size)
        self._reader.join()
        self.close()
        if self.process.returncode:
            raise RuntimeError(f"the run failed:\n{self._said[1][-2000:]}")
        values = json.loads(self._said[0].splitlines()[-1])
        return Cost(**values, peaks=self.peaks)

    def kill(self) -> None:
        """SIGKILL to the driver and what is left of its session: its Ray, when it has one of its own."""
        deadline = time.monotonic() + 30
        while (alive := session_members(self.process.pid)) and time.monotonic() < deadline:
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()  # buries it
            time.sleep(0.05)
        self.process.wait()
        self.close()

    def close(self) -> None:
        """Remove the marker and Ray's folder."""
        self.marker.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def session_members(session: int) -> list[int]:
    """Processes of a session that are not dead."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                state, _, _, sid = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(sid) == session and state not in "ZX":
                    found.append(int(entry.name))
    return found


def role_of(pid: int) -> str:
    """driver, worker (Ray's own actors too), raylet, gcs, agents (and whatever else Ray starts); "" of a process that
    has ended."""
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
    """(role, private resident MB) of a process."""
    role = role_of(pid)
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return role, 0.0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return role, int(found.group(1)) / 1e3 if found else 0.0


def session_cpu_seconds() -> Counter[str]:
    """CPU time by role of all living processes of our session; "ended" are the dead that were waited for."""
    found: Counter[str] = Counter()
    for pid in session_members(os.getsid(0)):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[role_of(pid) or "agents"] += sum(map(int, fields[11:13])) / TICKS  # type: ignore[assignment]
            found["ended"] += sum(map(int, fields[13:15])) / TICKS  # type: ignore[assignment]
    return found


def largest_partition(output: str) -> int:
    """UTF-8 bytes of the texts of the largest partition that was published."""
    place = store(output)
    return max(place.read_json(entry.key)["summary"]["bytes"] for entry in place.list("stages/partition/units")
               if entry.key.endswith(".json"))


class PlainDataset:
    """As much of a Ray dataset as the stages use, in this process: what the plain functions cost without Ray."""

    def __init__(self, blocks: Iterator[pa.Table]) -> None:
        self.blocks = blocks

    def map_batches(self, function: Callable[[pa.Table], Any], **_: Any) -> PlainDataset:
        """Every block through `function`, which gives a table or several."""
        def outputs() -> Iterator[pa.Table]:
            for block in self.blocks:
                made = function(block)
                yield from [made] if isinstance(made, pa.Table) else made

        return PlainDataset(outputs())

    def repartition(self, blocks: int, keys: Sequence[str]) -> PlainDataset:
        """All rows with one value of the key in one block."""
        def outputs() -> Iterator[pa.Table]:
            rows = pa.concat_tables(list(self.blocks)).combine_chunks()
            places = pc.subtract(rows[keys[0]], pc.multiply(pc.divide(rows[keys[0]], blocks), blocks))
            for number in range(blocks):
                yield rows.filter(pc.equal(places, number))

        return PlainDataset(outputs())


def _plain_results(tasks: Sequence[Any], chain: Callable[[Any], Any], partitions: int = 1) -> Iterator[Any]:
    from tidewheel.data.stages import execute

    dataset = chain(PlainDataset(iter([pa.table({"task": [execute._encode(task)]}) for task in tasks])))
    for table in dataset.blocks:
        yield from execute.units_of(table)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    for name in ("recipe", "input", "output", "marker"):
        parser.add_argument(name)
    parser.add_argument("--cpus", type=int)
    parser.add_argument("--address")
    parser.add_argument("--folder", help="of a private Ray")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--code", help="folder with modules of the user's own; only the driver knows it at first")
    given = parser.parse_args()
    sys.path += [given.code] if given.code else []
    from tidewheel.cluster.few_processes import few_processes
    from tidewheel.cluster.session import KEEP_WORKERS, QUIET
    from tidewheel.config import build
    from tidewheel.data import pipeline, warm_up
    from tidewheel.data.config import PipelineConfig
    from tidewheel.data.stages import execute

    os.environ.update(QUIET)
    warm_up.warm_up()
    if given.plain:
        execute._results = _plain_results
    else:
        import ray

        if given.address:
            ray.init(address=given.address, logging_level=logging.ERROR)
        else:
            with few_processes():
                ray.init(address="local", num_cpus=given.cpus or 2, include_dashboard=False,
                         logging_level=logging.ERROR, _temp_dir=given.folder, _system_config=KEEP_WORKERS)

    def told(stage: str, done: int, total: int, note: str) -> None:
        with open(given.marker, "a") as sink:
            sink.write(f"{stage} {done}/{total}\n")

    began, cpu = time.time(), session_cpu_seconds()
    done = pipeline.run(build(PipelineConfig, json.loads(given.recipe)), input=given.input, output=given.output,
                        on_progress=told)
    stages = [{name: stage[name] for name in ("name", "documents_in", "documents_out", "seconds")}
              for stage in done.value["stages"]]
    seconds, spent = time.time() - began, session_cpu_seconds()
    spent.subtract(cpu)
    print(json.dumps({"seconds": seconds, "cpu_seconds": spent.total(), "cpu_by_role": spent, "stages": stages,
                      "partition_bytes": largest_partition(given.output)}), flush=True)
    if not given.plain:
        ray.shutdown()


if __name__ == "__main__":
    main()
