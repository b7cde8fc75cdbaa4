"""Adapters between runs and other formats: peft's files both ways, and runs merged into whole models and back."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch

from tidewheel import storage
from tidewheel.checkpoint import conversion, tokenizer_files
from tidewheel.checkpoint.adapters import adapter_of, adapter_values, base_of
from tidewheel.checkpoint.manifest import CheckpointManifest, read_manifest
from tidewheel.checkpoint.verify import check_files, locate
from tidewheel.errors import CheckpointError, ConfigError
from tidewheel.models import huggingface
from tidewheel.models.adapter import Adapter
from tidewheel.models.adapting import merge, peft_files
from tidewheel.models.family import Model
from tidewheel.parts import as_json, is_own
from tidewheel.storage import Store
from tidewheel.train import objectives

logger = logging.getLogger(__name__)
HEAD = "output.weight"
Weights = dict[str, torch.Tensor]
TOLERANCE = 8.0
"""Of a subtracted adapter, in units of the rounding of the matrices' dtype: 1e-6 of the largest value in fp32."""


def export_adapter(uri: str, out: str, *, base: str = "") -> int:
    """Write the adapter of a run for the library peft; return the number of its parameters there.

    That of a reward model has its head beside it: peft puts both on a model of sequence classification with one label
    (head outcome) or of token classification (head process).

    Args:
        uri: a run (its newest complete checkpoint), or one checkpoint.
        out: folder to write adapter_config.json and adapter_model.safetensors to.
        base: name or folder of the base model in transformers' format, for adapter_config.json.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged.
        ConfigError: the checkpoint holds a whole model, or peft has no such adapter or head.
    """
    checkpoints, name, manifest = _adapter_run(uri)
    config, _ = conversion.model_of(manifest, checkpoints.at(name), any_head=True)
    values = adapter_values(checkpoints, name, manifest)
    target = storage.store(out)
    target.check()
    return peft_files.write(target, config, adapter_of(manifest), values, base=base,
                            head=_head(uri, checkpoints, name, manifest))


def _head(uri: str, checkpoints: Store, name: str, manifest: CheckpointManifest) -> peft_files.Head | None:
    """Return a reward model's head, None of a decoder."""
    objective = manifest.extra["identity"].get("head")
    if objective is None:
        return None
    run, _, _ = locate(uri)
    kind = manifest.extra.get("imported", {}).get("head", "")
    settings = dict(run.read_json("run.json")["config"]["objective"]) if run.exists("run.json") else {}
    if settings and not is_own(objective):
        kind = objectives.KIND.build(settings.pop("kind"), settings).head_kind
    if not kind:
        raise ConfigError(f"the head of objective {objective} has no counterpart in transformers, or is not known "
                          "without run.json", where=checkpoints.at(name),
                          fix="give the run of a reward model, with its run.json")
    return peft_files.Head(kind, conversion.read_stored(checkpoints, name, manifest, [HEAD])[HEAD])


def import_adapter(folder: str, base: str, uri: str) -> dict[str, Any]:
    """Write an adapter in peft's format as a checkpoint of step 0; return the settings of a run that starts from it.

    These are `adapter`, and `objective` if the adapter is of a reward model, whose head is beside it.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        base: the run or the checkpoint of the base model here.
        uri: the run to write.

    Raises:
        ConfigError: the adapter is not known here, or it or its head is of another model.
        CheckpointError: the base or the adapter cannot be read.
        StorageError: `uri` cannot be written to.
    """
    _, checkpoints, name = locate(base)
    manifest = read_manifest(checkpoints, name)
    config, rows = conversion.model_of(manifest, checkpoints.at(name))
    source, target = storage.store(folder), storage.store(uri)
    adapter, values, head = peft_files.read_with_head(source, config)
    merge.check_values(config, rows, adapter, values, source.uri)
    settings = {"adapter": {**as_json(adapter), "init_from": uri}}
    identity: dict[str, Any] = {"model": config.shape(), "adapter": as_json(adapter)}
    imported: dict[str, Any] = {"from": folder, "time": time.time()}
    if head is not None:
        parts = {name: objectives.KIND.find(name).settings_of_head(head.kind) for name in objectives.KIND.names()}
        kind, chosen = next((name, chosen) for name, chosen in parts.items() if chosen is not None)
        settings["objective"] = {"kind": kind, **chosen}
        identity["head"], imported["head"] = kind, head.kind
        values[HEAD] = head.matrix
    base_of_it = {"from": checkpoints.at(name), "hash": manifest.model_hash, "vocabulary_size": rows}
    target.check()
    conversion.save_weights(target, config, values, {"identity": identity, "base": base_of_it, "imported": imported})
    return settings


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
    _save_whole(out, config, weights, {"merged": {"from": checkpoints.at(name), "time": time.time()}}, beside)
    return sum(weight.numel() for weight in weights.values()), reason


@dataclass(frozen=True)
class Unmerged:
    """What `unmerge_run` has written.

    Args:
        parameters: their number.
        base: URI of the base whose bits they are; "" if the adapter was subtracted.
        difference: largest difference of the given matrices to the written ones with the adapter merged again, as a
            share of the largest value of the matrix; 0 with `base`.
        reason: why there is no tokenizer beside them; "" if there is one.
    """

    parameters: int
    base: str
    difference: float
    reason: str


def unmerge_run(uri: str, out: str, *, adapter: str = "", tokenizer: str = "", chat_template: str = "") -> Unmerged:
    """Write a merged model without its adapter, as a checkpoint of step 0.

    If the adapter's base can be read, and the model is the base with the adapter merged, bit for bit, the result has
    the base's bits. Else the model was trained further or the base is lost, and the adapter is subtracted.

    Args:
        uri: the merged model: a run (its newest complete checkpoint), or one checkpoint.
        out: the run to write.
        adapter: the run that trained the adapter, or one of its checkpoints; default: as `merge_run` has recorded it.
        tokenizer: see `merge_run`.
        chat_template: see `merge_run`.

    Raises:
        CheckpointError: a checkpoint is missing or damaged, or the adapter has factors so near 0 that it cannot be
            taken out.
        ConfigError: the adapter is not known or not of this model, or cannot be subtracted.
        StorageError: `out` cannot be written to.
    """
    _, merged_checkpoints, merged_name = locate(uri)
    merged_manifest = read_manifest(merged_checkpoints, merged_name)
    where = merged_checkpoints.at(merged_name)
    source = adapter or str(merged_manifest.extra.get("merged", {}).get("from", ""))
    if base_of(merged_manifest) is not None or not source:
        what = ("does not say which adapter is merged into it" if not source else
                "holds an adapter that is not merged")
        raise ConfigError(f"this checkpoint {what}", where=where, fix="give a merged model, and the run that trained "
                          "the adapter: --adapter RUN")
    check_files(merged_checkpoints, merged_name, merged_manifest)
    checkpoints, name, manifest = _adapter_run(source)
    config, rows = conversion.model_of(merged_manifest, where)
    of_adapter, its_rows = conversion.model_of(manifest, checkpoints.at(name))
    if (config.shape(), rows) != (of_adapter.shape(), its_rows):
        raise ConfigError("the adapter is of a model of another shape", where=checkpoints.at(name),
                          fix="give the run that trained the merged adapter: --adapter RUN")
    beside, reason = _tokenizer(uri, merged_manifest, tokenizer, chat_template)
    given = conversion.read_stored(merged_checkpoints, merged_name, merged_manifest,
                                   list(huggingface.weight_shapes(config, rows)))
    base, difference = base_of(manifest), 0.0
    weights = _base_of_merged(given, checkpoints, name, manifest)
    if weights is None:
        base = None
        values = adapter_values(checkpoints, name, manifest)
        weights, difference = _subtracted(given, adapter_of(manifest), values, where)
    origin = {"from": where, "adapter": checkpoints.at(name), "time": time.time()}
    _save_whole(out, config, weights, {"unmerged": origin}, beside)
    exact = "" if base is None else base.uri or "its initial values"
    return Unmerged(sum(weight.numel() for weight in weights.values()), exact, difference, reason)


def _base_of_merged(given: Weights, checkpoints: Store, name: str, manifest: CheckpointManifest) -> Weights | None:
    """Return the base of an adapter's checkpoint; None: it is lost, or makes other matrices than the given ones."""
    base = base_of(manifest)
    assert base is not None
    config, _ = conversion.model_of(manifest, checkpoints.at(name))
    try:
        again = conversion.read_weights(checkpoints, name, manifest, list(given))
        if not all(torch.equal(again[key], value) for key, value in given.items()):
            logger.warning("the model is not its base with this adapter alone, so the adapter is subtracted")
            return None
        return base.read(config, {key: value.shape for key, value in given.items()})
    except CheckpointError as error:
        logger.warning("the base of the adapter cannot be read, so the adapter is subtracted: %s", error)
        return None


def _subtracted(given: Weights, adapter: Adapter, values: Weights, where: str) -> tuple[Weights, float]:
    """Return the given matrices without an adapter, and `Unmerged.difference`."""
    weights = merge.unmerged(given, adapter, values)
    largest = 0.0
    for key, again in merge.merged(weights, adapter, values).items():
        scale = max(float(given[key].abs().max()), float(weights[key].abs().max()))
        difference = float((again.float() - given[key].float()).abs().max()) / (scale or 1.0)
        if not difference <= TOLERANCE * torch.finfo(given[key].dtype).eps:
            raise CheckpointError(f"{key}: without the adapter and merged again, it differs by {difference:.1e} of its "
                                  "largest value", where=where, fix="take the base's own checkpoint: factors near 0, "
                                  "or another adapter than the merged one, cannot be taken out")
        largest = max(largest, difference)
    return weights, largest


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
    check_files(checkpoints, name, manifest)
    return checkpoints, name, manifest


def _save_whole(out: str, config: Model, weights: Weights, extra: dict[str, Any],
                beside: tokenizer_files.TokenizerFiles) -> None:
    target = storage.store(out)
    target.check()
    conversion.save_weights(target, config, weights, extra)
    for file, content in beside.files.items():
        target.write(file, content)
    if beside.ends:
        target.write_json(huggingface.GENERATION, {"eos_token_id": list(beside.ends)})
