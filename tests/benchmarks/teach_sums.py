"""Teach a model sums by GRPO, and measure it on held-out sums before and after, beside TRL's GRPO, with five seeds.

    python -m tests.benchmarks.teach_sums [--seeds 5] [--base-steps 300] [--steps 40] [--ours-only]

A seed decides the text, its base model, which 20 of the 100 sums are held out of the prompts, and all draws. The base
trains on text in which half of the sums are wrong. Both sides then start from it, TRL from its export to Hugging Face's
format, with the same prompts, rewards, groups (16 of 8 answers a step), steps, optimizer and loss, and one thread each.

`accuracy` is the probability that the model answers a held-out sum right at temperature 1, computed from its logits.
`seconds` are of the whole training. Both sides sample in the process that trains (`rollouts.generators.colocated`), and
processor seconds are those of this process. The exit code is 1 unless, over the seeds, the 95 % intervals before and
after do not meet, and the paired difference to TRL is not below 0 with its whole interval.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.benchmarks.short_answers import interval
from tests.sums import EOS, sums_run, token_ids, train_base, write_sums
from tidewheel import jsonlog, storage
from tidewheel.checkpoint.conversion import export
from tidewheel.console import print_table
from tidewheel.elastic.trainer import fit_local
from tidewheel.inference.writer import Writer
from tidewheel.post.ledger import LOG

GROUPS, ANSWERS, ANSWER_TOKENS, RATE = 16, 8, 4, 3e-4
CURVE = 5
"""Steps whose mean reward is a point of the curve."""
Logits = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Taught:
    """What one side reached with one seed."""

    accuracy: float
    greedy: float
    """Share of the held-out sums whose most likely answer is right."""
    rewards: list[float]
    """Mean reward of each step."""
    seconds: float
    processor_seconds: float


def records(file: Path) -> list[dict[str, str]]:
    """Return the prompts of a file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


@torch.no_grad()
def accuracy(logits: Logits, sums: list[dict[str, str]]) -> tuple[float, float]:
    """Return the mean probability of the right answers, and the share of sums whose most likely answer is right.

    Args:
        logits: from token ids, int64 [1, T], to logits [1, T, V].
        sums: with "prompt" and "reference".
    """
    likely, greedy = [], []
    for line in sums:
        prompt, answer = token_ids(line["prompt"]), [*token_ids(line["reference"]), EOS]
        tokens = torch.tensor([prompt + answer])
        rows = logits(tokens)[0, len(prompt) - 1:-1].float().log_softmax(-1)
        wanted = torch.tensor(answer)
        likely.append(float(rows.gather(1, wanted[:, None]).sum().exp()))
        greedy.append(bool((rows.argmax(-1) == wanted).all()))
    return float(np.mean(likely)), float(np.mean(greedy))


def logits_of(run: str) -> Logits:
    """Return the logits of a run's model."""
    model = Writer.open(run).model

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), torch.zeros_like(tokens))
        return result

    return logits


def ours(folder: Path, base: str, steps: int, seed: int, colocated: bool = True) -> Taught:
    """Teach with Tidewheel: in one process, or with a generator in a process of its own."""
    config = sums_run(
        folder, f"taught-{seed}", base, steps, f"batch.global_sequences={GROUPS * ANSWERS}",
        f"batch.micro_sequences={GROUPS * ANSWERS}", "batch.virtual_ranks=1",  # all answers at once, as TRL does
        "batch.pad_to_multiple_of=8", f"rollouts.group={ANSWERS}", f"rollouts.seed={seed}", f"seed={seed}",
        f"optimizer.learning_rate={RATE}", "checkpoint.memory_tier.every_steps=0",
        f"rollouts.generators.colocated={str(colocated).lower()}")
    began, before = time.monotonic(), time.process_time()
    fit_local(config)
    seconds, processor = time.monotonic() - began, time.process_time() - before
    lines = [line for line in jsonlog.read(storage.store(config.run_uri), LOG) if line["kind"] == "step"]
    rewards = [line["reward"] for line in lines]
    if not colocated:  # else it is in this process
        processor += sum(line["processor_seconds"] for line in lines)
    return Taught(*accuracy(logits_of(config.run_uri), records(folder / "held_out.jsonl")), rewards, seconds, processor)


def theirs(folder: Path, base: str, steps: int, seed: int) -> Taught:
    """Teach with TRL in this process."""
    from tests.benchmarks.trl_grpo import trainer_of

    export(base, str(folder / "exported"))
    began, before = time.monotonic(), time.process_time()
    trainer = trainer_of(folder, groups=GROUPS, answers=ANSWERS, answer_tokens=ANSWER_TOKENS, learning_rate=RATE,
                         max_steps=steps, save_strategy="no", seed=seed)
    trainer.train()
    seconds, processor = time.monotonic() - began, time.process_time() - before
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    model = trainer.model.eval()
    return Taught(*accuracy(lambda tokens: model(tokens).logits, records(folder / "held_out.jsonl")), rewards, seconds,
                  processor)


def _of(values: list[float], form: str = ".3f") -> str:
    mean, width = interval(values)
    return f"{mean:{form}} ± {width:{form}}"


def report(before: list[tuple[float, float]], sides: dict[str, list[Taught]], base_seconds: list[float]) -> int:
    """Print the tables; return 1 if a goal is missed."""
    rows: list[dict[str, Any]] = [
        {"": "base", "accuracy, held out": _of([one[0] for one in before]), "greedy": _of([one[1] for one in before]),
         "seconds": _of(base_seconds, ".1f"), "processor seconds": ""}]
    for name, taught in sides.items():
        rows.append({"": name, "accuracy, held out": _of([one.accuracy for one in taught]),
                     "greedy": _of([one.greedy for one in taught]),
                     "seconds": _of([one.seconds for one in taught], ".1f"),
                     "processor seconds": _of([one.processor_seconds for one in taught], ".1f")})
    print_table(rows, title=f"{len(before)} seeds, mean and 95 % interval")
    curve: list[dict[str, Any]] = []
    for begin in range(0, len(next(iter(sides.values()))[0].rewards), CURVE):
        curve.append({"steps": f"{begin + 1}-{begin + CURVE}", **{
            name: _of([float(np.mean(one.rewards[begin:begin + CURVE])) for one in taught])
            for name, taught in sides.items()}})
    print_table(curve, title="mean reward of the answers")
    start, start_width = interval([one[0] for one in before])
    end, end_width = interval([one.accuracy for one in sides["Tidewheel"]])
    missed = end - end_width <= start + start_width
    if "TRL" in sides:
        pairs = zip(sides["Tidewheel"], sides["TRL"])
        mean, width = interval([one.accuracy - other.accuracy for one, other in pairs])
        print(f"accuracy, Tidewheel minus TRL on the same seed: {mean:+.3f} ± {width:.3f}")
        missed = missed or mean + width < 0
    return int(missed)


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--base-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ours-only", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sides: dict[str, list[Taught]] = {"Tidewheel": []} | ({} if options.ours_only else {"TRL": []})
    before: list[tuple[float, float]] = []
    base_seconds: list[float] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="teach-sums-") as name:
        for seed in range(options.seeds):
            folder = Path(name) / str(seed)
            folder.mkdir()
            write_sums(folder, seed=seed)
            started = time.monotonic()
            base = train_base(folder, options.base_steps, seed=seed)
            base_seconds.append(time.monotonic() - started)
            before.append(accuracy(logits_of(base), records(folder / "held_out.jsonl")))
            for side, teach in (("Tidewheel", ours), ("TRL", theirs)):
                if side in sides:
                    sides[side].append(teach(folder, base, options.steps, seed))
            print(f"seed {seed}: accuracy {before[-1][0]:.3f} before; " + "; ".join(
                f"{side} {taught[-1].accuracy:.3f} in {taught[-1].seconds:.1f} s ({taught[-1].processor_seconds:.1f} s "
                "of processors)" for side, taught in sides.items()), flush=True)
    code = report(before, sides, base_seconds)
    print(f"{time.monotonic() - began:.0f} s in all")
    return code


if __name__ == "__main__":
    sys.exit(main())
