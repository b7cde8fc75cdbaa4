"""Steps that make data: pipelines and tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tidewheel import storage
from tidewheel.config import build
from tidewheel.errors import ShardError
from tidewheel.workflow.step_kind import SHARDS, Entry, Log, Sparse, StepKind, Task, is_same
from tidewheel.workflow.steps import REFERENCE


class PipelineKind(StepKind):
    """`tw.Pipeline`: a folder with shards/, validation/, verdicts/ ..."""

    def recipe(self, entry: Entry) -> Any:
        from tidewheel.data.config import UNDECISIVE, PipelineConfig
        from tidewheel.data.stages.recipe_versions import of_steps

        config = build(PipelineConfig, entry["config"], where=entry["name"])
        settings = {name: value for name, value in config.decisive().items() if name not in UNDECISIVE}
        return {**settings, "versions": of_steps(config)}

    def content(self, entry: Entry, input: str, output: str) -> Any:
        from tidewheel.data.config import PipelineConfig
        from tidewheel.data.stages.recipe_versions import of_files
        from tidewheel.data.stages.resolve import content

        config = build(PipelineConfig, entry["config"], where=entry["name"])
        tokenize = config.step("tokenize")
        given = tokenize is not None and (tokenize.file or "").startswith(REFERENCE)
        files = content(config, input=input, output=output, given=given)
        return {**files, "readers": of_files((name for name, _, _ in files["files"]), config)}

    def place(self, output: str, entry: Entry, key: str) -> str:
        return storage.join(output, "data", f"{entry['name']}-{key}")

    def run(self, task: Task, log: Log) -> dict[str, Any]:
        from tidewheel.data import pipeline
        from tidewheel.data.config import PipelineConfig

        overrides = []
        if "tokenizer" in task.needs:
            index = next(index for index, step in enumerate(task.entry["config"]["steps"]) if step.get("tokenize"))
            overrides.append(f"steps.{index}.tokenize.file={json.dumps(task.needs['tokenizer'])}")
        config = build(PipelineConfig, task.entry["config"], overrides, where=task.entry["name"])
        report = Sparse(log)

        def on_progress(stage: str, done: int, total: int, note: str = "") -> None:
            report(f"{stage}: {done}/{total} units {note}".rstrip(), now=done == total)

        summary = pipeline.run(config, input=task.input, output=task.place, on_progress=on_progress,
                               may_replace=True)  # no other recipe writes to this URI
        return {"hash": _set_hash(task.place), "documents": summary.documents, "tokens": summary.tokens}

    def has_wave(self, place: str) -> bool:
        """Return whether the set's first wave is published, so that a training may start."""
        from tidewheel.shards.growing import wave_key

        return storage.store(place).child(SHARDS).exists(wave_key(0))

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        try:
            return _set_hash(place) == artifact["hash"]
        except (FileNotFoundError, ShardError):  # gone or damaged: running the pipeline again restores it
            return False


class TokenizerKind(StepKind):
    """`tw.Tokenizer`: a tokenizer.json."""

    def recipe(self, entry: Entry) -> Any:
        from tidewheel.data.stages.tokenizer import VERSION

        return {**entry["config"], "versions": VERSION.numbers()}

    def content(self, entry: Entry, input: str, output: str) -> Any:
        from tidewheel.data.tokenize.tokenizer_training import matching

        return [[key, place.fingerprint(key)] for pattern in _below(input, entry["config"]["files"])
                for place, key in matching(pattern)]

    def place(self, output: str, entry: Entry, key: str) -> str:
        return storage.join(output, "tokenizers", f"{entry['name']}-{key}", "tokenizer.json")

    def run(self, task: Task, log: Log) -> dict[str, Any]:
        from tidewheel.data.tokenize.tokenizer_training import train_tokenizer

        config = task.entry["config"]
        trained = train_tokenizer(_below(task.input, config["files"]), field=config["text"],
                                  vocabulary_size=config["vocabulary_size"], sample_bytes=config["sample_bytes"],
                                  special_tokens=config["special_tokens"])
        place, name = storage.split(task.place)
        return {"hash": place.write(name, trained.tokenizer).hash, "vocabulary_size": config["vocabulary_size"]}

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        folder, name = storage.split(place)
        return is_same(folder.uri, name, artifact["hash"])


def _below(input: str, patterns: list[str]) -> list[str]:
    return [pattern if "://" in pattern or pattern.startswith(("/", "~"))
            else storage.join(storage.absolute(input), pattern) for pattern in patterns]


def _set_hash(place: str) -> str:
    """Return the hash of a pipeline's output: of its shard set, or else of the files that it wrote.

    The recipe's hash is left out, since it depends on the path of the tokenizer's file.
    """
    from tidewheel.shards.manifest import read_manifest

    product = storage.store(place).child("dataset")
    if not storage.store(place).child(SHARDS).exists("manifest.json") and product.exists("manifest.json"):
        return storage.content_hash(json.dumps(product.read_json("manifest.json")["files"], sort_keys=True).encode())
    values = read_manifest(storage.store(place).child(SHARDS)).canonical()
    for name in ("recipe_hash", "recipe"):
        values.pop(name, None)
    return storage.content_hash(json.dumps(values, sort_keys=True).encode())
