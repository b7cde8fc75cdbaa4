"""A workflow whose driver is SIGKILLed repeatedly has the artifacts of an undisturbed run and repeats no step.

    python -m tests.chaos.workflow --kills 5 --seed 0

It has a tokenizer, two pipelines, two trainings and two evaluations on a local cluster of three nodes. The command
prints a line for each driver, then the outcome. The exit code is 1 if a hash differs or a published step ran again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tidewheel as tw
from tidewheel import jsonlog
from tidewheel.cluster.local import LocalCluster
from tidewheel.demo.corpus import build_corpus
from tidewheel.storage import store

MODEL = {"dim": 32, "num_layers": 1, "num_heads": 2, "tie_embeddings": True}


def flow() -> tw.Workflow:
    """Return a workflow of seven steps, in which the two pipelines and the two trainings are independent."""
    tokenizer = tw.Tokenizer("bpe", "corpus/*.jsonl", vocabulary_size=512, sample_bytes=200_000)

    def pipeline(name: str, seed: int) -> tw.Pipeline:
        return (tw.Pipeline(name).set(partitions=2, seed=seed).read("corpus/*.jsonl")
                .filter(tw.filters.gopher_quality()).dedup_exact().tokenize(tokenizer)
                .pack(sequence_length=64, validation_fraction=0.1))

    corpora = [pipeline("web", 0), pipeline("books", 1)]
    runs = [tw.Train({"run": {"id": f"run{index}"}, "model": MODEL, "steps": 60, "seed": index, "precision": "fp32",
                      "reproducible": True, "batch": {"global_sequences": 4, "micro_sequences": 2, "virtual_ranks": 2},
                      "checkpoint": {"every_steps": 5}, "evaluation": {"sample_tokens": 0},
                      "elastic": {"min_workers": 1, "max_workers": 1}}, data=corpus)
            for index, corpus in enumerate(corpora)]
    return tw.Workflow("chaos", *runs, *(tw.Evaluate(f"score{index}", run) for index, run in enumerate(runs)))


def drive(output: str, raw: str, address: str, kill_after: float | None) -> tuple[int, float]:
    """Run a driver, and kill it after `kill_after` seconds; return its exit code (-9 if killed) and its seconds."""
    began = time.monotonic()
    driver = subprocess.Popen([sys.executable, "-m", "tests.chaos.workflow", "--drive", output, raw, address],
                              stderr=subprocess.DEVNULL)
    try:
        driver.wait(timeout=kill_after if kill_after is not None else 300)
    except subprocess.TimeoutExpired:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    return driver.returncode, time.monotonic() - began


def step_records(output: str) -> dict[str, dict[str, Any]]:
    """Return the record of each published step, with the numbers of its starts and ends."""
    records = {path.stem: json.loads(path.read_text()) for path in Path(output, "steps").glob("*.json")}
    result = {}
    for stem, record in records.items():
        texts = [line["text"] for line in jsonlog.read(store(output), f"logs/{stem}.jsonl")]
        result[record["name"]] = {**record, "starts": texts.count("started"), "ends": texts.count("done")}
    return result


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drive", nargs=3, metavar=("OUTPUT", "RAW", "ADDRESS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        output, raw, address = options.drive
        flow().run(output, input=raw, address=address)
        return 0
    generator = random.Random(options.seed)
    folder = tempfile.mkdtemp(prefix="tidewheel-workflow-")
    raw = f"{folder}/raw"
    build_corpus(store(raw), max_bytes=600_000)
    with LocalCluster(nodes=3) as cluster:
        os.environ.update(cluster.client_environment)
        code, seconds = drive(f"{folder}/calm", raw, cluster.address, None)
        print(f"undisturbed: exit {code} after {seconds:.1f} s", flush=True)
        kills = 0
        while True:
            limit = generator.uniform(0.1, 0.4) * seconds if kills < options.kills else None
            code, spent = drive(f"{folder}/chaos", raw, cluster.address, limit)
            state = {name: record["kind"] for name, record in step_records(f"{folder}/chaos").items()}
            print(f"driver {kills + 1}: exit {code} after {spent:.1f} s, published: {', '.join(sorted(state)) or '-'}",
                  flush=True)
            if code != -signal.SIGKILL:
                break
            kills += 1
    calm = step_records(f"{folder}/calm")
    chaos = step_records(f"{folder}/chaos")
    same_artifact = {name: chaos.get(name, {}).get("artifact", {}).get("hash") == record["artifact"]["hash"]
            and chaos[name]["key"] == record["key"] for name, record in calm.items()}
    twice = [name for name, record in chaos.items() if record["ends"] > 1]
    starts = ", ".join(f"{name} {record['starts']}" for name, record in sorted(chaos.items()))
    print(f"kills: {kills}; same artifacts: {sum(same_artifact.values())} of {len(same_artifact)}; starts: {starts}; "
          f"finished more than once: {', '.join(twice) or 'none'}")
    losses = [[record["artifact"]["validation_loss"] for record in records.values() if record["kind"] == "train"]
              for records in (calm, chaos)]
    print(f"validation losses: undisturbed {losses[0]}, killed {losses[1]}")
    return 0 if code == 0 and all(same_artifact.values()) and not twice else 1


if __name__ == "__main__":
    sys.exit(main())
