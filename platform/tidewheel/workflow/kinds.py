"""What each kind of step reads, where it writes, and how it runs. A step here is its entry (`steps`): JSON values.

Each of `KINDS` implements `StepKind`.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tidewheel import storage
from tidewheel.config import build
from tidewheel.errors import ConfigError, ShardError
from tidewheel.parts import Code
from tidewheel.workflow.steps import REFERENCE, source_hash

Entry = Mapping[str, Any]
Log = Callable[[str], None]
SHARDS, VALIDATION = "shards", "validation"
#: Seconds that a training beside its pipeline waits for a wave by default. A pipeline that fails ends it at once.
OVERLAP_SECONDS = 3600
#: The hash of a training's artifact covers its key and the batches it read. In reproducible mode it also covers the
#: last checkpoint's tensors, up to this size.
DIGEST_BYTES = 20 << 30
#: Groups of a training's configuration that do not decide its result; see `TrainConfig.recipe_hash`.
UNDECISIVE = ("run", "checkpoint", "elastic", "parallel", "compile", "compile_cache", "memory", "metrics", "profile")


@dataclass(frozen=True)
class Task:
    """A step to run."""

    entry: Entry
    place: str
    """URI that it writes to."""
    key: str
    input: str
    """URI that relative paths are below."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """URIs of the steps that it reads, by role."""
    max_workers: int | None = None
    """A training's share of the cluster while others train beside it."""
    function: Callable[..., Any] | None = None
    """The function of a `Call` that cannot be imported."""


class StepKind(Protocol):
    """What a workflow needs to know about one kind of step."""

    def recipe(self, entry: Entry) -> Any:
        """Return the settings that decide the result, as JSON values."""

    def content(self, entry: Entry, input: str, output: str) -> Any:
        """Return the identity of everything that the step reads from outside the workflow, as JSON values.

        Args:
            entry: the step.
            input: URI that relative paths are below.
            output: URI of the workflow.
        """

    def place(self, output: str, entry: Entry, key: str) -> str:
        """Return the URI of the step's output.

        Args:
            output: URI of the workflow.
            entry: the step.
            key: key of the step.
        """

    def run(self, task: Task, log: Log) -> dict[str, Any]:
        """Make the output, or go on making it, and return its description with its "hash".

        Args:
            task: the step.
            log: gets lines of progress.
        """

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        """Return whether the output is still what `artifact` describes.

        Args:
            place: URI of the output.
            artifact: its description, as `run` returned it.
        """


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
        report = _Sparse(log)

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

        return [[key, folder.fingerprint(key)] for pattern in _below(input, entry["config"]["files"])
                for folder, key in matching(pattern)]

    def place(self, output: str, entry: Entry, key: str) -> str:
        return storage.join(output, "tokenizers", f"{entry['name']}-{key}", "tokenizer.json")

    def run(self, task: Task, log: Log) -> dict[str, Any]:
        from tidewheel.data.tokenize.tokenizer_training import train_tokenizer

        config = task.entry["config"]
        trained = train_tokenizer(_below(task.input, config["files"]), field=config["text"],
                                  vocabulary_size=config["vocabulary_size"], sample_bytes=config["sample_bytes"],
                                  special_tokens=config["special_tokens"])
        folder, name = storage.split(task.place)
        return {"hash": folder.write(name, trained.tokenizer).hash, "vocabulary_size": config["vocabulary_size"]}

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        folder, name = storage.split(place)
        return _same(folder.uri, name, artifact["hash"])


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
        return {name: _manifest(uri) for name, uri in uris.items() if uri and not uri.startswith(REFERENCE)}

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

        report = _Sparse(log)

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


class EvaluateKind(StepKind):
    """`tw.Evaluate`: a JSON file."""

    def recipe(self, entry: Entry) -> Any:
        return {"sequences": entry["config"]["sequences"]}

    def content(self, entry: Entry, input: str, output: str) -> Any:
        return {name: _manifest(uri) for name, uri in entry["config"]["data"].items()}

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
                                         "tokens": score.tokens} for name, score in evaluation.scores.items()}
        folder, name = storage.split(task.place)
        stamp = folder.write_json(name, {"step": evaluation.step, "loss": evaluation.loss, "sets": scores})
        return {"hash": stamp.hash, "step": evaluation.step, "loss": evaluation.loss}

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        folder, name = storage.split(place)
        return _same(folder.uri, name, artifact["hash"])


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
        return {"hash": _folder_hash(task.place), "parameters": done.parameters}

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        return storage.store(place).exists("config.json")


class FunctionKind(StepKind):
    """`tw.Call`: the files that the function writes."""

    def recipe(self, entry: Entry) -> Any:
        return {"settings": entry["config"], "code": entry["code"], "function": entry["function"].partition(":")[2]}

    def content(self, entry: Entry, input: str, output: str) -> Any:
        return {}

    def place(self, output: str, entry: Entry, key: str) -> str:
        return storage.join(output, "functions", f"{entry['name']}-{key}")

    def run(self, task: Task, log: Log) -> dict[str, Any]:
        function = task.function or imported(task.entry)
        if task.function is None or _is_importable(function):
            check_source(function, task.entry)
        value = function(**task.needs, output=task.place, **task.entry["config"])
        try:
            json.dumps(value)
        except TypeError:
            raise ConfigError(f"the function returned {type(value).__name__}, which is not JSON",
                              where=task.entry["name"], fix="return numbers, texts, lists and dicts, or None; larger "
                              "things belong below `output`") from None
        return {"hash": _folder_hash(task.place, value), "value": value}

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        return _folder_hash(place, artifact["value"]) == artifact["hash"]


KINDS: dict[str, Any] = {"pipeline": PipelineKind(), "tokenizer": TokenizerKind(), "train": TrainKind(),
                         "evaluate": EvaluateKind(), "export": ExportKind(), "function": FunctionKind()}


def _import_own_parts(entry: Entry) -> None:
    """Make the modules of a training's own parts importable.

    Raises:
        ConfigError: a module is missing, or its source differs from the one that the workflow was made of.
    """
    for code in entry.get("code", ()):
        Code(**code).load()


def imported(entry: Entry) -> Callable[..., Any]:
    """Import the function of a `Call` by its name; `check_source` compares its source.

    Raises:
        ConfigError: there is no such module, or the function is not at the module's top.
    """
    module, _, name = entry["function"].partition(":")
    try:
        if module == "__main__" or "<" in name:
            raise ImportError(f"{name} cannot be imported from {module}")
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the function cannot be imported ({error})", where=entry["name"],
                          fix="define it at the top of a module that every node has") from None
    function: Callable[..., Any] = value
    return function


def check_source(function: Callable[..., Any], entry: Entry) -> None:
    """Check that an imported function is the one that the step's key was made of.

    Raises:
        ConfigError: its source differs here.
    """
    if (code := source_hash(function, where=entry["name"])) != entry["code"]:
        raise ConfigError(f"the source of the function {entry['function']} is {code} here, and {entry['code']} where "
                          "the workflow was made", where=entry["name"], fix="upload the code with the workflow "
                          "(working_dir=\".\"), or bring every node to the same version, and submit it again")


def _is_importable(function: Callable[..., Any]) -> bool:
    """Return whether a function was imported here, rather than unpickled with its code."""
    value: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        value = getattr(value, part, None)
    return value is function


class _Sparse:
    """Pass on one line every few seconds, and drop the others."""

    def __init__(self, log: Log, seconds: float = 5.0) -> None:
        self._log = log
        self._seconds = seconds
        self._last = 0.0

    def __call__(self, text: str, now: bool = False) -> None:
        if now or time.monotonic() - self._last >= self._seconds:
            self._last = time.monotonic()
            self._log(text)


def _below(input: str, patterns: list[str]) -> list[str]:
    return [pattern if "://" in pattern or pattern.startswith(("/", "~"))
            else storage.join(storage.absolute(input), pattern) for pattern in patterns]


def _same(uri: str, key: str, expected: str) -> bool:
    try:
        return storage.store(uri).hash(key) == expected
    except FileNotFoundError:
        return False


def _manifest(uri: str) -> str:
    """Return the hash of a shard set's manifest, or the URI itself while there is none."""
    try:
        return storage.store(uri).hash("manifest.json")
    except FileNotFoundError:
        return uri


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


def _folder_hash(uri: str, value: Any = None) -> str:
    folder = storage.store(uri)
    files = [[entry.key, folder.hash(entry.key)] for entry in folder.list()]
    return storage.content_hash(json.dumps([files, value], sort_keys=True).encode())
