"""Checkpoints to and from Hugging Face folders, and the weights of one run for the start of another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
import yaml

from tidewheel import storage
from tidewheel.checkpoint.dcp import Reader, load_planner
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.manifest import CheckpointManifest, read_manifest
from tidewheel.checkpoint.verify import locate, verify_files
from tidewheel.errors import CheckpointError, ConfigError, ShardError, StorageError
from tidewheel.models import families, huggingface
from tidewheel.models.family import Model
from tidewheel.storage import Store

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Exchanged:
    """What was written."""

    place: str
    parameters: int
    config: Model
    vocabulary_size: int
    tokenizer: bool
    """A tokenizer.json is beside the weights."""

    def settings(self) -> str:
        """The `model:` block, as YAML, of a training run that starts from it."""
        model = {**self.config.shape(), "vocabulary_size": self.vocabulary_size}
        defaults = {name: field.default for name, field in type(self.config).model_fields.items()}
        changed = {name: value for name, value in model.items() if value != defaults.get(name)}
        block = yaml.safe_dump({"model": {**changed, "init_from": self.place}}, sort_keys=False)
        return f"# {self.parameters:,} parameters\n{block}"


def export(uri: str, out: str, *, dtype: str = "float32", tokenizer: str = "") -> Exchanged:
    """Write a checkpoint as a Hugging Face folder.

    Args:
        uri: a run (its newest intact checkpoint is taken), or one checkpoint, RUN/checkpoints/step_00000100.
        out: folder to write; config.json, safetensors files, tokenizer.json and what goes with it.
        dtype: of the weights: float32, bfloat16 or float16.
        tokenizer: a tokenizer.json; default: that of the run's shard set.

    Raises:
        CheckpointError: there is none that is intact.
        ConfigError: the model has no counterpart in transformers, or the tokenizer cannot be found.
    """
    run, place, name = locate(uri)
    manifest = read_manifest(place, name)
    problems = verify_files(place, name, manifest.files)
    if problems:
        raise CheckpointError("; ".join(problems)[:500], where=place.at(name),
                              mend="`tidewheel checkpoint verify RUN` shows which are intact: export one of those")
    config, vocabulary_size = model_of(manifest, place.at(name))
    files, eos = _tokenizer(run, tokenizer)
    config.hugging_face_names()  # a family without names is refused before anything is written
    huggingface.to_config(config, vocabulary_size)

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        return read_weights(place, name, manifest, names)

    target = storage.store(out)
    target.check()
    for key, content in files.items():
        target.write(key, content)
    huggingface.write(target, config, vocabulary_size, read, dtype=getattr(torch, dtype), eos=eos)
    return Exchanged(target.uri, _count(config, vocabulary_size), config, vocabulary_size, bool(files))


def import_(folder: str, uri: str, *, vocabulary_size: int | None = None) -> Exchanged:
    """Write the model of a Hugging Face folder as the checkpoint of step 0 under `uri`, weights only, fp32.

    Training starts from it with `model.init_from`. The whole model is in memory while it is written.

    Args:
        vocabulary_size: rows of the embedding, more than the model has: that of the shard set to train on, which is
            padded; see `huggingface.padded`.

    Raises:
        ConfigError, CheckpointError: the folder cannot be used; see `huggingface`.
        StorageError: `uri` cannot be written to.
    """
    source, target = storage.store(folder), storage.store(uri)
    config, rows = huggingface.read_config(source)
    wanted = vocabulary_size or rows
    if wanted < rows:
        raise ConfigError(f"{wanted} rows are fewer than the model's {rows}", where="--vocabulary-size",
                          mend=f"leave it out, or give {rows} or more")
    target.check()
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in huggingface.read_weights(source, config, rows):
        value = tensor.float()
        weights[name] = huggingface.padded(value, wanted) if name in ("embedding.weight", "output.weight") else value
    failures: list[str] = []

    def on_event(kind: str, detail: dict[str, Any]) -> None:
        if kind == "save_failed":
            failures.append(str(detail["reason"]))

    extra: dict[str, Any] = {
        "step": 0, "position": 0, "tokens": 0, "loss": None, "identity": {"model": config.shape()},
        "imported": {"from": source.uri, "time": time.time()}}
    CheckpointManager(target.child("checkpoints"), asynchronous=False, on_event=on_event).save(
        0, {"model": weights}, extra)
    if failures:
        raise StorageError(failures[0], where=target.uri, mend="check the place and give the command again")
    has_tokenizer = source.exists(TOKENIZER)
    if has_tokenizer:
        target.write(TOKENIZER, source.read(TOKENIZER))
    return Exchanged(target.uri, _count(config, wanted), config, wanted, has_tokenizer)


def model_of(manifest: CheckpointManifest, where: str) -> tuple[Model, int]:
    """The model's configuration and vocabulary size in a checkpoint.

    Raises:
        CheckpointError: it holds no model that this version knows.
    """
    try:
        return (families.of_shape(manifest.extra["identity"]["model"]),
                manifest.tensors["model/embedding.weight"].shape[0])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"its model is not known: {' '.join(str(error).split())[:200]}", where=where,
                              mend="use the version of Tidewheel that wrote it") from None


def _count(config: Model, vocabulary_size: int) -> int:
    return sum(shape.numel() for shape in huggingface.parameter_shapes(config, vocabulary_size).values())


def read_weights(place: Store, name: str, manifest: CheckpointManifest,
                 names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Whole tensors of parameters, by their names."""
    held = {}
    for each in names:
        # of bf16 parameters the optimizer has an fp32 master copy, which says more
        keys = [key for key in (f"optimizer/{each}.master", f"model/{each}") if key in manifest.tensors]
        if not keys:
            raise CheckpointError(f"{each} is not in the checkpoint", where=place.at(name),
                                  mend="use the version of Tidewheel that wrote it")
        held[each] = keys[0]
    state = {key: torch.empty(manifest.tensors[key].shape, dtype=getattr(torch, manifest.tensors[key].dtype))
             for key in held.values()}
    reader = Reader(place, name, manifest)
    torch_checkpoint.load(dict(state), storage_reader=reader, planner=load_planner(), no_dist=True)
    return {each: state[key] for each, key in held.items()}


def _tokenizer(run: Store, given: str) -> tuple[dict[str, bytes], int | None]:
    """Files of the tokenizer for an export, and the id of its end mark."""
    from tidewheel.train.record import recorded_source

    eos = pad = None
    if given:
        place, key = storage.split(given)
    elif run.exists("run.json"):
        try:
            domain = recorded_source(run.read_json("run.json")).domains[0]
        except (ShardError, StorageError, FileNotFoundError) as error:
            raise ConfigError(f"the run's shard set, which has the tokenizer, cannot be read ({error})".splitlines()[0],
                              where=run.uri, mend="give the tokenizer: --tokenizer PATH/tokenizer.json") from None
        place, key = storage.store(domain.uri), str(domain.manifest.tokenizer["file"])
        eos, pad = domain.manifest.tokenizer.get("eos"), domain.manifest.tokenizer.get("pad")
    elif run.exists(TOKENIZER):  # imported
        place, key = run, TOKENIZER
    else:
        return {}, None
    if not key.endswith(".json"):
        raise ConfigError(f"the tokenizer is {key}, not a tokenizer.json", where=place.uri,
                          mend="convert it with Hugging Face's tools and give it: --tokenizer PATH/tokenizer.json")
    try:
        content = place.read(key)
    except FileNotFoundError:
        raise ConfigError("there is no such file", where=place.at(key), mend="give --tokenizer another path") from None
    return {TOKENIZER: content, **_tokenizer_config(content, eos, pad)}, eos


def _tokenizer_config(content: bytes, eos: int | None, pad: int | None) -> dict[str, bytes]:
    """tokenizer_config.json, with which `AutoTokenizer` knows the end and padding marks."""
    import json

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(content.decode())
    values: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, token in (("eos_token", eos), ("pad_token", pad)):
        if token is not None:
            values[name] = tokenizer.id_to_token(token)
    return {"tokenizer_config.json": json.dumps(values, indent=1).encode()}
