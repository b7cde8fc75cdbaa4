"""Workflows written in YAML: the steps of the SDK by name, with the same keys.

    name: sft
    steps:
      - tokenizer: {name: words, files: ["text/*.jsonl"], vocabulary_size: 4096}
      - pipeline: {recipe: text.yaml, tokenizer: words}
      - train: {name: base, config: base.yaml, data: text, set: {steps: 500}}
      - export: {name: model, run: base}

A step names the steps that it reads, which come before it. Paths of recipes and configurations are relative to the
file.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pydantic
from pydantic import Field

from tidewheel import storage
from tidewheel.config import Config, build, load, setting
from tidewheel.errors import ConfigError
from tidewheel.workflow.pipeline import Pipeline
from tidewheel.workflow.steps import REFERENCE, Evaluate, Export, Reference, Tokenizer, WorkflowStep
from tidewheel.workflow.training import Train
from tidewheel.workflow.workflow import Workflow

S = TypeVar("S")
Values = dict[str, Any]


class TokenizerEntry(Config):
    """`tw.Tokenizer`."""

    name: str
    """Name of the step."""
    files: tuple[str, ...]
    """Files of documents, or patterns; relative ones are below the workflow's input."""
    vocabulary_size: int = Field(default=32_000, ge=257)
    """Number of tokens, including the 256 bytes and the special tokens."""
    sample_bytes: int = Field(default=100_000_000, ge=1)
    """Bytes of text to train on."""
    text: str = "text"
    """Field with a document's text."""
    special_tokens: tuple[str, ...] = ()
    """Further special tokens, for chat templates."""


class PipelineEntry(Config):
    """`tw.Pipeline`. Its name is the recipe's."""

    recipe: str | Values
    """A YAML file, or the recipe itself."""
    tokenizer: str = ""
    """The `tokenizer` step that makes the recipe's tokenizer; "": the recipe names a file."""
    set: Values = Field(default_factory=dict)
    """Settings by dotted key that replace those of the recipe, {steps.3.pack.sequence_length: 256}."""


class TrainEntry(Config):
    """`tw.Train`."""

    name: str
    """Name of the step, which is the run's id."""
    config: str | Values
    """A YAML file, or the configuration itself."""
    data: str | dict[str, str]
    """The pipeline whose shards it reads, or several of these by domain of the mixture."""
    init_from: str = ""
    """The training whose last checkpoint it starts from."""
    reference: str = ""
    """The `reference` step whose log-probabilities it reads."""
    overlap: bool = False
    """Start when the first wave of the pipeline is packed."""
    set: Values = Field(default_factory=dict)
    """Settings by dotted key that replace those of the configuration, {optimizer.learning_rate: 1.0e-4}."""


class ReferenceEntry(Config):
    """`tw.Reference`."""

    name: str
    """Name of the step."""
    model: str
    """The training whose last checkpoint is the reference model."""
    data: str
    """The pipeline that makes the pairs."""
    mismatched: bool = False
    """Add what objective kto needs."""


class EvaluateEntry(Config):
    """`tw.Evaluate`."""

    name: str
    """Name of the step."""
    run: str
    """The training."""
    data: dict[str, str] = Field(default_factory=dict)
    """Pipelines whose validation sets are used, by name; none: the run's own."""
    sequences: int = Field(default=0, ge=0)
    """Sequences to read of each set; 0: all."""


class ExportEntry(Config):
    """`tw.Export`."""

    name: str
    """Name of the step."""
    run: str
    """The training."""
    dtype: str = "float32"
    """Dtype of the weights: float32, bfloat16 or float16."""


class Entry(Config):
    """One step: exactly one of these keys."""

    tokenizer: TokenizerEntry | None = None
    """A tokenizer, trained on documents."""
    pipeline: PipelineEntry | None = None
    """Documents, conversations or pairs to shards."""
    train: TrainEntry | None = None
    """A training run."""
    reference: ReferenceEntry | None = None
    """Log-probabilities of pairs under a reference model."""
    evaluate: EvaluateEntry | None = None
    """Losses of a training's last checkpoint."""
    export: ExportEntry | None = None
    """A training's last checkpoint as a Hugging Face folder."""

    @pydantic.model_validator(mode="after")
    def _one_key(self) -> Entry:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a step is exactly one of {', '.join(type(self).model_fields)}, but "
                             f"{' and '.join(given) or 'none'} is given")
        return self


class WorkflowFile(Config):
    """A workflow in YAML."""

    name: str
    """Name of the workflow."""
    include: str = ""
    """Another workflow file, whose steps come first."""
    steps: tuple[Entry, ...] = Field(min_length=1)
    """The steps, each after those that it reads."""


def read_workflow(path: str, overrides: Sequence[str] = ()) -> Workflow:
    """Return the workflow of a YAML file.

    Args:
        path: path of the file.
        overrides: "STEP.key=value", settings of a pipeline's recipe or a training's configuration.

    Raises:
        ConfigError: the file is missing or wrong, or a step reads one that does not come before it.
    """
    changes: dict[str, Values] = {}
    for override in overrides:
        key, value = setting(override)
        name, _, inner = key.partition(".")
        changes.setdefault(name, {})[inner] = value
    built = _Steps(path, changes)
    name = built.add(path)
    if unknown := sorted(changes.keys() - built.changeable):
        raise ConfigError(f"no pipeline or training has the name {unknown[0]!r}", where="--set",
                          fix=f"write STEP.key=value with one of {', '.join(sorted(built.changeable))}")
    return Workflow(name, *built.steps.values())


@dataclass
class _Steps:
    """The steps of a file, made one after the other."""

    path: str
    changes: Mapping[str, Values]
    steps: dict[str, WorkflowStep] = field(default_factory=dict)
    changeable: set[str] = field(default_factory=set)

    def add(self, path: str) -> str:
        """Add the steps of a file, those of an included one first, and return the workflow's name."""
        file = load(WorkflowFile, path)
        self.path = path
        if file.include:
            self.add(self._beside(file.include))
            self.path = path
        for entry in file.steps:
            step = self._made(entry)
            if step.name in self.steps:
                raise ConfigError(f"two steps have the name {step.name!r}", where=path, fix="rename one of them")
            self.steps[step.name] = step
        return file.name

    def _made(self, entry: Entry) -> WorkflowStep:
        if entry.tokenizer is not None:
            settings = {name: getattr(entry.tokenizer, name) for name in TokenizerEntry.model_fields}
            return Tokenizer(**settings)
        if entry.pipeline is not None:
            return self._pipeline(entry.pipeline)
        if entry.train is not None:
            return self._train(entry.train)
        if (reference := entry.reference) is not None:
            return Reference(reference.name, self._find(reference.model, Train),
                             self._find(reference.data, Pipeline), reference.mismatched)
        if (evaluate := entry.evaluate) is not None:
            data = {name: self._find(step, Pipeline) for name, step in evaluate.data.items()}
            return Evaluate(evaluate.name, self._find(evaluate.run, Train), data, evaluate.sequences)
        assert entry.export is not None
        return Export(entry.export.name, self._find(entry.export.run, Train), entry.export.dtype)

    def _pipeline(self, entry: PipelineEntry) -> Pipeline:
        from tidewheel.data.config import PipelineConfig

        if isinstance(entry.recipe, str):
            config = load(PipelineConfig, self._beside(entry.recipe))
        else:
            config = build(PipelineConfig, entry.recipe, where=self.path)
        changed = {**entry.set, **self._changes(config.name)}
        overrides = [f"{key}={json.dumps(value)}" for key, value in changed.items()]
        values = build(PipelineConfig, config.canonical(), overrides, where=f"{self.path}, {config.name}").canonical()
        tokenizer = None
        if entry.tokenizer:
            tokenizer = self._find(entry.tokenizer, Tokenizer)
            _tokenize_with(values["steps"], f"{REFERENCE}{tokenizer.name}", self.path)
        name, source, steps = values.pop("name"), values.pop("read"), values.pop("steps")
        return Pipeline(name, tuple(values.items()), tuple(source.items()), tuple(steps), tokenizer)

    def _train(self, entry: TrainEntry) -> Train:
        data: Any = (self._find(entry.data, Pipeline) if isinstance(entry.data, str) else
                     {name: self._find(step, Pipeline) for name, step in entry.data.items()})
        settings: Values = {"run": {"id": entry.name}}
        for key, value in {**entry.set, **self._changes(entry.name)}.items():
            _put(settings, key, value)
        if "data" in settings:
            settings["reading"] = settings.pop("data")  # the argument `data` is the pipeline
        return Train(self._beside(entry.config) if isinstance(entry.config, str) else entry.config, data,
                     init_from=self._find(entry.init_from, Train) if entry.init_from else None,
                     reference=self._find(entry.reference, Reference) if entry.reference else None,
                     overlap=entry.overlap, **settings)

    def _changes(self, name: str) -> Values:
        self.changeable.add(name)
        return dict(self.changes.get(name, {}))

    def _find(self, name: str, kind: type[S]) -> S:
        step = self.steps.get(name)
        if isinstance(step, kind):
            return step
        names = [known for known, other in self.steps.items() if isinstance(other, kind)]
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5) or names
        raise ConfigError(f"no step {name!r} of kind {kind.__name__} comes before the one that reads it",
                          where=self.path, fix=f"name one that does: {', '.join(near) or 'there is none'}")

    def _beside(self, path: str) -> str:
        """Return a path that is relative to the file."""
        if "://" in path or path.startswith(("/", "~")):
            return path
        if "://" in self.path:
            return storage.join(self.path.rpartition("/")[0], path)
        return str(Path(self.path).parent / path)


def _tokenize_with(steps: list[Values], file: str, where: str) -> None:
    """Set the tokenizer of a recipe's steps.

    Raises:
        ConfigError: the recipe has no tokenize step, or trains a tokenizer itself.
    """
    for step in steps:
        if (tokenize := step.get("tokenize")) is not None and not tokenize.get("train"):
            tokenize["file"] = file
            return
    raise ConfigError("a tokenizer is given for a recipe that takes none", where=where,
                      fix="give the recipe a step `tokenize` without `train`, or leave out `tokenizer`")


def _put(values: Values, key: str, value: Any) -> None:
    """Set a value by its dotted key; nested values are kept as they are."""
    *parents, last = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
    values[last] = value
