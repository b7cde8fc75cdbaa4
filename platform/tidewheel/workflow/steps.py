"""Steps of a workflow beside `tw.Pipeline` and `tw.Train`: tokenizer training, evaluation, export, Python functions.

Each says what it is with `entry()`: JSON values with its kind, name, configuration and the names of the steps it reads.
"""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidewheel.errors import ConfigError

if TYPE_CHECKING:
    from tidewheel.workflow.pipeline import Pipeline
    from tidewheel.workflow.training import Train

REFERENCE = "step:"
"""Before a step's name where a configuration has the path of what that step makes."""


@dataclass(frozen=True)
class Tokenizer:
    """A byte-level BPE tokenizer, trained on documents; `Pipeline.tokenize` takes it in the place of a file.

    Args:
        name: of the step.
        files: files of documents, or patterns; relative ones are below the workflow's input.
        vocabulary_size: tokens, the 256 bytes and the special tokens included.
        sample_bytes: text to train on.
        text: field with a document's text.
        special_tokens: further special tokens, for chat templates.
    """

    name: str
    files: str | tuple[str, ...]
    vocabulary_size: int = 32_000
    sample_bytes: int = 100_000_000
    text: str = "text"
    special_tokens: tuple[str, ...] = ()

    def inputs(self) -> dict[str, Any]:
        """None: it reads files."""
        return {}

    def entry(self) -> dict[str, Any]:
        """See the module."""
        files = [self.files] if isinstance(self.files, str) else list(self.files)
        return {"kind": "tokenizer", "name": self.name, "config": {
            "files": files, "vocabulary_size": self.vocabulary_size, "sample_bytes": self.sample_bytes,
            "text": self.text, "special_tokens": list(self.special_tokens)}}


@dataclass(frozen=True)
class Evaluate:
    """Loss, perplexity and bits per byte of a training run's last checkpoint.

    Args:
        name: of the step.
        run: the training.
        data: validation sets by name, URIs or pipelines (whose validation set is meant); default: the run's own.
        sequences: the first so many of each set; 0: all.
    """

    name: str
    run: Train
    data: Mapping[str, str | Pipeline] = field(default_factory=dict)
    sequences: int = 0

    def inputs(self) -> dict[str, Any]:
        """The training, and the pipelines whose validation sets are used."""
        return {"run": self.run, **{f"data.{name}": data for name, data in self.data.items()
                                    if not isinstance(data, str)}}

    def entry(self) -> dict[str, Any]:
        """See the module."""
        uris = {name: uri for name, uri in self.data.items() if isinstance(uri, str)}
        return {"kind": "evaluate", "name": self.name, "config": {"data": uris, "sequences": self.sequences}}


@dataclass(frozen=True)
class Export:
    """A training run's last checkpoint as a Hugging Face folder.

    Args:
        name: of the step.
        run: the training.
        dtype: of the weights: float32, bfloat16 or float16.
    """

    name: str
    run: Train
    dtype: str = "float32"

    def inputs(self) -> dict[str, Any]:
        """The training."""
        return {"run": self.run}

    def entry(self) -> dict[str, Any]:
        """See the module."""
        return {"kind": "export", "name": self.name, "config": {"dtype": self.dtype}}


class Call:
    """Any Python function, run as a Ray task: function(output=URI, INPUT=URI ..., SETTING=value ...).

    It writes what it makes below `output`, and may be killed and called again. Its return value (JSON values) is kept
    in the step's record. It runs again when its source, its settings or an input changes; what it calls is not looked
    at.

    Args:
        name: of the step.
        function: of a module, where the workflow is submitted; any, where it is run from here.
        inputs: steps by the name of the argument that gets the URI of what they made.
        cpus: reserved for it.
        settings: further arguments, JSON values.
    """

    def __init__(self, name: str, function: Callable[..., Any], *, inputs: Mapping[str, Any] | None = None,
                 cpus: float = 1, **settings: Any) -> None:
        self.name, self.function, self.cpus, self.settings = name, function, cpus, settings
        self._inputs = dict(inputs or {})
        if clash := {"output", *self._inputs} & settings.keys() | {"output"} & self._inputs.keys():
            raise ConfigError(f"{min(clash)!r} is the name of an input or of the output", where=f"Call({name!r})",
                              mend="choose another name for the argument")

    def inputs(self) -> dict[str, Any]:
        """As given."""
        return self._inputs

    def entry(self) -> dict[str, Any]:
        """See the module."""
        return {"kind": "function", "name": self.name, "config": self.settings, "cpus": self.cpus,
                "code": source_hash(self.function, where=f"Call({self.name!r})"),
                "function": f"{self.function.__module__}:{self.function.__qualname__}"}


def source_hash(function: Callable[..., Any], *, where: str) -> str:
    """The beginning (16 hexadecimal digits) of the SHA-256 of a function's source, without its indentation.

    Raises:
        ConfigError: the source is not known.
    """
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise ConfigError("the source of the function is not known, so a change of it would not be seen", where=where,
                          mend="define it in a file that is there where it runs") from None
    return hashlib.sha256(source.encode()).hexdigest()[:16]
