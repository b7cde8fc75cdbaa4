"""What each kind of step reads, where it writes, and how it is run. A step here is its entry (`steps`): JSON values.

`KINDS[kind]` has, for each kind: `recipe`, the configuration that decides the result; `content`, the identity of what
is read from outside the workflow; `place`, the URI of what is made; `run`, which makes it (again and again, if killed)
and gives the artifact's description, with its "hash"; and `intact`, whether it is still there.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidewheel import storage
from tidewheel.config import build
from tidewheel.errors import ConfigError, ShardError
from tidewheel.parts import Code
from tidewheel.workflow.steps import REFERENCE, source_hash

Entry = Mapping[str, Any]
Log = Callable[[str], None]
SHARDS, VALIDATION = "shards", "validation"
#: How long a training beside its pipeline waits for a wave, if its configuration does not say: one that fails ends it.
OVERLAP_SECONDS = 3600
#: A training's artifact has the hash of its key and of the batches it read; of a reproducible one the last
#: checkpoint's tensors as well, up to this size.
DIGEST_BYTES = 20 << 30
#: Groups of a training's configuration that do not decide its result; see `TrainConfig.recipe_hash`.
UNDECISIVE = ("run", "checkpoint", "elastic", "parallel", "compile", "compile_cache", "memory", "metrics", "profile")


@dataclass(frozen=True)
class Task:
    """A step that is to be run."""

    entry: Entry
    place: str
    """Where it writes."""
    key: str
    input: str
    """URI that relative paths are below."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Places of the steps it reads, by role."""
    max_workers: int | None = None
    """A training's share of the cluster while others train beside it."""
    function: Callable[..., Any] | None = None
    """Of a function step that cannot be imported."""


class PipelineKind:
    """`tw.Pipeline`: a folder with shards/, validation/, verdicts/ ..."""

    def recipe(self, entry: Entry) -> Any:
        from tidewheel.data.config import UNDECISIVE, PipelineConfig
        from tidewheel.data.stages.recipe_versions import of_steps

        config = build(PipelineConfig, entry["config"], where=entry["name"])
        settings = {name: value for name, value in config.decisive().items() if name not in UNDECISIVE}
        return {**settings, "versions": of_steps(config)}

    def content(self, entry: Entry, input: str, output: str) -> Any:
        from tidewheel.data.config import PipelineConfig
        from tidewheel.data.stages.job import content
        from tidewheel.data.stages.recipe_versions import of_files

        config = build(PipelineConfig, entry["config"], where=entry["name"])
        tokenize = config.step("tokenize")
        given = tokenize is not None and (tokenize.file or "").startswith(REFERENCE)
        found = content(config, input=input, output=output, given=given)
        return {**found, "readers": of_files((name for name, _, _ in found["files"]), config)}

    def place(self, output: str, entry: Entry, key: str) -> str:
        return storage.join(output, "data", f"{entry['name']}-{key}")

    def run(self, task: Task, log: Log) -> dict[str, Any]:
        from tidewheel.data import pipeline
        from tidewheel.data.config import PipelineConfig

        overrides = []
        if "tokenizer" in task.needs:
            step = next(number for number, each in enumerate(task.entry["config"]["steps"]) if each.get("tokenize"))
            overrides.append(f"steps.{step}.tokenize.file={json.dumps(task.needs['tokenizer'])}")
        config = build(PipelineConfig, task.entry["config"], overrides, where=task.entry["name"])
        told = _Sparse(log)

        def on_progress(stage: str, done: int, total: int, note: str = "") -> None:
            told(f"{stage}: {done}/{total} units {note}".rstrip(), now=done == total)

        summary = pipeline.run(config, input=task.input, output=task.place, on_progress=on_progress,
                               may_replace=True)  # the place is the recipe's own
        return {"hash": _set_hash(task.place), "documents": summary.documents, "tokens": summary.tokens}

    def begun(self, place: str) -> bool:
        """Whether there is enough of the set for a training to begin."""
        from tidewheel.shards.growing import wave_key

        return storage.store(place).child(SHARDS).exists(wave_key(0))

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        try:
            return _set_hash(place) == artifact["hash"]
        except (FileNotFoundError, ShardError):  # gone or damaged: running the pipeline again mends it
            return False


class TokenizerKind:
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
        made = train_tokenizer(_below(task.input, config["files"]), field=config["text"],
                               vocabulary_size=config["vocabulary_size"], sample_bytes=config["sample_bytes"],
                               special_tokens=config["special_tokens"])
        place, name = storage.split(task.place)
        return {"hash": place.write(name, made.tokenizer).hash, "vocabulary_size": config["vocabulary_size"]}

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        folder, name = storage.split(place)
        return _same(folder.uri, name, artifact["hash"])


class TrainKind:
    """`tw.Train`: the folder of a run."""

    def recipe(self, entry: Entry) -> Any:
        from tidewheel.train.config import TrainConfig

        _arrive(entry)
        config = build(TrainConfig, entry["config"], where=entry["name"])
        decisive = {name: value for name, value in config.decisive().items() if name not in UNDECISIVE}
        decisive["data"] = {"seed": config.data.seed}  # the sets' contents stand beside this; mixtures are in the hash
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
        """The run's `TrainConfig`, with the places of what it reads and writes."""
        from tidewheel.train.config import TrainConfig

        _arrive(task.entry)
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

        told = _Sparse(log)

        def on_progress(progress: dict[str, Any]) -> None:
            for event in progress.get("events", ()):
                log(describe(event))
            if progress.get("step"):
                loss = f", loss {progress['loss']:.3f}" if progress.get("loss") is not None else ""
                told(f"step {progress['step']}/{progress.get('steps')}{loss}, {progress.get('world_size')} workers")

        config = self.config(task)
        result = fit(config, on_progress=on_progress)
        place = storage.store(task.place)
        digests = {line["step"]: line["digest"] for line in jsonlog.read(place, "batches.jsonl")}
        newest = list_checkpoints(place.child("checkpoints"))[-1:]
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


class EvaluateKind:
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
        found = Evaluator(task.needs["run"], data=sets or None,
                          sequences=task.entry["config"]["sequences"]).evaluate(task.needs["run"])
        scores = {name or "validation": {"loss": score.loss, "bits_per_byte": score.bits_per_byte,
                                         "tokens": score.tokens} for name, score in found.scores.items()}
        place, name = storage.split(task.place)
        stamp = place.write_json(name, {"step": found.step, "loss": found.loss, "sets": scores})
        return {"hash": stamp.hash, "step": found.step, "loss": found.loss}

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        folder, name = storage.split(place)
        return _same(folder.uri, name, artifact["hash"])


class ExportKind:
    """`tw.Export`: a Hugging Face folder."""

    def recipe(self, entry: Entry) -> Any:
        return entry["config"]

    def content(self, entry: Entry, input: str, output: str) -> Any:
        return {}

    def place(self, output: str, entry: Entry, key: str) -> str:
        return storage.join(output, "models", f"{entry['name']}-{key}")

    def run(self, task: Task, log: Log) -> dict[str, Any]:
        from tidewheel.checkpoint.exchange import export

        done = export(task.needs["run"], task.place, dtype=task.entry["config"]["dtype"])
        return {"hash": _folder_hash(task.place), "parameters": done.parameters}

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        return storage.store(place).exists("config.json")


class FunctionKind:
    """`tw.Call`: whatever the function writes below its place."""

    def recipe(self, entry: Entry) -> Any:
        return {"settings": entry["config"], "code": entry["code"], "function": entry["function"].partition(":")[2]}

    def content(self, entry: Entry, input: str, output: str) -> Any:
        return {}

    def place(self, output: str, entry: Entry, key: str) -> str:
        return storage.join(output, "functions", f"{entry['name']}-{key}")

    def run(self, task: Task, log: Log) -> dict[str, Any]:
        function = task.function or imported(task.entry)
        if task.function is None or _came_by_name(function):
            same_source(function, task.entry)
        value = function(**task.needs, output=task.place, **task.entry["config"])
        try:
            json.dumps(value)
        except TypeError:
            raise ConfigError(f"the function returned {type(value).__name__}, which is not JSON",
                              where=task.entry["name"], mend="return numbers, texts, lists and dicts, or None; larger "
                              "things belong below `output`") from None
        return {"hash": _folder_hash(task.place, value), "value": value}

    def intact(self, place: str, artifact: Mapping[str, Any]) -> bool:
        return _folder_hash(place, artifact["value"]) == artifact["hash"]


KINDS: dict[str, Any] = {"pipeline": PipelineKind(), "tokenizer": TokenizerKind(), "train": TrainKind(),
                         "evaluate": EvaluateKind(), "export": ExportKind(), "function": FunctionKind()}


def _arrive(entry: Entry) -> None:
    """Make the modules importable that hold a training's own parts.

    Raises:
        ConfigError: one is not here, or has another source than where the workflow was made.
    """
    for code in entry.get("code", ()):
        Code(**code).arrive()


def imported(entry: Entry) -> Callable[..., Any]:
    """The function of a function step, as this process finds it by its name; `same_source` compares it.

    Raises:
        ConfigError: its module is not there, or it is not at the module's top.
    """
    module, _, name = entry["function"].partition(":")
    try:
        if module == "__main__" or "<" in name:
            raise ImportError(f"{name} cannot be imported from {module}")
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the function is not there ({error})", where=entry["name"],
                          mend="define it at the top of a module that every node has") from None
    function: Callable[..., Any] = found
    return function


def same_source(function: Callable[..., Any], entry: Entry) -> None:
    """See that a function found by its name is the one that the step's key was made of.

    Raises:
        ConfigError: its source is another one here.
    """
    if (code := source_hash(function, where=entry["name"])) != entry["code"]:
        raise ConfigError(f"the source of the function {entry['function']} is {code} here, and {entry['code']} where "
                          "the workflow was made", where=entry["name"], mend="upload the code with the workflow "
                          "(working_dir=\".\"), or bring every node to the same version, and submit it again")


def _came_by_name(function: Callable[..., Any]) -> bool:
    """Whether a function that was handed over was imported here, rather than unpickled with its code."""
    found: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


class _Sparse:
    """Passes on a line every few seconds."""

    def __init__(self, log: Log, seconds: float = 5.0) -> None:
        self._log, self._seconds, self._last = log, seconds, 0.0

    def __call__(self, text: str, now: bool = False) -> None:
        if now or time.monotonic() - self._last >= self._seconds:
            self._last = time.monotonic()
            self._log(text)


def _below(input: str, patterns: list[str]) -> list[str]:
    return [each if "://" in each or each.startswith(("/", "~")) else storage.join(storage.absolute(input), each)
            for each in patterns]


def _same(uri: str, key: str, expected: str) -> bool:
    try:
        return storage.store(uri).hash(key) == expected
    except FileNotFoundError:
        return False


def _manifest(uri: str) -> str:
    """Content of a shard set; the URI itself while there is none."""
    try:
        return storage.store(uri).hash("manifest.json")
    except FileNotFoundError:
        return uri


def _set_hash(place: str) -> str:
    """Content of a pipeline's shard set, wherever its tokenizer's file was: without the hash of the recipe's text. Of a
    pipeline without one, content of what it has written."""
    from tidewheel.shards.manifest import read_manifest

    product = storage.store(place).child("dataset")
    if not storage.store(place).child(SHARDS).exists("manifest.json") and product.exists("manifest.json"):
        return storage.content_hash(json.dumps(product.read_json("manifest.json")["files"], sort_keys=True).encode())
    values = read_manifest(storage.store(place).child(SHARDS)).canonical()
    for name in ("recipe_hash", "recipe"):
        values.pop(name, None)
    return storage.content_hash(json.dumps(values, sort_keys=True).encode())


def _folder_hash(uri: str, value: Any = None) -> str:
    place = storage.store(uri)
    files = [[entry.key, place.hash(entry.key)] for entry in place.list()]
    return storage.content_hash(json.dumps([files, value], sort_keys=True).encode())
