"""Steps of a workflow beside `tw.Pipeline` and `tw.Train`: tokenizer training, evaluation, export, Python functions.

Each describes itself in `entry()`: JSON values with its kind, name, configuration and the names of the steps it reads.
"""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tidewheel.config import Setting
from tidewheel.errors import ConfigError

if TYPE_CHECKING:
    from tidewheel.workflow.pipeline import Pipeline
    from tidewheel.workflow.training import Train

REFERENCE = "step:"
"""Prefix of a step's name in a configuration, where the path of that step's output will stand."""


class WorkflowStep(Protocol):
    """A step of a workflow: `Pipeline`, `Train`, `Tokenizer`, `Reference`, `Evaluate`, `Export`, `ScalingLaw` or
    `Call`."""

    @property
    def name(self) -> str:
        """Name of the step, unique in its workflow."""

    def inputs(self) -> Mapping[str, WorkflowStep]:
        """Return the steps that this one reads, by role."""

    def entry(self) -> dict[str, Setting]:
        """Return the step as JSON values; see the module."""


@dataclass(frozen=True)
class Tokenizer:
    """A byte-level BPE tokenizer, trained on documents. `Pipeline.tokenize` takes it in place of a file.

    Args:
        name: name of the step.
        files: files of documents, or patterns; relative ones are below the workflow's input.
        vocabulary_size: number of tokens, including the 256 bytes and the special tokens.
        sample_bytes: bytes of text to train on.
        text: field with a document's text.
        special_tokens: further special tokens, for chat templates.
    """

    name: str
    files: str | tuple[str, ...]
    vocabulary_size: int = 32_000
    sample_bytes: int = 100_000_000
    text: str = "text"
    special_tokens: tuple[str, ...] = ()

    def inputs(self) -> dict[str, WorkflowStep]:
        """Return no steps: a tokenizer reads files."""
        return {}

    def entry(self) -> dict[str, Setting]:
        """Return the step as JSON values; see the module."""
        files = [self.files] if isinstance(self.files, str) else list(self.files)
        return {"kind": "tokenizer", "name": self.name, "config": {
            "files": files, "vocabulary_size": self.vocabulary_size, "sample_bytes": self.sample_bytes,
            "text": self.text, "special_tokens": list(self.special_tokens)}}


@dataclass(frozen=True)
class Evaluate:
    """Loss, perplexity and bits per byte of a training run's last checkpoint.

    Args:
        name: name of the step.
        run: the training.
        data: validation sets by name: URIs, or pipelines, whose validation sets are used. Default: the run's own.
        sequences: number of sequences to read of each set, from its first on; 0 reads all.
    """

    name: str
    run: Train
    data: Mapping[str, str | Pipeline] = field(default_factory=dict)
    sequences: int = 0

    def inputs(self) -> dict[str, WorkflowStep]:
        """Return the training, and the pipelines whose validation sets are used, by role."""
        steps: dict[str, WorkflowStep] = {"run": self.run}
        for name, data in self.data.items():
            if not isinstance(data, str):
                steps[f"data.{name}"] = data
        return steps

    def entry(self) -> dict[str, Setting]:
        """Return the step as JSON values; see the module."""
        uris = {name: uri for name, uri in self.data.items() if isinstance(uri, str)}
        return {"kind": "evaluate", "name": self.name, "config": {"data": uris, "sequences": self.sequences}}


@dataclass(frozen=True)
class Export:
    """A training run's last checkpoint as a Hugging Face folder.

    Args:
        name: name of the step.
        run: the training.
        dtype: dtype of the weights: float32, bfloat16 or float16.
    """

    name: str
    run: Train
    dtype: str = "float32"

    def inputs(self) -> dict[str, WorkflowStep]:
        """Return the training."""
        return {"run": self.run}

    def entry(self) -> dict[str, Setting]:
        """Return the step as JSON values; see the module."""
        return {"kind": "export", "name": self.name, "config": {"dtype": self.dtype}}


@dataclass(frozen=True)
class Reference:
    """Log-probabilities of a pipeline's preference pairs under a model, which `Train(reference=...)` reads.

    Args:
        name: name of the step.
        model: the training whose last checkpoint is the reference model.
        data: the pipeline that makes the pairs.
        mismatched: add what objective kto needs.
    """

    name: str
    model: Train
    data: Pipeline
    mismatched: bool = False

    def inputs(self) -> dict[str, WorkflowStep]:
        """Return the training and the pipeline, by role."""
        return {"model": self.model, "data": self.data}

    def entry(self) -> dict[str, Setting]:
        """Return the step as JSON values; see the module."""
        return {"kind": "reference", "name": self.name, "config": {"mismatched": self.mismatched}}


class Call:
    """Any Python function, run as a Ray task: function(output=URI, INPUT=URI ..., SETTING=value ...).

    The function writes below `output`, and may be killed and called again. Its return value (JSON values) is kept in
    the step's record. It runs again when its source, its settings or an input changes. Changes of the functions that
    it calls are not noticed.

    Args:
        name: name of the step.
        function: a function at the top of a module where the workflow is submitted; any function where it runs from
            this process.
        inputs: steps, by the name of the argument that gets the URI of their output.
        cpus: CPUs that Ray reserves for the function.
        settings: further arguments, JSON values.

    Raises:
        ConfigError: two arguments have one name.
    """

    def __init__(self, name: str, function: Callable[..., object], *, inputs: Mapping[str, WorkflowStep] | None = None,
                 cpus: float = 1, **settings: Setting) -> None:
        self.name = name
        self.function = function
        self.cpus = cpus
        self.settings = settings
        self._inputs = dict(inputs or {})
        if clash := {"output", *self._inputs} & settings.keys() | {"output"} & self._inputs.keys():
            raise ConfigError(f"{min(clash)!r} is the name of an input or of the output", where=f"Call({name!r})",
                              fix="choose another name for the argument")

    def inputs(self) -> dict[str, WorkflowStep]:
        """Return the steps that the function reads, by argument."""
        return self._inputs

    def entry(self) -> dict[str, Setting]:
        """Return the step as JSON values; see the module.

        Raises:
            ConfigError: the function's source is not known.
        """
        return {"kind": "function", "name": self.name, "config": self.settings, "cpus": self.cpus,
                "code": source_hash(self.function, where=f"Call({self.name!r})"),
                "function": f"{self.function.__module__}:{self.function.__qualname__}"}


def source_hash(function: Callable[..., object], *, where: str) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a function's source, without its indentation.

    Raises:
        ConfigError: the source is not known.
    """
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise ConfigError("the source of the function is not known, so a change of it would not be noticed",
                          where=where, fix="define it in a file that exists where it runs") from None
    return hashlib.sha256(source.encode()).hexdigest()[:16]
