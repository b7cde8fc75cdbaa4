"""Steps that make and use models: trainings, evaluations and exports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tidewheel import storage
from tidewheel.config import build
from tidewheel.parts import Code
from tidewheel.workflow.step_kind import (
    SHARDS,
    VALIDATION,
    Entry,
    Log,
    Sparse,
    StepKind,
    Task,
    folder_hash,
    is_same,
    manifest_hash,
)
from tidewheel.workflow.steps import REFERENCE

#: Seconds that a training beside its pipeline waits for a wave by default. A pipeline that fails ends it at once.
OVERLAP_SECONDS = 3600
#: The hash of a training's artifact covers its key and the batches it read. In reproducible mode it also covers the
#: last checkpoint's tensors, up to this size.
DIGEST_BYTES = 20 << 30
#: Groups of a training's configuration that do not decide its result; see `TrainConfig.recipe_hash`.
UNDECISIVE = ("run", "checkpoint", "elastic", "parallel", "compile", "compile_cache", "run_ahead", "memory", "metrics",
              "profile")


class TrainKind(StepKind):
    """`tw.Train`: the folder of a run."""

    def recipe(self, entry: Entry) -> Any:
        from tidewheel.train.config import TrainConfig

        _import_own_parts(entry)
        config = build(TrainConfig, entry["config"], where=entry["name"])
        decisive = {name: value for name, value in config.decisive().items() if name not in UNDECISIVE}
        decisive["data"] = {"seed": config.data.seed}  # `content` has the sets' contents; the hash covers mixtures
        return {"recipe_hash": config.recipe_hash(), **{name: decisive[name] for name in (
            "model", "optimizer", "schedule", "batch", "steps", "seed", "precision", "data") if name in decisive}}

    def content(self, entry: Entry, input: str, output: str) -> Any:
        data = entry["config"]["data"]
        mixture = data["mixture"] or {"domains": {}}
        uris = {"": data["uri"], **{name: domain["shards"] for name, domain in mixture["domains"].items()}}
        return {name: manifest_hash(uri) for name, uri in uris.items() if uri and not uri.startswith(REFERENCE)}

    def place(self, output: str, entry: Entry, key: str) -> str:
        return storage.join(output, "runs", f"{entry['name']}-{key}")

    def config(self, task: Task) -> Any:
        """Return the run's `TrainConfig` with the URIs that it reads and writes."""
        from tidewheel.train.config import TrainConfig

        _import_own_parts(task.entry)
        runs, _, name = task.place.rpartition("/")
        overrides = [f"run.uri={json.dumps(runs)}", f"run.id={json.dumps(name)}"]
        for role, uri in task.needs.items():
            shards = json.dumps(storage.join(uri, SHARDS))
            if role == "init":
                overrides.append(f"model.init_from={json.dumps(uri)}")
            elif role == "reference":
                overrides.append(f"data.reference={json.dumps(_only_folder(uri))}")
            elif role == "data":
                overrides += [f"data.uri={shards}", f"data.validation={json.dumps(storage.join(uri, VALIDATION))}"]
            else:
                overrides.append(f"data.mixture.domains.{role.partition('.')[2]}.shards={shards}")
        if task.entry.get("overlap") and not task.entry["config"]["data"].get("wait_seconds"):
            overrides.append(f"data.wait_seconds={OVERLAP_SECONDS}")
        if task.max_workers is not None:
            most = max(task.max_workers, task.entry["config"]["elastic"]["min_workers"])
            overrides.append(f"elastic.max_workers={most}")
        return build(TrainConfig, task.entry["config"], overrides, where=task.entry["name"])

    def run(self, task: Task, log: Log) -> dict[str, Any]:
        from tidewheel import jsonlog
        from tidewheel.checkpoint.verify import list_checkpoints
        from tidewheel.elastic.trainer import fit
        from tidewheel.train.progress import describe

        report = Sparse(log)

        def on_progress(progress: dict[str, Any]) -> None:
            for event in progress.get("events", ()):
                log(describe(event))
            if progress.get("step"):
                loss = f", loss {progress['loss']:.3f}" if progress.get("loss") is not None else ""
                report(f"step {progress['step']}/{progress.get('steps')}{loss}, {progress.get('world_size')} workers")

        config = self.config(task)
        result = fit(config, on_progress=on_progress)
        run_store = storage.store(task.place)
        digests = {line["step"]: line["digest"] for line in jsonlog.read(run_store, "batches.jsonl")}
        newest = list_checkpoints(run_store.child("checkpoints"))[-1:]
        state = None
        if config.reproducible and newest and newest[0].bytes <= DIGEST_BYTES:
            from tidewheel.checkpoint.digest import digest

            state = digest(task.place).state
        batches = [digests[step] for step in sorted(digests)]
        decided = json.dumps([task.key, batches, state])
        return {"hash": storage.content_hash(decided.encode()), "state": state, "steps": result.steps,
                "tokens": result.tokens, "validation_loss": result.validation_loss,
                "checkpoint": newest[0].name if newest else None,
                "checkpoint_bytes": newest[0].bytes if newest else 0}

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        return storage.store(place).exists("result.json")


class ReferenceKind(StepKind):
    """`tw.Reference`: a folder with the columns of one reference model."""

    def recipe(self, entry: Entry) -> Any:
        from tidewheel.shards.references import VERSION

        return {"mismatched": entry["config"]["mismatched"], "version": VERSION.number}

    def content(self, entry: Entry, input: str, output: str) -> Any:
        return {}

    def place(self, output: str, entry: Entry, key: str) -> str:
        return storage.join(output, "references", f"{entry['name']}-{key}")

    def run(self, task: Task, log: Log) -> dict[str, Any]:
        from tidewheel.inference.reference import ReferenceModel, make

        report = Sparse(log)
        sets = [storage.join(task.needs["data"], name) for name in (SHARDS, VALIDATION)]
        made = make(ReferenceModel(task.needs["model"]), sets, task.place,
                    mismatched=task.entry["config"]["mismatched"],
                    on_progress=lambda done, total: report(f"{done:,}/{total:,} pairs"))
        return {"hash": _columns_hash(task.place), "pairs": made.rows}

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        return _columns_hash(place) == artifact["hash"]


def _columns_hash(uri: str) -> str:
    """Return the hash of the names of all files of columns, which hold the hashes of model, set and values."""
    names = [entry.key for entry in storage.store(uri).list()]
    return storage.content_hash(json.dumps(sorted(names)).encode())


def _only_folder(uri: str) -> str:
    """Return the folder below a URI that has just one: that of a reference model."""
    [name] = {entry.key.partition("/")[0] for entry in storage.store(uri).list()}
    return storage.join(uri, name)


class EvaluateKind(StepKind):
    """`tw.Evaluate`: a JSON file."""

    def recipe(self, entry: Entry) -> Any:
        return {"sequences": entry["config"]["sequences"]}

    def content(self, entry: Entry, input: str, output: str) -> Any:
        return {name: manifest_hash(uri) for name, uri in entry["config"]["data"].items()}

    def place(self, output: str, entry: Entry, key: str) -> str:
        return storage.join(output, "evaluations", f"{entry['name']}-{key}.json")

    def run(self, task: Task, log: Log) -> dict[str, Any]:
        from tidewheel.inference.evaluate import Evaluator

        sets = dict(task.entry["config"]["data"])
        sets |= {role.partition(".")[2]: storage.join(uri, VALIDATION) for role, uri in task.needs.items()
                 if role.startswith("data.")}
        evaluation = Evaluator(task.needs["run"], data=sets or None,
                          sequences=task.entry["config"]["sequences"]).evaluate(task.needs["run"])
        scores = {name or "validation": {"loss": score.loss, "bits_per_byte": score.bits_per_byte,
                                         "tokens": score.tokens, **score.metrics}
                  for name, score in evaluation.scores.items()}
        place, name = storage.split(task.place)
        stamp = place.write_json(name, {"step": evaluation.step, "loss": evaluation.loss, "sets": scores})
        return {"hash": stamp.hash, "step": evaluation.step, "loss": evaluation.loss}

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        folder, name = storage.split(place)
        return is_same(folder.uri, name, artifact["hash"])


class ExportKind(StepKind):
    """`tw.Export`: a Hugging Face folder."""

    def recipe(self, entry: Entry) -> Any:
        return entry["config"]

    def content(self, entry: Entry, input: str, output: str) -> Any:
        return {}

    def place(self, output: str, entry: Entry, key: str) -> str:
        return storage.join(output, "models", f"{entry['name']}-{key}")

    def run(self, task: Task, log: Log) -> dict[str, Any]:
        from tidewheel.checkpoint.conversion import export

        done = export(task.needs["run"], task.place, dtype=task.entry["config"]["dtype"])
        return {"hash": folder_hash(task.place), "parameters": done.parameters}

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        return storage.store(place).exists("config.json")


def _import_own_parts(entry: Entry) -> None:
    """Make the modules of a training's own parts importable.

    Raises:
        ConfigError: a module is missing, or its source differs from the one that the workflow was made of.
    """
    for code in entry.get("code", ()):
        Code(**code).load()
