"""A workflow whose driver is SIGKILLed again and again: the artifacts of an undisturbed run, nothing done twice.

    python -m tests.chaos.workflow --kills 5 --seed 0

Tokenizer -> two pipelines -> two trainings -> two evaluations on a local cluster of three nodes. Prints a line for each
life of the driver, then the verdict; exit code 1 if a hash differs or a published step was run again.
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
    """What is run: seven steps, of which the two trainings and the two pipelines do not depend on each other."""
    tokenizer = tw.Tokenizer("bpe", "corpus/*.jsonl", vocabulary_size=512, sample_bytes=200_000)

    def pipeline(name: str, seed: int) -> tw.Pipeline:
        return (tw.Pipeline(name).set(partitions=2, seed=seed).read("corpus/*.jsonl")
                .filter(tw.filters.gopher_quality()).dedup_exact().tokenize(tokenizer)
                .pack(sequence_length=64, validation_fraction=0.1))

    corpora = [pipeline("web", 0), pipeline("books", 1)]
    runs = [tw.Train({"run": {"id": f"run{number}"}, "model": MODEL, "steps": 60, "seed": number, "precision": "fp32",
                      "reproducible": True, "batch": {"global_sequences": 4, "micro_sequences": 2, "virtual_ranks": 2},
                      "checkpoint": {"every_steps": 5}, "evaluation": {"sample_tokens": 0},
                      "elastic": {"min_workers": 1, "max_workers": 1}}, data=corpus)
            for number, corpus in enumerate(corpora)]
    return tw.Workflow("chaos", *runs, *(tw.Evaluate(f"score{number}", run) for number, run in enumerate(runs)))


def drive(output: str, raw: str, address: str, kill_after: float | None) -> tuple[int, float]:
    """One life of a driver; its exit code (-9: killed) and its seconds."""
    began = time.monotonic()
    driver = subprocess.Popen([sys.executable, "-m", "tests.chaos.workflow", "--drive", output, raw, address],
                              stderr=subprocess.DEVNULL)
    try:
        driver.wait(timeout=kill_after if kill_after is not None else 300)
    except subprocess.TimeoutExpired:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    return driver.returncode, time.monotonic() - began


def found(output: str) -> dict[str, dict[str, Any]]:
    """Records by step, and how often each was begun."""
    records = {path.stem: json.loads(path.read_text()) for path in Path(output, "steps").glob("*.json")}
    begun = {each: sum(line["text"] == "started" for line in jsonlog.read(store(output), f"logs/{each}.jsonl"))
             for each in records}
    done = {each: sum(line["text"] == "done" for line in jsonlog.read(store(output), f"logs/{each}.jsonl"))
            for each in records}
    return {record["name"]: {**record, "begun": begun[each], "done": done[each]} for each, record in records.items()}


def main() -> int:
    """See the module."""
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
            state = {name: record["kind"] for name, record in found(f"{folder}/chaos").items()}
            print(f"driver {kills + 1}: exit {code} after {spent:.1f} s, published: {', '.join(sorted(state)) or '-'}",
                  flush=True)
            if code != -signal.SIGKILL:
                break
            kills += 1
    calm, chaos = found(f"{folder}/calm"), found(f"{folder}/chaos")
    same = {name: chaos.get(name, {}).get("artifact", {}).get("hash") == record["artifact"]["hash"]
            and chaos[name]["key"] == record["key"] for name, record in calm.items()}
    twice = [name for name, record in chaos.items() if record["done"] > 1]
    begun = ", ".join(f"{name} {record['begun']}" for name, record in sorted(chaos.items()))
    print(f"kills: {kills}; the same artifacts: {sum(same.values())} of {len(same)}; begun: {begun}; finished more "
          f"than once: {', '.join(twice) or 'none'}")
    losses = [[record["artifact"]["validation_loss"] for record in records.values() if record["kind"] == "train"]
              for records in (calm, chaos)]
    print(f"validation losses: undisturbed {losses[0]}, killed {losses[1]}")
    return 0 if code == 0 and all(same.values()) and not twice else 1


if __name__ == "__main__":
    sys.exit(main())
