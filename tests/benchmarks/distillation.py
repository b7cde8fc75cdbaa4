"""Train small students on real text with and without a teacher, on the same tokens.

    python -m tests.benchmarks.distillation [--output FOLDER] [--seeds 3] [--steps 100] [--teacher-steps 300]

The text is the demo's corpus. A teacher of 2 layers trains first; `tidewheel teacher`'s stage then keeps its 32 most
likely tokens at each position of the students' set. Students of one layer train on the cross-entropy alone, with half
of the weight on the teacher, and with all of it. Exit code 1 unless both students of the teacher are better for each
seed.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tidewheel import storage
from tidewheel.config import build
from tidewheel.data.tokenize.pack import pack
from tidewheel.data.tokenize.tokenizer import train_bpe
from tidewheel.demo.corpus import build_corpus
from tidewheel.elastic.trainer import fit_local
from tidewheel.inference.columns import FrozenModel
from tidewheel.inference.teacher import make
from tidewheel.shards.format import write_shard
from tidewheel.shards.manifest import Manifest, write_manifest
from tidewheel.shards.tokenizer import load
from tidewheel.train.config import TrainConfig

LENGTH, VOCABULARY, TOP_K, BYTES = 128, 512, 32, 1_000_000
TEACHER = {"dim": 64, "num_layers": 2, "num_heads": 2, "tie_embeddings": True}
STUDENT = {"dim": 32, "num_layers": 1, "num_heads": 1, "tie_embeddings": True}


def write_sets(folder: Path) -> None:
    """Write a training and a validation set of the demo's corpus: every tenth document is held out."""
    corpus = storage.store(folder / "corpus")
    built = build_corpus(corpus, max_bytes=BYTES, bad_records=False)
    texts = [json.loads(line)["text"] for key in built.files for line in corpus.read(key).splitlines()]
    tokenizer = train_bpe(texts, VOCABULARY)
    encoder = load(tokenizer)
    training = [text for index, text in enumerate(texts) if index % 10]
    for name, chosen in (("shards", training), ("validation", texts[::10])):
        tokens, offsets = encoder.encode(chosen)
        table = pack([f"{name}{index}" for index in range(len(chosen))], tokens, offsets, sequence_length=LENGTH,
                     token_dtype="uint16", pad_id=encoder.pad)
        target = storage.store(folder / name)
        stamp = target.write("tokenizer.json", tokenizer)
        write_manifest(target, Manifest(
            sequence_length=LENGTH, token_dtype="uint16", vocabulary_size=encoder.padded_size,
            tokenizer=encoder.manifest(stamp.hash), recipe_hash="benchmark", evaluation_sets=(),
            documents=len(chosen), shards=(write_shard(target, table),)))


def train(folder: Path, run: str, model: dict[str, Any], steps: int, seed: int, *overrides: str) -> float:
    """Train a model on 2,048 tokens a step and return its validation loss in nats per token."""
    config = build(TrainConfig, {
        "run": {"id": run, "uri": str(folder / "runs")}, "model": model, "steps": steps, "seed": seed,
        "data": {"uri": str(folder / "shards"), "validation": str(folder / "validation"), "seed": seed},
        "optimizer": {"learning_rate": 3e-3}, "schedule": {"warmup_steps": 20}, "checkpoint": {"every_steps": 0},
        "batch": {"global_sequences": 16, "micro_sequences": 16, "virtual_ranks": 1},
        "evaluation": {"sequences": 100, "sample_tokens": 0}}, overrides)
    loss = fit_local(config).validation_loss
    assert loss is not None
    return loss


def main() -> int:
    """Train all models, print a table, and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--teacher-steps", type=int, default=300)
    options = parser.parse_args()
    logging.disable(logging.INFO)
    folder = Path(options.output or tempfile.mkdtemp(prefix="distillation-")).resolve()
    write_sets(folder)
    teacher = train(folder, "teacher", TEACHER, options.teacher_steps, 0)
    print(f"teacher: {options.teacher_steps} steps, validation loss {teacher:.4f}", flush=True)
    model = FrozenModel(str(folder / "runs/teacher"))
    made = make(model, [str(folder / "shards")], str(folder / "tokens"), top_k=TOP_K)
    taught = ("objective.kind=distillation", f"data.teacher={made.uri}")
    arms = {"cross-entropy alone": (), "teacher, weight 0.5": (*taught, "objective.weight=0.5"),
            "teacher, weight 1": (*taught, "objective.weight=1.0")}
    losses: dict[str, list[float]] = {name: [] for name in arms}
    for seed in range(options.seeds):
        for number, (name, overrides) in enumerate(arms.items()):
            losses[name].append(train(folder, f"student{number}-{seed}", STUDENT, options.steps, seed, *overrides))
            print(f"seed {seed}, {name}: {losses[name][-1]:.4f}", flush=True)
    return report(losses)


def report(losses: dict[str, list[float]]) -> int:
    """Print mean losses and differences with 95 % intervals; return 1 unless every difference is below 0."""
    print("| student | validation loss | difference | 95 % interval |\n|---|---|---|---|")
    plain, *others = losses.items()
    print(f"| {plain[0]} | {statistics.mean(plain[1]):.4f} | | |")
    worst = -math.inf
    for name, values in others:
        differences = [value - base for value, base in zip(values, plain[1])]
        worst = max(worst, *differences)
        half = half_interval(differences)
        mean = statistics.mean(differences)
        print(f"| {name} | {statistics.mean(values):.4f} | {mean:+.4f} | {mean - half:+.4f} to {mean + half:+.4f} |")
    return int(worst >= 0)


def half_interval(values: list[float]) -> float:
    """Return half of the width of the 95 % interval of a mean, by Student's t; infinity for one value."""
    if len(values) < 2:
        return math.inf
    critical = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}.get(len(values), 2.571)
    return critical * statistics.stdev(values) / math.sqrt(len(values))


if __name__ == "__main__":
    sys.exit(main())
