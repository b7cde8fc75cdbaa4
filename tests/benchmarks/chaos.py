"""Kill the driver, a worker process or a whole node at random and run again until the pipeline is done.

    python -m tests.benchmarks.chaos [--kills 10] [--nodes 2] [--seed 0] [--megabytes 20]

The pipeline runs on a `LocalCluster`. When it finishes before all kills are used, the next run starts with an empty
output. Every finished output must have the bytes of the undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import time
from pathlib import Path

from tests.benchmarks.driver import RECIPE, Driver, corpus, set_hashes
from tidewheel.cluster.faults import kill_process
from tidewheel.cluster.local import LocalCluster
from tidewheel.shards.verify import verify

VICTIMS = ("driver", "worker", "node")


class Chaos:
    """A cluster under attack.

    Args:
        cluster: cluster of the pipeline.
        chance: random generator that chooses the victims and the times.
        seconds: duration of an undisturbed run; kills are a fifth of it apart on average, after its start.
    """

    def __init__(self, cluster: LocalCluster, chance: random.Random, seconds: float) -> None:
        self.cluster, self.chance, self.seconds = cluster, chance, seconds
        self.rows: list[tuple[str, str, str, str]] = []

    def finish(self, input: str, output: str, kills: int) -> int:
        """Run with at most `kills` kills until the output is complete, and return how many kills there were."""
        kills_done = 0
        starts = 0
        while True:
            driver, began = Driver(RECIPE, input, output, "--address", self.cluster.address), time.monotonic()
            starts += 1
            driver.wait_for_progress()
            while not driver.wait(self._pause() if kills_done < kills else 1800):
                if kills_done >= kills:
                    raise RuntimeError("the run did not end after the last kill")
                at = driver.progress() or "start"
                victim = self.chance.choice(VICTIMS)
                description = self._kill(victim, driver)
                if description:
                    kills_done += 1
                    seconds = f"{time.monotonic() - began:.1f} s"
                    self.rows.append((f"{len(self.rows) + 1}", seconds, victim + description, at))
            code = driver.process.returncode
            driver.close()
            if code == 0:
                print(f"  finished with {kills_done} kills and {starts} starts", flush=True)
                return kills_done

    def _pause(self) -> float:
        return self.seconds * self.chance.uniform(0.02, 0.4)

    def _kill(self, victim: str, driver: Driver) -> str:
        """Kill a process of a kind and describe it; "" if there is none."""
        if victim == "driver":
            driver.kill()
            return f" {driver.process.pid}"
        node = self.chance.choice(self.cluster.nodes)
        if victim == "node":
            count = len(self.cluster.kill_node(node))
            self.cluster.add_node()
            return f" {node.node_id[:8]}, {count} processes"
        workers = [pid for pid in self.cluster.processes(node) if _is_worker(pid)]
        if not workers:
            return ""
        pid = self.chance.choice(sorted(workers))
        with contextlib.suppress(ProcessLookupError):
            kill_process(pid)
        return f" {pid}"


def _is_worker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
    return False


def main() -> None:
    """Run the command line and print the kills."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--megabytes", type=float, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tw-chaos-") as name, LocalCluster(arguments.nodes) as cluster:
        root = Path(name)
        documents = corpus(root / "in", arguments.megabytes)
        quiet = Driver(RECIPE, str(root / "in"), str(root / "quiet"), "--address", cluster.address).watch()
        expected = set_hashes(str(root / "quiet"))
        print(f"{documents:,} documents, {len(expected)} files, {quiet.seconds:.0f} s undisturbed", flush=True)
        chaos = Chaos(cluster, random.Random(arguments.seed), quiet.seconds)
        kills_left = arguments.kills
        wrong = 0
        outputs = 0
        while kills_left > 0:
            output = str(root / f"killed-{outputs}")
            kills_left -= chaos.finish(str(root / "in"), output, kills_left)
            outputs += 1
            problems = verify(f"{output}/shards")
            wrong += set_hashes(output) != expected or bool(problems)
    print("| kill | after the start of the run | of | progress |\n|---|---|---|---|")
    for row in chaos.rows:
        print("| " + " | ".join(row) + " |")
    print(f"{len(chaos.rows)} kills, {outputs} outputs, {wrong} of them with different bytes")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
