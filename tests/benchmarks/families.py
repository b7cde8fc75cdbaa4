"""Train every model family on the same tokens, and compare mixtures of experts with dense models of equal active FLOPs.

    python -m tests.benchmarks.families [--quick] [--steps 300] [--only TEXT] [--output FOLDER]

The shape is that of GPT-2 124M (https://github.com/karpathy/nanoGPT, config/train_gpt2.py: heads of 64, a feed-forward
of 4 widths, dropout 0) scaled down to a width of 128 and 4 layers, with rows of 256 tokens. Each family keeps what
makes it a family (norms, positions, windows, experts) from its preset `debug`. The feed-forward of a mixture has as
many active matrix entries as the dense one of Llama. A pipeline makes the shards from ../shared/corpus; `--quick` takes
few documents and steps. All families see the same batches, and a single process trains them one after the other. The
exit code is 1 if a family does not beat the unigram entropy of the training split.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

import tidewheel as tw
from tidewheel import storage
from tidewheel.cluster.session import session
from tidewheel.config import build
from tidewheel.console import print_table
from tidewheel.models import families
from tidewheel.models.family import Model
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.record import read_result
from tidewheel.train.runtime import Runtime

SHARED = Path(__file__).resolve().parents[2] / "../shared"
LENGTH, VOCABULARY = 256, 2048
DIM, LAYERS, HEADS, INNER = 128, 4, 2, 384
"""Width, layers, heads of 64, and the inner width of a gated feed-forward: 3 widths of 3 matrices cost as much as 4.5
of GPT-2's two."""
EXPERTS, PER_TOKEN = 8, 2


def shapes() -> dict[str, dict[str, Any]]:
    """Return the settings of `model` of each family, by name."""
    return {family: _shape(family) for family in families.KIND.built_in()}


def _shape(family: str) -> dict[str, Any]:
    kind: type[Model] = families.KIND.find(family)
    debug = next(preset for preset in kind.PRESETS if preset.startswith("debug"))
    values: dict[str, Any] = {
        "preset": debug, "dim": DIM, "num_layers": LAYERS, "num_heads": HEADS, "num_kv_heads": HEADS,
        "ffn_dim": INNER, "max_sequence_length": LENGTH, "tie_embeddings": True, "vocabulary_size": VOCABULARY}
    inputs = kind.FEED_FORWARD.inputs
    if inputs == 1:  # two matrices in the place of three
        values["ffn_dim"] = INNER * 3 // 2
    if "sliding_window" in kind.model_fields:
        values["sliding_window"] = LENGTH // 2
    if "num_experts" in kind.model_fields:
        shared = kind.model_validate(values).model_dump()["shared_experts"]
        values |= {"num_experts": EXPERTS, "experts_per_token": PER_TOKEN, "first_dense_layers": 0,
                   "expert_ffn_dim": INNER // (PER_TOKEN + shared), "expert_groups": 1, "groups_per_token": 1}
    return {"kind": family, **values}


def pipeline(quick: bool) -> tw.Pipeline:
    """Return the pipeline of the shards that all families read."""
    return (tw.Pipeline("families").set(max_bad_fraction=0.01).read("dev-00000.jsonl.gz" if quick else "*.jsonl.gz")
            .filter(tw.filters.gopher_quality(), tw.filters.gopher_repetition()).dedup_exact()
            .tokenize(train={"vocabulary_size": VOCABULARY}).pack(sequence_length=LENGTH, validation_fraction=0.02))


def settings(model: dict[str, Any], name: str, data: str, output: str, steps: int) -> TrainConfig:
    """Return the configuration of a family's run: nanoGPT's recipe, with a rate for this width."""
    return build(TrainConfig, {
        "run": {"id": name, "uri": f"{output}/runs"}, "steps": steps, "seed": 1, "model": model,
        "data": {"uri": f"{data}/shards", "validation": f"{data}/validation", "seed": 1},
        "optimizer": {"learning_rate": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "clip_norm": 1.0},
        "schedule": {"warmup_steps": max(1, steps // 20)},
        "batch": {"global_sequences": 16, "micro_sequences": 8, "virtual_ranks": 1},
        "evaluation": {"sequences": 100, "sample_tokens": 0}, "checkpoint": {"every_steps": 0},
        "elastic": {"max_workers": 1, "cpus_per_worker": torch.get_num_threads()}})


def trained(name: str, config: TrainConfig) -> dict[str, Any]:
    """Train a family, or read the result of a run that is complete, and return its row of the table."""
    began = time.monotonic()
    if read_result(storage.store(config.run_uri)) is None:
        train(config, Runtime())
    result = read_result(storage.store(config.run_uri))
    assert result is not None
    assert result.validation_loss is not None
    model = config.model
    flops = model.flops_per_token(VOCABULARY, LENGTH)
    return {"family": name, "parameters": f"{model.parameters(VOCABULARY):,}",
            "active": f"{model.matmul_parameters(VOCABULARY):,}", "MFLOPs a token": round(flops / 1e6, 1),
            "tokens": f"{result.tokens:,}", "validation loss": round(result.validation_loss, 3),
            "minutes": round((time.monotonic() - began) / 60, 1)}


def main() -> int:
    """Make the shards, train the families and print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--steps", type=int, default=0, help="default: 300, or 20 with --quick")
    arguments.add_argument("--only", default="", help="families whose name contains this")
    arguments.add_argument("--output", default="families-output")
    options = arguments.parse_args()
    if not (SHARED / "corpus").is_dir():
        raise SystemExit(f"no documents in {SHARED}/corpus")
    corpus, output = pipeline(options.quick), str(Path(options.output).resolve())
    with session(None) as address:
        published = tw.Workflow("families", corpus).run(output, input=str(SHARED / "corpus"), address=address)
    summary = published.pipelines["families"]
    steps = options.steps or (20 if options.quick else 300)
    table = []
    for name, model in shapes().items():
        if options.only in name:
            config = settings(model, f"{name}-{steps}", summary.output, output, steps)
            table.append(trained(name, config))
            print(f"{name}: {table[-1]['validation loss']}", flush=True)
    unigram = summary.value["ngram_entropy"]["unigram_model"]
    print_table(table, title=f"{steps} steps of 4,096 tokens; unigram entropy {unigram:.3f} nats a token")
    worse = [row["family"] for row in table if row["validation loss"] >= unigram]
    if worse:
        print(f"not below the unigram entropy: {', '.join(worse)}")
    return 1 if worse and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
