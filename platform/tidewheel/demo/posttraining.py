"""`tidewheel demo --posttrain`: the demo's base model learns to answer (SFT), and then to answer briefly (DPO)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidewheel import storage
from tidewheel.config import load
from tidewheel.console import console, print_table
from tidewheel.data.config import PipelineConfig
from tidewheel.demo.chats import PROMPTS, write_chats
from tidewheel.demo.recipes import recipe
from tidewheel.train.config import TrainConfig

SFT_STEPS, DPO_STEPS = 80, 40
LENGTH = 128
"""Tokens of a row."""


@dataclass(frozen=True)
class Tuned:
    """URIs of the two runs."""

    sft: str
    dpo: str


def post_train(base: TrainConfig, root: str, *, steps: int | None = None) -> Tuned:
    """Make the data, tune the base model twice, and return the runs. A Ray session must be open.

    Args:
        base: settings of the base model's run, which is over.
        root: URI of the demo's output.
        steps: of each of the two runs; None: as many as teach something.
    """
    folder = storage.join(root, "posttraining")
    raw = storage.join(folder, "raw")
    shards = storage.store(base.data.uri)
    described = shards.read_json("manifest.json")["tokenizer"]
    tokenizer = shards.read(described["file"])
    count = write_chats(storage.store(raw), tokenizer, _token(tokenizer, described["eos"]))
    console.print(f"{count} conversations about modules of Python, half with a short answer and half with a long one")
    chats = _pipeline("sft_chat", raw, storage.join(folder, "chats"), root)
    answers = [f"evaluation.answers.prompts={storage.join(raw, PROMPTS)}", "evaluation.answers.new_tokens=64"]
    sft = _train("jobs/configs/sft.yaml", [
        *_data(chats), *answers, f"run.uri={base.run.uri}", f"run.id={base.run.id}-sft",
        f"model.init_from={base.run_uri}", f"steps={steps or SFT_STEPS}", "evaluation.every_steps=20",
        "checkpoint.every_steps=20"])
    pairs = _pipeline("preferences", raw, storage.join(folder, "pairs"), root)
    reference = _reference(sft.run_uri, pairs, storage.join(folder, "references"))
    # without the cross-entropy, the margin of so few pairs grows until the better answers are not likely any more
    dpo = _train("jobs/configs/dpo.yaml", [
        *_data(pairs), *answers, f"run.uri={base.run.uri}", f"run.id={base.run.id}-dpo",
        f"model.init_from={sft.run_uri}", f"data.reference={reference}", f"steps={steps or DPO_STEPS}",
        "objective.sft_weight=0.2",
        "schedule.warmup_steps=4", "batch.global_sequences=16", "batch.virtual_ranks=2", "batch.pad_to_multiple_of=16",
        "evaluation.every_steps=10", "checkpoint.every_steps=20", "elastic.max_workers=2"])
    return Tuned(sft.run_uri, dpo.run_uri)


def write_report(tuned: Tuned, local: Path) -> str:
    """Write posttraining.html, and the two runs' own reports; return its path."""
    from tidewheel.report.posttraining import page_of
    from tidewheel.report.run import write_run_report

    for uri in (tuned.sft, tuned.dpo):
        write_run_report(uri)
    page = page_of(storage.store(tuned.sft), storage.store(tuned.dpo))
    storage.LocalStore(local).write("posttraining.html", page.render())
    return str(local / "posttraining.html")


def show(tuned: Tuned) -> None:
    """Print the answers of the base model and of the two runs."""
    from tidewheel.report.posttraining import AFTER_DPO, AFTER_SFT, BEFORE, compared

    rows = [{"question": line["messages"][-1]["content"], BEFORE: _short(given[BEFORE]), AFTER_SFT:
             _short(given[AFTER_SFT]), AFTER_DPO: _short(given[AFTER_DPO])}
            for line, given in compared(storage.store(tuned.sft), storage.store(tuned.dpo)).values()]
    print_table(rows, to=console)


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 60 else words[:59] + "…"


def _token(tokenizer: bytes, index: int) -> str:
    """Return the text of a special token of a tokenizer.json."""
    added = json.loads(tokenizer)["added_tokens"]
    return next(str(token["content"]) for token in added if token["id"] == index)


def _data(output: str) -> list[str]:
    return [f"data.uri={storage.join(output, 'shards')}", f"data.validation={storage.join(output, 'validation')}"]


def _pipeline(name: str, raw: str, output: str, root: str) -> str:
    from tidewheel.data import pipeline
    from tidewheel.data.progress import stage_bars

    evals = json.dumps([storage.join(root, "raw/evals/*.jsonl")])
    config = load(PipelineConfig, recipe(f"pipelines/{name}.yaml"), [
        f"steps.1.decontaminate.evals={evals}", "partitions=1", f"steps.3.pack.sequence_length={LENGTH}",
        "steps.3.pack.validation_fraction=0.1"])
    with stage_bars(pipeline.stages(config)) as on_progress:
        summary = pipeline.run(config, input=raw, output=output, on_progress=on_progress, may_replace=True)
    console.print(f"{name}: {summary.documents} records, {summary.tokens:,} tokens")
    return output


def _train(file: str, overrides: Sequence[str]) -> TrainConfig:
    from tidewheel.elastic.trainer import fit
    from tidewheel.train.progress import training_bar

    config = load(TrainConfig, recipe(file), overrides)
    with training_bar(config.steps) as on_progress:
        result: Any = fit(config, on_progress=on_progress)
    loss = "" if result.validation_loss is None else f", loss on held-out data {result.validation_loss:.3f}"
    console.print(f"{config.run.id}: {result.steps} steps{loss}")
    return config


def _reference(model: str, pairs: str, output: str) -> str:
    from tidewheel.inference.reference import ReferenceModel, make

    sets = [storage.join(pairs, name) for name in ("shards", "validation")]
    return make(ReferenceModel(model), sets, output).uri
