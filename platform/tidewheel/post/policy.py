"""Read the versions of the policy that training publishes (`train.policy.publishing`)."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import safetensors
import safetensors.torch
import torch

from tidewheel.engines.serving.base import Weights
from tidewheel.errors import CheckpointError, StorageAwayError, StorageError
from tidewheel.models.decoder import VALUE_HEAD, Decoder
from tidewheel.models.family import Model
from tidewheel.models.huggingface import weight_shapes
from tidewheel.shards import notices
from tidewheel.shards.manifest import Fields
from tidewheel.storage import Stamp, Store, content_hash
from tidewheel.train.policy.publishing import FOLDER, FORMAT, head_key

_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
_DELTA = re.compile(r"[0-9a-f]{32}\.delta")
_HASH = re.compile(r"blake3-[0-9a-f]{64}")
REMAKE = "start the run again: training publishes the version again"


@dataclass(frozen=True)
class VersionFile:
    """A file of weights; keys are in the run's folder."""

    whole: Stamp
    before: str = ""
    """Hash of the file of the version before, from which the delta leads to this one."""
    delta: Stamp | None = None
    """None: there is no version before, or the delta would be no smaller."""


@dataclass(frozen=True)
class Version:
    """A published version of the policy."""

    number: int
    """The step after which it was published."""
    files: tuple[VersionFile, ...]
    """One for each stage of a pipeline."""

    @property
    def digest(self) -> str:
        """Return a hash of the weights."""
        return content_hash("\n".join(file.whole.hash for file in self.files).encode())


def published(run: Store, number: int, stages: int) -> Version | None:
    """Return a version if all its stages are published, None if not.

    Args:
        run: the run's folder.
        number: of the version.
        stages: of the pipeline; 1 without one.

    Raises:
        CheckpointError: a head is damaged.
    """
    files = []
    for stage in range(stages):
        key = head_key(number, stage, stages)
        try:
            fields = Fields(run.read_json(key), run.at(key))
        except FileNotFoundError:
            return None
        except StorageAwayError:
            raise
        except StorageError as error:
            raise CheckpointError(error.what, where=run.at(key), fix=REMAKE) from None
        fields.one_of("format", (FORMAT,))
        fields.one_of("version", (number,))
        name = fields.matching("file", _NAME)
        whole = Stamp(f"{FOLDER}/{name}", fields.number("bytes", at_least=1), fields.matching("hash", _HASH))
        files.append(VersionFile(whole, *_delta(fields)))
    return Version(number, tuple(files))


def _delta(fields: Fields) -> tuple[str, Stamp | None]:
    """Return the hash of the file that a head's delta begins with, and the delta; ("", None) if it has none."""
    if fields.values.get("delta") is None:
        return "", None
    delta = fields.group("delta")
    return delta.matching("before", _HASH), Stamp(
        f"{FOLDER}/{delta.matching('file', _DELTA)}", delta.number("bytes", at_least=1), delta.matching("hash", _HASH))


def wait_for(run: Store, number: int, stages: int, *, poll: float, ended: threading.Event) -> Version | None:
    """Wait until a version is published; return None if `ended` is set before.

    Storage that is unavailable is waited for, too: training, which publishes, decides for how long.

    Args:
        run: the run's folder.
        number: of the version.
        stages: see `published`.
        poll: seconds between two looks.
        ended: ends the wait.
    """
    while not ended.is_set():
        told = notices.told(run.uri)
        with contextlib.suppress(StorageAwayError):
            found = published(run, number, stages)
            if found is not None:
                return found
        notices.wait(run.uri, poll, told)
    return None


def newest(run: Store, stages: int) -> Version | None:
    """Return the newest version of which all stages are published, None if there is none.

    Args:
        run: the run's folder.
        stages: see `published`.
    """
    ending = head_key(0, 0, stages).partition(".")[2]
    numbers = sorted(int(entry.key.rpartition("/")[2].partition(".")[0]) for entry in run.list(FOLDER)
                     if entry.key.endswith(f".{ending}"))
    for number in reversed(numbers):
        version = published(run, number, stages)
        if version is not None:
            return version
    return None


def put(files: Sequence[bytes], version: Version, model: Decoder, where: str) -> None:
    """Put a version's weights into a decoder.

    Args:
        files: content of the version's files, whose hashes were checked.
        version: the version.
        model: of the run's model.
        where: URI of the run, for error messages.

    Raises:
        CheckpointError: the weights are of another model.
    """
    own = {name: value.shape for name, value in model.state_dict().items()}
    model.load_state_dict(tensors_of(files, version, own, where))


def tensors_of(files: Sequence[bytes], version: Version, shapes: Mapping[str, torch.Size], where: str
               ) -> dict[str, torch.Tensor]:
    """Return a version's weights by name.

    Args:
        files: content of the version's files, whose hashes were checked.
        version: the version.
        shapes: of the run's model.
        where: URI of the run, for error messages.

    Raises:
        CheckpointError: the weights are of another model.
    """
    values: dict[str, torch.Tensor] = {}
    for file, data in zip(version.files, files):
        try:
            values |= safetensors.torch.load(data)
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"no weights: {error}", where=f"{where}/{file.whole.key}", fix=REMAKE) from None
    check(values, version, shapes, where)
    return values


def whole_weights(files: Sequence[bytes], version: Version, config: Model, vocabulary_size: int, where: str, *,
                  values: bool = False) -> Weights:
    """Return a version's weights for an engine, without a value head.

    Args:
        files: see `put`.
        version: see `put`.
        config: the run's model.
        vocabulary_size: rows of the embedding.
        where: see `put`.
        values: whether the version has a value head.

    Raises:
        CheckpointError: the weights are of another model.
    """
    shapes = weight_shapes(config, vocabulary_size)
    head = {VALUE_HEAD: torch.Size((1, config.dim))} if values else {}
    tensors = tensors_of(files, version, {**shapes, **head}, where)
    return Weights(version.digest, {name: tensor for name, tensor in tensors.items() if name in shapes})


def check(values: Mapping[str, torch.Tensor], version: Version, shapes: Mapping[str, torch.Size], where: str) -> None:
    """Raise CheckpointError if tensors are not those of a model.

    Args:
        values: by name.
        version: see `put`.
        shapes: of the model's tensors.
        where: see `put`.
    """
    if {**shapes} != {name: value.shape for name, value in values.items()}:
        raise CheckpointError("the weights are of another model than the run's",
                              where=f"{where}/{version.files[0].whole.key}", fix="start a new run with another run.id")


def empty(config: Model, vocabulary_size: int, device: torch.device | str = "cpu", *, values: bool = False) -> Decoder:
    """Return a decoder whose weights `load` will set.

    Args:
        config: the run's model.
        vocabulary_size: rows of the embedding.
        device: of the weights.
        values: whether it has a value head.
    """
    with torch.device(device):
        model = Decoder(config, vocabulary_size)
        if values:
            model.add_value_head()
    return model.requires_grad_(False)


def start(run: Store, stages: int) -> Version:
    """Return the version before the first step.

    Args:
        run: the run's folder.
        stages: see `published`.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    version = published(run, 0, stages)
    if version is None:
        raise CheckpointError("the policy before the first step, which is the reference model, is missing",
                              where=run.at(FOLDER), fix="start a new run with another run.id")
    return version
