"""Print the tables of docs/recipes.md from the configurations: one row for each recipe, and plans of the small ones.

    python -m tests.benchmarks.recipes
"""

from __future__ import annotations

from pathlib import Path

from tidewheel.config import build, load
from tidewheel.parts import name_of
from tidewheel.plan.hardware import GB, ClusterConfig
from tidewheel.plan.layout import Job
from tidewheel.plan.layouts import own
from tidewheel.plan.scaling.budget import short
from tidewheel.train.batch_size import BatchSizes
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.schedule import Schedule

FOLDER = Path(__file__).parents[2] / "jobs/configs/recipes"


def job_of(path: Path) -> Job:
    """Return the run of a recipe, with sequences of the model's full length."""
    config = load(TrainConfig, str(path))
    assert config.model.vocabulary_size is not None, f"{path.name} does not name its vocabulary"
    return Job(config, config.model.vocabulary_size, config.model.max_sequence_length)


def tokens_of(job: Job) -> int:
    """Return the tokens of the whole run."""
    sequences = BatchSizes.of(job.config.batch, job.sequence_length).total(job.config.steps)
    return sequences * job.sequence_length


def row(job: Job) -> list[str]:
    """Return the cells of a recipe after its name."""
    config, optimizer = job.config, job.config.optimizer
    betas = ", ".join(f"{beta:g}" for beta in getattr(optimizer, "betas", ()))
    sizes = " → ".join(short(size * job.sequence_length) for size in config.batch.sizes)
    return [f"{short(job.parameters)}", name_of(type(optimizer)), betas, f"{optimizer.learning_rate:.1e}",
            warmup(config.schedule), schedule(config.schedule),
            f"{optimizer.weight_decay:g}", f"{optimizer.clip_norm:g}", sizes, f"{job.sequence_length:,}",
            short(tokens_of(job)), config.precision, layout(config)]


def warmup(settings: Schedule) -> str:
    """Return the length of the warm-up as text."""
    if settings.warmup_fraction:
        return f"{100 * settings.warmup_fraction:g} %"
    return f"{short(settings.warmup)} {settings.unit}"


def schedule(settings: Schedule) -> str:
    """Return a schedule as text: "cosine to 10 %"."""
    name = name_of(type(settings))
    pieces = getattr(settings, "pieces", ())
    if not pieces:
        return f"{name} to {100 * getattr(settings, 'final_fraction', 1.0):g} %"
    parts = []
    for index, piece in enumerate(pieces):
        over = f" over {short(piece.decay_until)}" if piece.decay_until else ""
        until = f" until {short(piece.until)}" if index < len(pieces) - 1 else ""
        verb = "" if piece.form == "constant" else "to "
        parts.append(f"{piece.form} {verb}{100 * piece.final_fraction:g} %{over}{until}")
    return "; ".join(parts)


def layout(config: TrainConfig) -> str:
    """Return number of GPUs and layout as text."""
    p = config.parallel
    sizes = [(name, getattr(p, field)) for name, field in (("TP", "tensor"), ("PP", "pipeline"), ("CP", "context"),
                                                           ("EP", "expert"))]
    parts = [f"{name} {size}" for name, size in sizes if size > 1]
    kind = f"{p.data} offload" if p.offload else p.data
    return " ".join([f"{config.elastic.max_workers:,}:", *parts, kind])


HEADER = ("recipe", "parameters", "optimizer", "betas", "peak rate", "warm-up", "schedule", "decay", "clipping",
          "batch, tokens", "context", "tokens", "precision", "GPUs and layout")


def table() -> str:
    """Return the table as Markdown, the smallest model first."""
    jobs = {path.stem: job_of(path) for path in sorted(FOLDER.glob("*.yaml"))}
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    for name, job in sorted(jobs.items(), key=lambda item: item[1].parameters):
        link = f"[{name}](../jobs/configs/recipes/{name}.yaml)"
        lines.append("| " + " | ".join([link, *row(job)]) + " |")
    return "\n".join(lines)


SMALL = (("fine-tune 7B on four GPUs of 80 GB", "finetune_7b_4x80gb", 4, "a100"),
         ("pretrain 70B on 64 H100 at 4,096 tokens, keeping every fourth block", "pretrain_70b_64xh100", 64, "h100"),
         ("10B on two cards of 24 GB, with offload", "pretrain_10b_2x24gb", 2, "rtx4090"))
"""What people ask for, the recipe, and its GPUs."""


def small_table() -> str:
    """Return the plans of the small recipes as Markdown."""
    lines = ["| what people ask | recipe | planned |", "|---|---|---|"]
    for question, name, gpus, gpu in SMALL:
        cluster = build(ClusterConfig, {"gpus": gpus, "gpu": gpu, "nodes_of": min(8, gpus)})
        planned, reason = own(job_of(FOLDER / f"{name}.yaml"), cluster)
        assert planned is not None, reason
        assert not reason, reason
        host = f", {planned.host / GB:.0f} GB of host memory" if planned.host else ""
        time = planned.time
        lines.append(
            f"| {question} | [{name}](../jobs/configs/recipes/{name}.yaml) | {gpus} {gpu}: "
            f"{planned.memory.total / GB:.0f} GB a GPU{host}, {time.seconds:.1f} s a step, "
            f"{time.tokens_per_second:,.0f} tokens/s, {100 * time.mfu:.0f} % MFU |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
    print()
    print(small_table())
