"""Train every model family on the same tokens, and compare mixtures of experts with dense models of equal active FLOPs.

    nice -n 10 python -m tests.benchmarks.families [--steps 600] [--seeds 3] [--only NAME,NAME] [--output FOLDER]

The shape is that of GPT-2 124M (https://github.com/karpathy/nanoGPT, config/train_gpt2.py: heads of 64, a feed-forward
of 4 widths, tied embeddings, dropout 0) scaled down to a width of 128 and 2 layers, with rows of 256 tokens. Each
family keeps what makes it a family: norms, positions, windows, latent attention, experts. All begin with a standard
deviation of 1 / sqrt(width), because the 0.02 of many families is for larger widths, and with one base of RoPE. The
width of a feed-forward, or of an expert, is chosen so that the FLOPs of a token are those of Llama. A mixture has 8
experts, and each token uses 2 of them. It is compared with a dense model that differs in nothing else: of Mixtral that
is Llama, of Qwen 3 MoE it is Qwen 3, and of the others it is the same family with one expert, which computes every
token.

A pipeline makes the shards from ../shared/corpus. All models see the same batches in the same order with the same
settings, and one process trains them one after the other on one thread. Mixtures and their dense counterparts are
trained from several initial values, because these change the loss after so few tokens more than experts do. A model
that was trained in the output folder is not trained again, so an interrupted benchmark goes on where it was. The exit
code is 1 if FLOPs differ by more than 2 %, if a validation loss is not below that of the bigram model counted on the
whole training split, if it is more than `REACH` above Llama's, if the 95 % interval of a mixture's distance to its
dense counterpart, or of the mean distance of all mixtures, is above 0, or if a router has not balanced its experts.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

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
LENGTH, VOCABULARY = 256, 512
DIM, LAYERS, HEADS, INNER = 128, 2, 2, 384
"""Width, layers, heads of 64, and the inner width of Llama's gated feed-forward: 3 widths of 3 matrices cost as much as
4.5 of GPT-2's two."""
EXPERTS, PER_TOKEN = 8, 2
BALANCING_RATE = 0.01
"""Step of a selection bias. With the 0.001 of DeepSeek-V3, whose runs are long, all tokens of a layer chose the same
two experts after 40 steps: the bias did not catch up with the router."""
SEQUENCES, STEPS = 4, 600
"""Rows of a batch, 1,024 tokens, and steps. Small batches learn more from few tokens: with batches of 4,096 tokens, no
family had left the unigram entropy after 164,000."""
SEEDS = 3
"""Initial values of mixtures and their dense counterparts; other models have one."""
TOLERANCE = 0.02
"""Largest difference of FLOPs a token from Llama's, as a share."""
REACH = 0.25
"""Largest distance of a family's validation loss above Llama's, in nats a token."""
BUSIEST = 2.0
"""Largest load of the busiest expert over the mean, averaged over layers and the last tenth of the steps, of any seed;
4 is the most that is possible."""
BASE = "llama"
"""Model with which all others are compared."""
ONE = ", one expert"
"""End of the name of a mixture's dense counterpart in the same family."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"qk_norm": False}), "qwen3": ("llama", {"qk_norm": True}), "gemma2": ("gemma", {}),
    "gemma3": ("gemma", {"preset": "debug_3", "local_rope_theta": None})}
"""Names of the models of families that have several: the family and its settings."""
DENSE = {"mixtral": "llama", "qwen3_moe": "qwen3"}
"""Dense counterparts that are families of their own."""
BALANCED = {"gpt_oss": {"auxiliary_loss": 0.01}, "qwen3_moe": {"auxiliary_loss": 0.01}}
"""Settings of balancing that differ from the family's: with transformers' default of 0.001, the busiest expert had 2.9
and 3.1 times the mean load, and with some initial values nearly all tokens of a layer went to two experts."""
LATENT = {"query_rank": 96, "key_rank": 64, "plain_head_dim": 40, "turning_head_dim": 24, "value_head_dim": 64}
"""Latent attention with heads of 64 and as many matrix entries as Llama's attention."""


def shapes() -> dict[str, Model]:
    """Return the models by name: every family, and the dense counterparts of mixtures."""
    named = [name for name in families.KIND.built_in() if name not in {kind for kind, _ in VARIANTS.values()}]
    cases = {**VARIANTS, **{name: (name, BALANCED.get(name, {})) for name in named}}
    models = {name: model_of(kind, changes) for name, (kind, changes) in cases.items()}
    for name, model in list(models.items()):
        if model.layer_costs(0).experts and name not in DENSE:
            models[name + ONE] = model_of(name, {"num_experts": 1, "experts_per_token": 1, "shared_experts": 0,
                                                 "weight_scale": 1.0})
    return models


def model_of(family: str, changes: dict[str, Any]) -> Model:
    """Return the scaled-down model of a family whose FLOPs a token are closest to Llama's.

    Args:
        family: name of the family.
        changes: settings that differ from those of all families.
    """
    kind: type[Model] = families.KIND.find(family)
    values: dict[str, Any] = {
        "preset": "debug", "dim": DIM, "num_layers": LAYERS, "num_heads": HEADS, "num_kv_heads": HEADS,
        "max_sequence_length": LENGTH, "tie_embeddings": True, "vocabulary_size": VOCABULARY,
        "init_std": DIM**-0.5, "rope_theta": 1e4}
    fields = kind.model_fields
    if "sliding_window" in fields:
        values["sliding_window"] = LENGTH // 2
    if "key_rank" in fields:
        values |= LATENT
    if "num_experts" in fields:
        values |= {"num_experts": EXPERTS, "experts_per_token": PER_TOKEN, "first_dense_layers": 0, "expert_groups": 1,
                   "groups_per_token": 1, "balancing_rate": BALANCING_RATE}
    inner = "expert_ffn_dim" if "num_experts" in fields else "ffn_dim"
    values |= changes
    if (family, changes) == VARIANTS[BASE]:
        return families.KIND.build(family, {**values, inner: INNER})
    goal = flops(model_of(*VARIANTS[BASE]))
    narrow, wide = (flops(families.KIND.build(family, {**values, inner: width})) for width in (64, 128))
    width = 64 + 64 * (goal - narrow) / (wide - narrow)
    return families.KIND.build(family, {**values, inner: 4 * round(width / 4)})  # grouped products need 16 bytes


def flops(model: Model) -> int:
    """Return the training FLOPs of a token, by the family's own count."""
    return model.flops_per_token(VOCABULARY, LENGTH)


def pipeline() -> tw.Pipeline:
    """Return the pipeline of the shards that all families read."""
    return (tw.Pipeline("families").set(max_bad_fraction=0.01).read("*.jsonl.gz")
            .filter(tw.filters.gopher_quality(), tw.filters.gopher_repetition()).dedup_exact()
            .tokenize(train={"vocabulary_size": VOCABULARY})
            .pack(sequence_length=LENGTH, validation_fraction=0.02))


def made_data(output: str) -> str:
    """Make the shards that all families read, unless they are there; return the folder of the pipeline's output.

    Args:
        output: folder of the benchmark.
    """
    if not (SHARED / "corpus").is_dir():
        raise SystemExit(f"no documents in {SHARED}/corpus")
    with session(None) as address:
        published = tw.Workflow("families", pipeline()).run(output, input=str(SHARED / "corpus"), address=address)
    return str(published.pipelines["families"].output)


def settings(model: Model, name: str, data: str, output: str, steps: int, seed: int = 1) -> TrainConfig:
    """Return the configuration of a model's run: nanoGPT's recipe, with a rate for this width.

    Args:
        model: from `shapes`.
        name: of the model.
        data: folder of the pipeline's output.
        output: folder of the benchmark.
        steps: number of steps.
        seed: of the initial values, from 1. The batches do not depend on it.
    """
    run = name.replace(ONE, "-dense") + (f"-seed{seed}" if seed > 1 else "")
    return build(TrainConfig, {
        "run": {"id": run, "uri": f"{output}/runs-{steps}"}, "steps": steps, "seed": seed,
        "model": model.shape(),
        "data": {"uri": f"{data}/shards", "validation": f"{data}/validation", "seed": 1},
        "optimizer": {"learning_rate": 4e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "clip_norm": 1.0},
        "schedule": {"warmup_steps": max(1, steps // 20)},
        "batch": {"global_sequences": SEQUENCES, "micro_sequences": SEQUENCES, "virtual_ranks": 1},
        "evaluation": {"sequences": 200, "sample_tokens": 0}, "checkpoint": {"every_steps": 0},
        "elastic": {"max_workers": 1, "cpus_per_worker": 1}})


def trained(config: TrainConfig) -> tuple[float, int]:
    """Train a model, unless its run is complete, and return its validation loss and the number of tokens."""
    if read_result(storage.store(config.run_uri)) is None:
        train(config, Runtime())
    result = read_result(storage.store(config.run_uri))
    assert result is not None
    assert result.validation_loss is not None
    return result.validation_loss, result.tokens


def busiest(config: TrainConfig) -> float | None:
    """Return the load of the busiest expert over the mean at the end of a run; see `BUSIEST`. None: it has none."""
    records = [json.loads(line) for line in Path(config.run_uri, "metrics.jsonl").read_text().splitlines()]
    loads = [record["expert_load_mean_max"] for record in records if record.get("step", 0) > 0.9 * config.steps
             and "expert_load_mean_max" in record]
    return sum(loads) / len(loads) if loads else None


def dense_counterpart(name: str) -> str:
    """Return the name of the dense model that a mixture is compared with."""
    return DENSE.get(name, name + ONE)


def paired(names: Sequence[str]) -> list[str]:
    """Return the mixtures whose dense counterparts are among the names too."""
    return [name for name in names if dense_counterpart(name) in names]


@dataclass(frozen=True)
class Measured:
    """Losses of the models, and what they are compared with."""

    losses: Mapping[str, Sequence[float]]
    """Validation losses by name, nats a token; a mixture and its dense counterpart have one for each seed."""
    flops: Mapping[str, int]
    """FLOPs a token by name, Llama's included."""
    bigram: float
    """Validation loss of the bigram model."""
    busiest: Mapping[str, float]
    """Load of the busiest expert over the mean, of mixtures."""

    def faults(self) -> list[str]:
        """Return what misses the goal, a sentence each."""
        said = []
        base = self.losses.get(BASE)
        for name, losses in self.losses.items():
            loss = statistics.fmean(losses)
            off = self.flops[name] / self.flops[BASE] - 1
            if abs(off) > TOLERANCE:
                said.append(f"{name}: its FLOPs a token are {off:+.1%} from Llama's")
            if loss >= self.bigram:
                said.append(f"{name}: {loss:.3f} is not below the bigram model's {self.bigram:.3f}")
            if base is not None and loss > statistics.fmean(base) + REACH:
                said.append(f"{name}: {loss:.3f} is more than {REACH} above Llama's {statistics.fmean(base):.3f}")
            if self.busiest.get(name, 1.0) > BUSIEST:
                said.append(f"{name}: its busiest expert has {self.busiest[name]:.2f} times the mean load")
        return said + self._beside_dense()

    def _beside_dense(self) -> list[str]:
        said = []
        for name in paired(list(self.losses)):
            distance, half = self.distance(name)
            if distance > half:
                said.append(f"{name}: {distance:+.3f} ± {half:.3f} beside its dense counterpart is above 0")
        distance, half = self.mean_distance()
        if distance > half:
            said.append(f"all mixtures: {distance:+.3f} ± {half:.3f} beside their dense counterparts is above 0")
        return said

    def distances(self, name: str) -> list[float]:
        """Return how far a mixture is above its dense counterpart, for each seed."""
        return [own - dense for own, dense in zip(self.losses[name], self.losses[dense_counterpart(name)], strict=True)]

    def distance(self, name: str) -> tuple[float, float]:
        """Return how far a mixture is above its dense counterpart, and half of the 95 % interval of that distance.

        The interval is Student's, with the variance over the seeds of all mixtures: three seeds of one say little. With
        one seed there is no interval, and its half is 0.
        """
        values = self.distances(name)
        return statistics.fmean(values), self._half_interval(len(values))

    def mean_distance(self) -> tuple[float, float]:
        """Return the mean distance of all mixtures, and half of its interval, see `distance`; (0, 0) without pairs."""
        names = paired(list(self.losses))
        if not names:
            return 0.0, 0.0
        counts = [len(self.distances(name)) for name in names]
        return statistics.fmean(self.distance(name)[0] for name in names), self._half_interval(sum(counts))

    def _half_interval(self, values: int) -> float:
        """Return half of the 95 % interval of the mean of some distances."""
        squares, freedom = 0.0, 0
        for name in paired(list(self.losses)):
            distances = self.distances(name)
            squares += sum((value - statistics.fmean(distances)) ** 2 for value in distances)
            freedom += len(distances) - 1
        return float(stats.t.ppf(0.975, freedom)) * math.sqrt(squares / freedom / values) if freedom else 0.0

    def row(self, name: str, model: Model) -> dict[str, str]:
        """Return a model's row of the table."""
        beside, each = "", ""
        if name in paired(list(self.losses)):
            distance, half = self.distance(name)
            beside = f"{distance:+.3f} ± {half:.3f} ({dense_counterpart(name)})"
            each = ", ".join(f"{value:+.3f}" for value in self.distances(name))
        return {"model": name, "parameters": f"{model.parameters(VOCABULARY):,}",
                "active": f"{model.matmul_parameters(VOCABULARY):,}",
                "MFLOPs a token": f"{self.flops[name] / 1e6:.2f}",
                "loss": ", ".join(f"{loss:.3f}" for loss in self.losses[name]), "beside dense": beside,
                "of each seed": each,
                "busiest expert": f"{self.busiest[name]:.2f}" if self.busiest.get(name, 1.0) > 1.0 else ""}


def main() -> int:
    """Make the shards, train the models and print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=STEPS)
    arguments.add_argument("--seeds", type=int, default=SEEDS, help="of mixtures and their dense counterparts")
    arguments.add_argument("--only", default="", help="names of models, separated by commas; default: all")
    arguments.add_argument("--output", default="families-output")
    options = arguments.parse_args()
    if not (SHARED / "corpus").is_dir():
        raise SystemExit(f"no documents in {SHARED}/corpus")
    models = shapes()
    names = options.only.split(",") if options.only else list(models)
    if unknown := set(names) - set(models):
        raise SystemExit(f"no models {sorted(unknown)}; there are {', '.join(models)}")
    corpus, output = pipeline(), str(Path(options.output).resolve())
    with session(None) as address:
        published = tw.Workflow("families", corpus).run(output, input=str(SHARED / "corpus"), address=address)
    summary = published.pipelines["families"]
    losses: dict[str, list[float]] = {}
    loads: dict[str, float] = {}
    tokens = 0
    several = {model for name in paired(names) for model in (name, dense_counterpart(name))}
    for name in names:
        losses[name] = []
        for seed in range(1, (options.seeds if name in several else 1) + 1):
            config = settings(models[name], name, summary.output, output, options.steps, seed)
            loss, tokens = trained(config)
            losses[name].append(loss)
            print(f"{name}, seed {seed}: {loss:.3f}", flush=True)
            if (load := busiest(config)) is not None:
                loads[name] = max(load, loads.get(name, 0.0))
    counted = summary.value["ngram_entropy"]
    counts = {name: flops(model) for name, model in models.items()}
    measured = Measured(losses, counts, counted["bigram_model"], loads)
    print_table([measured.row(name, models[name]) for name in names],
                title=f"{tokens:,} tokens; validation loss of the unigram model {counted['unigram_model']:.3f}, of the "
                      f"bigram model {counted['bigram_model']:.3f} nats a token")
    distance, half = measured.mean_distance()
    print(f"mixtures beside their dense counterparts, mean: {distance:+.3f} ± {half:.3f}")
    faults = measured.faults()
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
