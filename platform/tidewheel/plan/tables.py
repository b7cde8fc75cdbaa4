"""A plan as tables and as JSON. Opens the shard set that the configuration names, if it exists."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tidewheel.console import print_table
from tidewheel.parts import name_of
from tidewheel.plan import compressed
from tidewheel.plan.byte_models import byte_models
from tidewheel.plan.hardware import GB, ClusterConfig
from tidewheel.plan.layout import GRADIENT_BYTES, Job
from tidewheel.plan.layouts import Planned, Ranking
from tidewheel.plan.memory_tier import MemoryTierCost
from tidewheel.plan.offload import offloads
from tidewheel.plan.proposals import Proposal, proposals
from tidewheel.plan.summary import Summary
from tidewheel.train.config import TrainConfig
from tidewheel.train.teacher_config import live_teacher, teacher_config

VOCABULARY_SIZE, SEQUENCE_LENGTH = 128_256, 8_192
"""Llama 3's, used when neither an option nor the configuration nor a shard set gives them."""

Row = dict[str, Any]


def job_of(config: TrainConfig, vocabulary_size: int | None, sequence_length: int | None) -> tuple[Job, list[str]]:
    """Return the job, and notes about an assumed vocabulary or sequence length.

    Args:
        config: the training configuration.
        vocabulary_size: overrides the vocabulary size.
        sequence_length: overrides the sequence length.

    Raises:
        ShardError, StorageError: the shard set of the configuration is needed, and cannot be read.
    """
    vocabulary = vocabulary_size or config.model.vocabulary_size
    length, notes = sequence_length, list[str]()
    if (vocabulary is None or length is None) and (config.data.uri or config.data.mixture is not None):
        from tidewheel.shards.source import open_source

        manifest = open_source(config.data.uri, config.data.mixture, config.data.seed,
                               partly=config.data.wait_seconds > 0).manifest
        vocabulary, length = vocabulary or manifest.vocabulary_size, length or manifest.sequence_length
    if length is None:
        length = min(config.model.max_sequence_length, SEQUENCE_LENGTH)
        notes.append(f"sequences of {length:,} tokens (--sequence-length changes it)")
    if vocabulary is None:
        vocabulary = VOCABULARY_SIZE
        notes.append(f"a vocabulary of {vocabulary:,} (--vocabulary-size changes it)")
    job = Job(config, vocabulary, length, teacher=_teacher_of(config, vocabulary, length))
    if config.stage_schedule is not None:
        notes.append(f"stage_schedule {name_of(type(config.stage_schedule))} is planned as 1f1b, with its idle time "
                     "and one version of the weights")
    return job, [*notes, *compressed.note(job)]


def _teacher_of(config: TrainConfig, vocabulary_size: int, sequence_length: int) -> Job | None:
    """Return a live teacher, whose checkpoint's manifest is read; None: the run has none.

    Raises:
        CheckpointError: there is no checkpoint of a decoder.
    """
    uri = live_teacher(config)
    if not uri:
        return None
    from tidewheel.checkpoint.models import describe  # imports torch

    return Job(teacher_config(config, describe(uri).model), vocabulary_size, sequence_length)


def ranked(ranking: Ranking, top: int) -> list[Row]:
    """Return rows of the fastest layout of each mesh (tensor x pipeline x context), the fastest first."""
    best: dict[tuple[int, ...], Planned] = {}
    for planned in ranking.fitting:
        p = planned.layout.parallel
        best.setdefault((p.tensor, p.pipeline, p.context), planned)
    return [layout_row(str(rank), planned) for rank, planned in enumerate(list(best.values())[:top], 1)]


def layout_row(name: str, planned: Planned) -> Row:
    """Return a row of the table of layouts."""
    layout, time = planned.layout, planned.time
    return {"": name, "layout": layout.describe(),
            "schedule": layout.parallel.pipeline_schedule if layout.parallel.pipeline > 1 else "-",
            "batches": f"{layout.micro_batches} of {layout.micro_sequences}",
            "recomputed": layout.memory.activation_checkpointing, "GB/GPU": f"{planned.memory.total / GB:.1f}",
            "s/step": f"{time.seconds:.2f}", "MFU %": f"{100 * time.mfu:.1f}", "bubble %": f"{100 * time.bubble:.1f}",
            "(p-1)/m %": f"{100 * (layout.parallel.pipeline - 1) / layout.micro_batches:.1f}",
            "exposed %": f"{100 * time.exposed / time.seconds:.1f}",
            "tokens/s": f"{time.tokens_per_second:,.0f}"}


def memory_rows(plans: Sequence[tuple[str, Planned]]) -> list[Row]:
    """Return rows of GB by part, with a column per layout."""
    names = list(plans[0][1].memory.parts())
    rows: list[Row] = [{"GB on a GPU": name, **{title: f"{planned.memory.parts()[name] / GB:.2f}"
                                               for title, planned in plans}} for name in names]
    rows.append({"GB on a GPU": "at most at a time", **{title: f"{planned.memory.total / GB:.2f}"
                                                       for title, planned in plans}})
    if any(planned.host for _, planned in plans):
        rows.append({"GB on a GPU": "in host memory", **{title: f"{planned.host / GB:.2f}"
                                                        for title, planned in plans}})
    if any(planned.disk for _, planned in plans):
        rows.append({"GB on a GPU": "on disk", **{title: f"{planned.disk / GB:.2f}" for title, planned in plans}})
    return rows


def state_rows(job: Job) -> list[Row]:
    """Return a row per optimizer and published byte model, with the state of the whole model."""
    rows: list[Row] = []
    for model in byte_models(job):
        parts = (model.parameter, model.gradient, model.master, model.state)
        rows.append({"optimizer": model.what, "bytes": " + ".join(f"{size:.3g}" for size in parts),
                     "GB in all": f"{job.parameters * model.total / GB:,.1f}", "": model.note})
    return rows


def proposal_rows(found: Sequence[Proposal]) -> list[Row]:
    """Return a row per change with which a run fits."""
    return [{"change": item.change.what, "layout": item.planned.layout.describe(),
             "GB/GPU": f"{item.planned.memory.total / GB:.1f}", "host GB": f"{item.planned.host / GB:.1f}",
             "disk GB": f"{item.planned.disk / GB:.1f}", "s/step": f"{item.planned.time.seconds:.2f}",
             "slower": "" if item.slower is None else f"{item.slower:.2f} x", "trains": item.change.trains,
             "settings": " ".join(f"--set {name}={_quoted(value)}" for name, value in item.change.settings.items())}
            for item in found]


def _quoted(value: object) -> str:
    return f"'{value}'" if " " in str(value) else str(value)


def communication_rows(planned: Planned) -> list[Row]:
    """Return a row per axis of the mesh."""
    return [{"axis": axis.name, "ranks": axis.ranks, "across nodes": "yes" if axis.across_nodes else "no",
             "GB sent per step and GPU": f"{axis.bytes / GB:.2f}", "s on the links": f"{axis.seconds:.3f}",
             "s not hidden": f"{axis.exposed:.3f}"} for axis in planned.time.axes if axis.ranks > 1]


def summary_rows(job: Job, cluster: ClusterConfig, run_cost: Summary) -> list[Row]:
    """Return rows about the whole run.

    Args:
        job: the run.
        cluster: the cluster.
        run_cost: cost of the run.
    """
    values = {
        "model": f"{job.parameters / 1e9:.2f} B parameters{_active(job)}; their state "
                 f"{job.parameters * (job.weight_bytes + GRADIENT_BYTES + job.optimizer_bytes) / GB:,.1f} GB",
        "run": f"{job.config.steps:,} steps, {run_cost.tokens / 1e9:,.1f} B tokens",
        "checkpoint": f"{run_cost.checkpoint_bytes / GB:,.1f} GB; stops training {run_cost.save_stall_seconds:.2f} s, "
                      f"is in storage {run_cost.upload_seconds:.0f} s later, loads in {run_cost.load_seconds:.0f} s",
        "memory tier": _memory_tier(run_cost.memory_tier),
        "failures": f"one every {run_cost.mtbf_seconds / 3600:.1f} h ({cluster.failures.rate})",
        "goodput": f"{100 * run_cost.goodput:.2f} % saving every {run_cost.interval_seconds / 60:.1f} min "
                   f"as configured; best {100 * run_cost.best_goodput:.2f} % "
                   f"every {run_cost.best_interval_seconds / 60:,.1f} min",
        "tokens a day": f"{run_cost.tokens_per_day / 1e9:,.2f} B",
        "time": f"{run_cost.days:,.1f} days, {run_cost.gpu_hours:,.0f} GPU hours"}
    if run_cost.cost is not None:
        values["cost"] = f"{run_cost.cost:,.0f}"
    return [{"what": name, "value": value} for name, value in values.items()]


def _active(job: Job) -> str:
    """Return how many parameters multiply a token, for a mixture of experts."""
    if not job.routed_rows.copies:
        return ""
    return f", of which {job.model.matmul_parameters(job.vocabulary_size) / 1e9:.2f} B multiply a token"


def _memory_tier(cost: MemoryTierCost | None) -> str:
    if cost is None:
        return "none"
    every = "every step" if cost.every_steps == 1 else f"every {cost.every_steps} steps"
    sent = (f"a node sends {cost.network_bytes_per_second / GB:.2f} GB/s on average" if cost.push_seconds
            else "no copies on other nodes")
    return f"a copy {every}; takes {cost.host_bytes / GB:,.0f} GB of a node's host memory; {sent}"


def request_rows(run_cost: Summary) -> list[Row]:
    """Return a row per purpose of the requests to an object store."""
    rows = [{"storage requests": purpose.what, "a day, at most": f"{purpose.a_day:,}", "": purpose.how}
            for purpose in run_cost.requests]
    total = sum(purpose.a_day for purpose in run_cost.requests)
    return [*rows, {"storage requests": "all", "a day, at most": f"{total:,}", "": "if the run is on an object store"}]


def show(job: Job, cluster: ClusterConfig, ranking: Ranking, whole: Summary | None, *, notes: Sequence[str],
         top: int) -> None:
    """Print all tables: layouts, memory, communication, refused meshes, the run.

    Args:
        job: the run.
        cluster: the cluster.
        ranking: its layouts.
        whole: cost of the run with the first layout, if one fits.
        notes: assumptions.
        top: number of layouts to print.
    """
    own, reason = ranking.own, ranking.own_reason
    columns = [("first", ranking.fitting[0])] if ranking.fitting else []
    columns += [("yours", own)] if own else []
    rows = ranked(ranking, top) + ([layout_row("yours", own)] if own else [])
    print_table(rows, title=f"{cluster.gpus:,} x {cluster.gpu}: the fastest layout of each mesh, of {ranking.tried:,}")
    for note in notes:
        print(f"assumed: {note}")
    if columns:
        print_table(memory_rows(columns), title=f"memory: {cluster.usable_bytes / GB:.1f} GB can be used")
    if ranking.fitting and (axes := communication_rows(ranking.fitting[0])):
        print_table(axes, title="communication of the first")
    if columns and offloads(columns[0][1].layout):
        time = columns[0][1].time
        where = "with state on disk" if columns[0][1].layout.memory.optimizer_disk else "on the CPU"
        print(f"offload: the update {where} takes {time.optimizer:.1f} of {time.seconds:.1f} s in each step")
    if ranking.refused:
        print_table([asdict(refused) for refused in ranking.refused],
                    title="what does not fit, and the nearest that does")
    if reason:
        print(f"yours: {reason}")
    if ranking.nearest:
        print(f"nearest that fits: {ranking.nearest.layout.describe()}: {_options(ranking.nearest)}")
    if not ranking.fitting:
        rows = proposal_rows(list(proposals(job, cluster)))
        print_table(rows or [{"change": "none that is known"}],
                    title="nothing fits; with these changes it does, in times the step of GPUs with enough memory")
    print_table(state_rows(job), title="bytes of a parameter: parameter + gradient + master weight + optimizer state")
    if whole:
        print_table(summary_rows(job, cluster, whole), title="the run with the first")
        print_table(request_rows(whole), title="requests to storage")
        print(f"use it: {_options(ranking.fitting[0])}")


def _options(planned: Planned) -> str:
    return " ".join(f"--set {shlex.quote(f'{key}={value}')}" for key, value in planned.layout.settings().items())


def as_json(job: Job, cluster: ClusterConfig, ranking: Ranking, run_cost: Summary | None) -> dict[str, Any]:
    """Return the plan as JSON values, in bytes and seconds.

    Args:
        job: the run.
        cluster: the cluster.
        ranking: its layouts.
        run_cost: cost of the run with the first layout, if one fits.
    """
    active = job.model.matmul_parameters(job.vocabulary_size)
    return {"model": {"parameters": job.parameters, "active_parameters": active,
                      "vocabulary_size": job.vocabulary_size, "sequence_length": job.sequence_length},
            "cluster": cluster.canonical(), "gpu": cluster.kind.canonical(), "tried": ranking.tried,
            "layouts": [_values(planned) for planned in ranking.fitting],
            "own": None if ranking.own is None else _values(ranking.own), "own_reason": ranking.own_reason,
            "proposals": [] if ranking.fitting else [
                {"settings": item.change.settings, "slower": item.slower, **_values(item.planned)}
                for item in proposals(job, cluster)],
            "byte_models": [{**asdict(model), "total": model.total} for model in byte_models(job)],
            "nearest": None if ranking.nearest is None else _values(ranking.nearest),
            "refused": [asdict(refused) for refused in ranking.refused],
            "run": None if run_cost is None else asdict(run_cost)}


def _values(planned: Planned) -> dict[str, Any]:
    time = asdict(planned.time)
    memory = {**planned.memory.parts(), "state": planned.memory.state, "total": planned.memory.total,
              "host": planned.host, "disk": planned.disk}
    return {"layout": planned.layout.describe(), "settings": planned.layout.settings(),
            "data_ranks": planned.layout.data, "micro_batches": planned.layout.micro_batches,
            "memory": memory, "time": time}
