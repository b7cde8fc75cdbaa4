"""Adapters between runs and other formats: peft's files both ways, and a run merged into a whole model."""

from __future__ import annotations

import time
from typing import Any

import torch

from tidewheel import storage
from tidewheel.checkpoint import conversion, tokenizer_files
from tidewheel.checkpoint.adapters import adapter_of, adapter_values, base_of
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.manifest import CheckpointManifest, read_manifest
from tidewheel.checkpoint.verify import locate, verify_files
from tidewheel.errors import CheckpointError, ConfigError, StorageError
from tidewheel.models import huggingface
from tidewheel.models.adapting import peft_files
from tidewheel.parts import as_json
from tidewheel.storage import Store


def export_adapter(uri: str, out: str, *, base: str = "") -> int:
    """Write the adapter of a run for the library peft; return the number of its parameters there.

    Args:
        uri: a run (its newest complete checkpoint), or one checkpoint.
        out: folder to write adapter_config.json and adapter_model.safetensors to.
        base: name or folder of the base model in transformers' format, for adapter_config.json.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged.
        ConfigError: the checkpoint holds a whole model, or peft has no such adapter.
    """
    checkpoints, name, manifest = _adapter_run(uri)
    config, _ = conversion.model_of(manifest, checkpoints.at(name))
    values = adapter_values(checkpoints, name, manifest, conversion.read_stored)
    target = storage.store(out)
    target.check()
    return peft_files.write(target, config, adapter_of(manifest), values, base=base)


def import_adapter(folder: str, base: str, uri: str) -> dict[str, Any]:
    """Write an adapter in peft's format as a checkpoint of step 0; return the settings of the adapter.

    Training starts from it with `adapter.init_from`.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        base: the run or the checkpoint of the base model here.
        uri: the run to write.

    Raises:
        ConfigError: the adapter is not known here, or is of another model.
        CheckpointError: the base or the adapter cannot be read.
        StorageError: `uri` cannot be written to.
    """
    _, checkpoints, name = locate(base)
    manifest = read_manifest(checkpoints, name)
    config, rows = conversion.model_of(manifest, checkpoints.at(name))
    adapter, values = peft_files.read(storage.store(folder), config)
    extra = {"identity": {"model": config.shape(), "adapter": as_json(adapter)},
             "base": {"from": checkpoints.at(name), "hash": manifest.model_hash, "vocabulary_size": rows},
             "imported": {"from": folder, "time": time.time()}}
    _save(uri, values, extra)
    return as_json(adapter)


def merge_run(uri: str, out: str, *, tokenizer: str = "", chat_template: str = "") -> tuple[int, str]:
    """Write the base of an adapter's run, with the adapter merged, as a checkpoint of step 0.

    The tokenizer's files and the chat template are put beside it, as beside an imported model. Another training starts
    from it with `model.init_from`.

    Args:
        uri: a run (its newest complete checkpoint), or one checkpoint.
        out: the run to write.
        tokenizer: a tokenizer.json; default: that of the run's shard set.
        chat_template: a Jinja file; default: that of the run's conversations.

    Returns:
        The number of parameters, and why there is no tokenizer beside them; "" if there is one.

    Raises:
        CheckpointError: there is no complete checkpoint, or the base is missing or another one.
        ConfigError: the checkpoint holds a whole model, the adapter cannot be merged, or there is no such file.
        StorageError: `out` cannot be written to.
    """
    checkpoints, name, manifest = _adapter_run(uri)
    config, rows = conversion.model_of(manifest, checkpoints.at(name))
    beside, reason = _tokenizer(uri, manifest, tokenizer, chat_template)
    names = list(huggingface.weight_shapes(config, rows))
    weights = conversion.read_weights(checkpoints, name, manifest, names)
    _save(out, weights, {"identity": {"model": config.shape()},
                         "merged": {"from": checkpoints.at(name), "time": time.time()}})
    target = storage.store(out)
    for file, content in beside.files.items():
        target.write(file, content)
    if beside.ends:
        target.write_json(huggingface.GENERATION, {"eos_token_id": list(beside.ends)})
    return sum(weight.numel() for weight in weights.values()), reason


def _tokenizer(uri: str, manifest: CheckpointManifest, tokenizer: str,
               chat_template: str) -> tuple[tokenizer_files.TokenizerFiles, str]:
    """Return the tokenizer's files of an adapter's run or of its base, and why there are none."""
    base = base_of(manifest)
    sources = [uri, base.uri] if base is not None and base.uri else [uri]
    reason = "the run has none"
    for source in sources:
        run, _, _ = locate(source)
        try:
            beside = tokenizer_files.of_run(run, tokenizer, chat_template)
        except ConfigError as error:
            if tokenizer or chat_template:
                raise
            reason = str(error).splitlines()[0]
            continue
        if beside.files:
            return beside, ""
    return tokenizer_files.TokenizerFiles({}), reason


def _adapter_run(uri: str) -> tuple[Store, str, CheckpointManifest]:
    """Return the checkpoints of an adapter's run, the name of one, and its manifest, after verifying its files."""
    _, checkpoints, name = locate(uri)
    manifest = read_manifest(checkpoints, name)
    if base_of(manifest) is None:
        raise ConfigError("this checkpoint holds a whole model, not an adapter", where=checkpoints.at(name),
                          fix="use `tidewheel checkpoint export` for whole models")
    if problems := verify_files(checkpoints, name, manifest.files):
        raise CheckpointError("; ".join(problems)[:500], where=checkpoints.at(name),
                              fix="`tidewheel checkpoint verify RUN` shows which are intact: give one of those")
    return checkpoints, name, manifest


def _save(uri: str, weights: dict[str, torch.Tensor], extra: dict[str, Any]) -> None:
    target = storage.store(uri)
    target.check()
    failures: list[str] = []

    def on_event(kind: str, detail: dict[str, Any]) -> None:
        if kind == "save_failed":
            failures.append(str(detail["reason"]))

    whole = {"step": 0, "position": 0, "tokens": 0, "loss": None, **extra}
    CheckpointManager(target.child("checkpoints"), asynchronous=False, on_event=on_event).save(
        0, {"model": weights}, whole)
    if failures:
        raise StorageError(failures[0], where=target.uri,
                           fix="check that the folder can be written to, then give the command again")
