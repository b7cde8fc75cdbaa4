"""Flip bits in runs with `guards.recomputation`, and measure which are found, when, and what the checks cost.

    python -m tests.benchmarks.silent_corruption [--flips 500] [--clean-steps 10000] [--share 0.01]

Three gloo ranks train a tiny model (ddp) with the real step and the real checks. One flip at a time hits one rank; its
place in the run, rank, tensor, element and bit follow from a seed. Places are weights, optimizer state, gradients of
micro-batches, activations and data. `--flips` are shared out over the five places, at `--share` and again at 100 % of
the steps.

A flip in weights or optimizer state is waited for until the next check. If all copies agree by then, and no weight
differed meanwhile, it has done no harm: `gone`. If weights differed and agree again, because the rounding of an update
took the difference away, it has `healed`: its traces are in all copies alike, and nothing can find it. A flip in a
gradient, an activation or a batch lasts for one step, and is found in that step or never; it is gone if the step was
checked and no bit of any gradient differed. So the table also has cores that flip a bit in every step. After each
finding the state goes back to the last one known good.

The exit code is 1 if a check passes over copies that differ, if a finding names another rank, if a clean
step raises an alarm, or if the checks cost more than 2 % of the processor time at `--share`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from tests.bit_flips import PLACES, STATE, Rig, settings
from tests.ranks import on_ranks
from tests.unit.train.helpers import write_shards
from tidewheel.console import print_table
from tidewheel.train.reproducible.kernels import deterministic_kernels

RANKS = 3
BOUND = 0.02
BAD_CORES = 20
"""Cores that flip a bit in every step, of each place."""
PAIRS = {"tiny": 40, "larger": 10}
"""Checked and unchecked steps whose processor time is compared, by model."""
LAYOUT = ("parallel.data=ddp", "batch.virtual_ranks=3", "batch.global_sequences=3", "batch.micro_sequences=1",
          "model.num_layers=1")
LARGER = ("batch.global_sequences=6", "batch.micro_sequences=2", "optimizer.learning_rate=1e-4",
          "model={dim: 192, num_layers: 6, num_heads: 3, num_kv_heads: 3, ffn_dim: 512, tie_embeddings: true}")
"""2.7 M parameters and 512 tokens on each rank, for the cost alone."""


def flips_of_state(rig: Rig, place: str, count: int, share: float) -> list[dict[str, Any]]:
    """Flip bits of weights or moments, and train on until each is found, or a check finds all copies equal."""
    results = []
    for number in range(count):
        random = Random(f"{place} {number}")
        wrong = random.randrange(RANKS)
        rig.step += random.randrange(round(1 / share))  # any place between two checks
        rig.mark()
        first, touched, error = rig.step + 1, False, None
        error = rig.found(place if rig.rank == wrong else "", random)
        while error is None and not rig.checked:
            touched = touched or (place == "optimizer" and weights_differ(rig))
            error = rig.found()
        reached = touched or place == "weights"
        results.append({"place": place, "steps": rig.step - first + 1 if error else None,
                        "harmless": not (error or reached), "right": error.ranks == (wrong,) if error else True,
                        "healed": error is None and reached and not weights_differ(rig)})
        if error is not None:
            rig.go_back()
    return results


def weights_differ(rig: Rig) -> bool:
    """Return whether the ranks hold different weights now."""
    digest = rig.checks._replicas.digests()[:1]
    least = torch.cat((digest, ~digest))
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least[0]) != ~int(least[1])


def flips_of_a_step(rig: Rig, place: str, count: int, share: float) -> list[dict[str, Any]]:
    """Flip bits of gradients, activations or data, each for one step; the run goes on with what is not found."""
    results = []
    rig.mark()
    for number in range(count):
        random = Random(f"{place} {number}")
        wrong = random.randrange(RANKS)
        error = rig.found(place if rig.rank == wrong else "", random)
        # checked, and nothing found: no bit has changed
        results.append({"place": place, "steps": 1 if error else None, "harmless": rig.checked and error is None,
                        "right": error.ranks == (wrong,) if error else True})
        if error is not None or number % 20 == 19:
            rig.go_back()  # a flip that nobody found may have spoilt the weights
    return results


def bad_cores(rig: Rig, place: str, count: int) -> list[dict[str, Any]]:
    """Let a rank flip a bit in every step until it is found."""
    results = []
    rig.go_back()
    for number in range(count):
        random = Random(f"bad {place} {number}")
        wrong = random.randrange(RANKS)
        rig.step += random.randrange(100)
        first, error = rig.step + 1, None
        while error is None and rig.step < first + 400:
            error = rig.found(place if rig.rank == wrong else "", random)
        results.append({"place": place, "steps": rig.step - first + 1 if error else None, "harmless": False,
                        "right": error.ranks == (wrong,) if error else True})
        rig.go_back()
    return results


def clean(rig: Rig, steps: int) -> int:
    """Return the number of alarms in steps without a fault."""
    return sum(rig.found() is not None for _ in range(steps))


def cost(rig: Rig, pairs: int) -> tuple[float, float]:
    """Return the median CPU seconds of all ranks for a step without a check and with one."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * (pairs + 2)):
        checked = number % 2 == 1
        used = time.process_time()
        rig.train(checked=checked)
        seconds = torch.tensor([time.process_time() - used])
        dist.all_reduce(seconds)
        if number >= 4:
            taken[checked].append(float(seconds))
    return statistics.median(taken[False]), statistics.median(taken[True])


def work(folder: str, flips: int, clean_steps: int, share: float) -> None:
    """Measure everything, as one of the ranks; rank 0 writes the figures down."""
    rank = dist.get_rank()
    results: dict[str, Any] = {"cost": {}}

    def costs(name: str, rig: Rig) -> None:
        results["cost"][name] = taken = cost(rig, PAIRS[name])
        if rank == 0:
            print(costs_text(name, taken, share), flush=True)

    def done(name: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if rank == 0:
            print(time.strftime("%H:%M:%S"), row(name, lines), flush=True)
        return lines

    with deterministic_kernels():
        for each in (1.0, share):
            rig = Rig(settings(Path(folder), f"at{each:g}", each, *LAYOUT), rank, RANKS)
            results[f"{each:g}"] = [
                line for place in PLACES for line in done(f"{place}, {each:.0%}", (
                    flips_of_state(rig, place, flips // len(PLACES), each) if place in STATE
                    else flips_of_a_step(rig, place, flips // len(PLACES), each)))]
            if each == 1.0:
                costs("tiny", rig)
            else:
                results["bad"] = [line for place in PLACES if place not in STATE for line in done(
                    f"{place} in every step", bad_cores(rig, place, min(BAD_CORES, flips // len(PLACES))))]
            rig.go_back()
            results[f"alarms {each:g}"] = clean(rig, clean_steps_at(each, clean_steps))
            rig.close()
        if (larger := Path(folder, "long")).exists():
            rig = Rig(settings(larger, "larger", 1.0, *LAYOUT, *LARGER), rank, RANKS)
            costs("larger", rig)
            rig.close()
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))


def clean_steps_at(share: float, steps: int) -> int:
    """Return the number of clean steps: a tenth where each is checked, which are still more checks."""
    return steps // 10 if share == 1.0 else steps


def costs_text(name: str, taken: tuple[float, float], share: float) -> str:
    """Return what a check costs in words."""
    without, checked = taken
    return (f"{name} model: a step takes {1000 * without:.1f} ms of processor time on all ranks, a checked one "
            f"{1000 * checked:.1f} ms: {share * (checked - without) / without:.2%} more at {share:.0%}")


def row(name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row of the table."""
    steps = sorted(line["steps"] for line in lines if line["steps"])
    return {"place": name, "flips": len(lines), "found": f"{len(steps)} ({len(steps) / max(1, len(lines)):.0%})",
            "gone": sum(line["harmless"] for line in lines),
            "healed": sum(line.get("healed", False) for line in lines),
            "missed": sum(not (line["steps"] or line["harmless"] or line.get("healed")) for line in lines),
            "named": f"{sum(line['right'] and bool(line['steps']) for line in lines)} of {len(steps)}",
            "median steps": f"{statistics.median(steps):g}" if steps else "-", "worst": steps[-1] if steps else "-"}


def table(results: dict[str, Any], share: float) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of the table, and what is not as it should be."""
    rows, problems = [], []
    for each in (share, 1.0):
        for place in PLACES:
            lines = [line for line in results[f"{each:g}"] if line["place"] == place]
            rows.append(row(f"{place}, {each:.0%} of the steps", lines))
            if place in STATE and rows[-1]["missed"]:
                problems.append(f"{rows[-1]['missed']} flips of {place} were missed")
    for place in PLACES:
        if place not in STATE:
            rows.append(row(f"{place} in every step, {share:.0%}",
                            [line for line in results["bad"] if line["place"] == place]))
    everything = [line for name in (f"{share:g}", "1", "bad") for line in results[name]]
    if not all(line["right"] for line in everything):
        problems.append("a finding names another rank")
    return rows, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=500)
    parser.add_argument("--clean-steps", type=int, default=10_000)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--output", default="", help="also write what the checks cost as JSON, for tidewheel plan "
                        "goodput")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder, "shards"), rows=200)
        write_shards(Path(folder, "long", "shards"), rows=60, length=256)
        on_ranks(RANKS, work, folder, options.flips, options.clean_steps, options.share)
        results = json.loads(Path(folder, "results.json").read_text())
    rows, problems = table(results, options.share)
    print_table(rows)
    for each in (options.share, 1.0):
        alarms = results[f"alarms {each:g}"]
        print(f"{alarms} alarms in {clean_steps_at(each, options.clean_steps):,} clean steps at {each:.0%}")
        problems += [f"{alarms} false alarms"] if alarms else []
    for without, checked in results["cost"].values():
        extra = options.share * (checked - without) / without
        problems += [f"the checks cost {extra:.2%}"] if extra > BOUND else []
    if options.output:
        without, checked = list(results["cost"].values())[-1]  # the larger model
        Path(options.output).write_text(json.dumps({
            "kind": "silent_corruption", "check_share": max(0.0, options.share * (checked - without) / without)}))
    print(f"{time.monotonic() - began:.0f} s")
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
