"""Convert checkpoints to and from Hugging Face folders."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import yaml

from tidewheel import storage
from tidewheel.checkpoint import tokenizer_files
from tidewheel.checkpoint.adapters import adapter_of, adapter_values, base_of, read_base
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.manifest import CheckpointManifest, read_manifest
from tidewheel.checkpoint.models import model_of as model_of
from tidewheel.checkpoint.stored import read_stored as read_stored
from tidewheel.checkpoint.verify import check_files, locate
from tidewheel.errors import CheckpointError, ConfigError, StorageError
from tidewheel.models import huggingface
from tidewheel.models.adapting import merge
from tidewheel.models.adapting.names import by_module, parameter_name, weight_name
from tidewheel.models.family import Model
from tidewheel.storage import Store
from tidewheel.stores import versioned


@dataclass(frozen=True)
class Converted:
    """What `export` or `import_` wrote."""

    uri: str
    """The Hugging Face folder, or the run with the checkpoint."""
    parameters: int
    """Number of parameters."""
    config: Model
    vocabulary_size: int
    tokenizer: bool
    """Whether a tokenizer.json is beside the weights."""
    source: str = ""
    """What `import_` has read; of the hub with the commit."""

    def settings(self) -> str:
        """Return the `model:` block, as YAML, of a training run that starts from these weights."""
        model = {**self.config.shape(), "vocabulary_size": self.vocabulary_size}
        defaults = {name: field.default for name, field in type(self.config).model_fields.items()}
        changed = {name: value for name, value in model.items() if value != defaults.get(name)}
        block = yaml.safe_dump({"model": {**changed, "init_from": self.uri}}, sort_keys=False)
        return f"# {self.parameters:,} parameters of {self.source}\n{block}"


def export(uri: str, out: str, *, dtype: str = "float32", tokenizer: str = "", chat_template: str = "",
           average: str = "") -> Converted:
    """Write a checkpoint as a Hugging Face folder.

    Args:
        uri: a run (its newest complete checkpoint), or one checkpoint, RUN/checkpoints/step_00000100.
        out: folder to write: config.json, generation_config.json, safetensors files, tokenizer.json and
            tokenizer_config.json, which has the chat template.
        dtype: type of the weights: float32, bfloat16 or float16.
        tokenizer: a tokenizer.json; default: that of the run's shard set.
        chat_template: a Jinja file; default: that of the run's conversations or pairs.
        average: name of an average of the parameters, such as "ema", to write in their place.

    Raises:
        CheckpointError: there is no complete checkpoint, it is damaged, or it does not hold the average.
        ConfigError: the model has no counterpart in transformers, or the tokenizer cannot be found.
        StorageError: `out` cannot be written to.
    """
    run, checkpoints, name = locate(uri)
    manifest = read_manifest(checkpoints, name)
    check_files(checkpoints, name, manifest)
    config, vocabulary_size = model_of(manifest, checkpoints.at(name))
    beside = tokenizer_files.of_run(run, tokenizer, chat_template)
    config.hugging_face_names()  # refuses a family without names before anything is written
    huggingface.to_config(config, vocabulary_size)

    if average:
        check_average(manifest, average, checkpoints.at(name))

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        return read_weights(checkpoints, name, manifest, names, average)

    target = storage.store(out)
    target.check()
    for key, content in beside.files.items():
        target.write(key, content)
    huggingface.write(target, config, vocabulary_size, read, dtype=getattr(torch, dtype), eos=beside.ends)
    return Converted(target.uri, _count(config, vocabulary_size), config, vocabulary_size, bool(beside.files))


def import_(folder: str, uri: str, *, vocabulary_size: int | None = None) -> Converted:
    """Write the weights of a Hugging Face folder as a checkpoint of step 0, in fp32.

    Training starts from it with `model.init_from`. The whole model is in memory while it is written. Of a model on the
    hub, the commit that its revision names now is read, and recorded in the checkpoint.

    Args:
        folder: URI of the Hugging Face folder, or hf://owner/name[@revision].
        uri: the run to write.
        vocabulary_size: number of embedding rows, at least as many as the model has. Give the padded vocabulary size of
            the shard set to train on; see `huggingface.padded`.

    Raises:
        ConfigError: the model in the folder is not supported, or `vocabulary_size` is too small.
        CheckpointError: the folder's weights cannot be read.
        StorageError: `uri` cannot be written to.
    """
    named = versioned(folder)
    pinned = folder if named is None or named.is_fixed else str(named.at(named.newest()))
    source, target = storage.store(pinned), storage.store(uri)
    config, rows = huggingface.read_config(source)
    padded_rows = vocabulary_size or rows
    if padded_rows < rows:
        raise ConfigError(f"{padded_rows} rows are fewer than the model's {rows}", where="--vocabulary-size",
                          fix=f"leave it out, or give {rows} or more")
    target.check()
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in huggingface.read_weights(source, config, rows):
        value = tensor.float()
        if name in ("embedding.weight", "output.weight"):
            value = huggingface.padded(value, padded_rows)
        weights[name] = value
    save_weights(target, config, weights, {"imported": {"from": source.uri, "time": time.time()}})
    has_tokenizer = tokenizer_files.copy(source, target)
    return Converted(target.uri, _count(config, padded_rows), config, padded_rows, has_tokenizer, source.uri)


def save_weights(target: Store, config: Model, weights: dict[str, torch.Tensor], extra: dict[str, Any]) -> None:
    """Write a checkpoint of step 0 that a run can start from.

    Args:
        target: the folder of a run.
        config: the model.
        weights: whole tensors by name.
        extra: what else the manifest says: where they come from; replaces `identity` if it has one.

    Raises:
        StorageError: `target` cannot be written to.
    """
    failures: list[str] = []

    def on_event(kind: str, detail: dict[str, Any]) -> None:
        if kind == "save_failed":
            failures.append(str(detail["reason"]))

    manifest = {"step": 0, "position": 0, "tokens": 0, "loss": None, "identity": {"model": config.shape()}, **extra}
    CheckpointManager(target.child("checkpoints"), asynchronous=False, on_event=on_event).save(
        0, {"model": weights}, manifest)
    if failures:
        raise StorageError(failures[0], where=target.uri,
                           fix="check that the folder can be written to, then give the command again")


def _count(config: Model, vocabulary_size: int) -> int:
    return sum(shape.numel() for shape in huggingface.parameter_shapes(config, vocabulary_size).values())


def check_average(manifest: CheckpointManifest, average: str, where: str) -> None:
    """Raise CheckpointError unless a checkpoint holds an average of the parameters.

    Args:
        manifest: of the checkpoint.
        average: its name, such as "ema".
        where: URI of the checkpoint, for the message.
    """
    held = sorted(manifest.extra.get("averages", {}))
    if average not in held:
        raise CheckpointError(f"the checkpoint holds no average {average!r}", where=where,
                              fix=f"name one of {', '.join(held)}" if held else "train with an average among the "
                              "callbacks: callbacks: [ema]")


def read_weights(checkpoints: Store, name: str, manifest: CheckpointManifest, names: Sequence[str],
                 average: str = "") -> dict[str, torch.Tensor]:
    """Return whole parameters by name. Those of an adapter's checkpoint are the base's, with the adapter merged.

    For bf16 parameters, the optimizer's fp32 master copy is returned, because it is more precise.

    Args:
        checkpoints: the run's `checkpoints` folder.
        name: the checkpoint.
        manifest: its manifest.
        names: names of parameters in the model.
        average: name of an average of the trained parameters, which is returned in their place.

    Raises:
        CheckpointError: the checkpoint lacks one of them, or its base is missing.
        ConfigError: the adapter cannot be merged.
    """
    read_own = partial(read_stored, average=average)
    base = base_of(manifest)
    if base is not None:
        config, rows = model_of(manifest, checkpoints.at(name), any_head=True)
        shapes = huggingface.weight_shapes(config, rows)
        own = [key for key in names if f"model/{key}" in manifest.tensors]  # an objective's head
        names = [key for key in names if key not in own]
        others = shapes.keys() - set(names)
        shapes = {key: shape for key, shape in shapes.items() if key in names}
        values: dict[str, torch.Tensor] = {}
        for module, parts in by_module(adapter_values(checkpoints, name, manifest, average)).items():
            if weight_name(module, others) is None:  # of one that is asked for
                values |= {parameter_name(module, key): value for key, value in parts.items()}
        whole = merge.merged(read_base(base, config, shapes, checkpoints, name, manifest),
                             adapter_of(manifest), values)
        return {**whole, **read_own(checkpoints, name, manifest, own)} if own else whole
    return read_own(checkpoints, name, manifest, names)
