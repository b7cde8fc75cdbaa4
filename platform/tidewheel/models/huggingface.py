"""Import from and export to Hugging Face's format: config.json and safetensors files.

Nothing is unpickled: weights that are not safetensors are refused. RoPE rotates the same pairs as in transformers, so
weights are renamed, or split and joined as the family says, but never permuted.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import safetensors
import safetensors.torch
import torch

from tidewheel.errors import CheckpointError, ConfigError
from tidewheel.models import families
from tidewheel.models.conversion import Conversion, renamed
from tidewheel.models.decoder import Decoder
from tidewheel.models.family import Model
from tidewheel.models.safetensors_folder import INDEX, WEIGHTS, read_tensors, weight_files
from tidewheel.storage import Store

logger = logging.getLogger(__name__)

CONFIG, GENERATION = "config.json", "generation_config.json"
SHARD_BYTES = 2_000_000_000
"""Weights of a larger model are written in several files of at most this size, with an index. Only one file's weights
are in memory at a time."""

def their_name(name: str, config: Model) -> str:
    """Return the name at Hugging Face of a parameter that is only renamed.

    "blocks.3.attention.wq.weight" is "model.layers.3.self_attn.q_proj.weight".
    """
    if name in config.HUGGING_FACE_ENDS:
        return config.HUGGING_FACE_ENDS[name]
    _, layer, inner = name.split(".", 2)
    module, _, kind = inner.rpartition(".")
    return f"{config.HUGGING_FACE_LAYER.format(layer)}{config.hugging_face_names()[module]}.{kind}"


def conversions(config: Model, names: Sequence[str], present: Collection[str] | None = None) -> list[Conversion]:
    """Return the conversions of all parameters, with names in the whole model, in the order of `names`.

    Args:
        config: the model.
        names: of all parameters here.
        present: names of all weights of the checkpoint that is read; None: a checkpoint is written.
    """
    of_weight: dict[str, Conversion] = {}
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}.", config.HUGGING_FACE_LAYER.format(layer)
        inner = None if present is None else {name.removeprefix(theirs) for name in present if name.startswith(theirs)}
        for one in config.hugging_face_weights(layer, inner):
            whole = replace(one, ours=tuple(ours + name for name in one.ours),
                            theirs=tuple(theirs + name for name in one.theirs))
            of_weight |= dict.fromkeys(whole.ours, whole)
    result: dict[tuple[str, ...], Conversion] = {}
    for name in names:
        one = of_weight[name] if name in of_weight else renamed(name, their_name(name, config))
        result[one.ours] = one
    return list(result.values())


def parameter_shapes(config: Model, vocabulary_size: int) -> dict[str, torch.Size]:
    """Return {name: shape} of a decoder's parameters, in order."""
    with torch.device("meta"):
        model = Decoder(config, vocabulary_size)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def weight_shapes(config: Model, vocabulary_size: int) -> dict[str, torch.Size]:
    """Return {name: shape} of what a checkpoint holds of a decoder, its parameters and its buffers."""
    with torch.device("meta"):
        model = Decoder(config, vocabulary_size)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


# -- config.json -------------------------------------------------------------------------------
def to_config(config: Model, vocabulary_size: int, *, eos: int | None = None,
              dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the content of config.json, for transformers 4 and 5.

    Args:
        config: the model.
        vocabulary_size: rows of the embedding.
        eos: id of the token that ends a document.
        dtype: of the weights.

    Raises:
        ConfigError: transformers has no such model.
    """
    return config.to_hugging_face(vocabulary_size, eos=eos, dtype=str(dtype).removeprefix("torch."))


def from_config(values: Mapping[str, Any], where: str) -> tuple[Model, int]:
    """Return the model and the vocabulary size of a config.json.

    Args:
        values: its content.
        where: its URI, for messages.

    Raises:
        ConfigError: no family reads this model type, or its variant is computed differently.
    """
    model_type = values.get("model_type")
    known: dict[str, type[Model]] = {}
    for name in families.KIND.names():
        family = families.KIND.find(name)
        known |= dict.fromkeys(family.MODEL_TYPES, family)
    if model_type not in known:
        near = difflib.get_close_matches(str(model_type), known, n=1)
        hint = f"; the nearest that is known is {near[0]!r}" if near else ""
        raise ConfigError(f"model_type {model_type!r} is not known{hint}", where=where,
                          fix=f"{', '.join(sorted(known))} can be imported")
    config = known[model_type].from_hugging_face(values, where)
    if "vocab_size" not in values:
        raise ConfigError("config.json is not complete: 'vocab_size' is missing", where=where,
                          fix="download the model again")
    return config, int(values["vocab_size"])


# -- weights -----------------------------------------------------------------------------------
def write(folder: Store, config: Model, vocabulary_size: int, read: Callable[[list[str]], dict[str, torch.Tensor]],
          *, dtype: torch.dtype = torch.float32, eos: Sequence[int] = (), shard_bytes: int = SHARD_BYTES) -> int:
    """Write config.json, generation_config.json and the weights to `place`, for `AutoModelForCausalLM.from_pretrained`.

    Args:
        place: the output folder.
        config: the model.
        vocabulary_size: rows of the embedding.
        read: from parameter names to whole tensors; called once for each file.
        dtype: of the weights in the files.
        eos: ids of the tokens that end a text: of a chat model, the end of a turn first. (): not known.
        shard_bytes: largest size of a file.

    Returns:
        Number of bytes of weights.
    """
    itemsize = torch.empty((), dtype=dtype).element_size()
    sizes = {name: math.prod(shape) * itemsize for name, shape in weight_shapes(config, vocabulary_size).items()}
    files: list[list[Conversion]] = [[]]
    filled = 0
    for one in conversions(config, list(sizes)):
        size = sum(sizes[name] for name in one.ours)
        if files[-1] and filled + size > shard_bytes:
            files.append([])
            filled = 0
        files[-1].append(one)
        filled += size
    where: dict[str, str] = {}
    for index, contents in enumerate(files, start=1):
        key = WEIGHTS if len(files) == 1 else f"model-{index:05d}-of-{len(files):05d}.safetensors"
        values = read([name for one in contents for name in one.ours])
        tensors: dict[str, torch.Tensor] = {}
        for one in contents:
            converted = one.to_theirs([values[name].to(dtype) for name in one.ours])
            tensors |= {name: tensor.contiguous() for name, tensor in zip(one.theirs, converted, strict=True)}
        folder.write(key, safetensors.torch.save(tensors, {"format": "pt"}))
        logger.info("wrote %s with %d tensors", folder.at(key), len(tensors))
        where |= dict.fromkeys(tensors, key)
    total = sum(sizes.values())
    if len(files) > 1:
        folder.write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    values_of_config = to_config(config, vocabulary_size, eos=eos[0] if eos else None, dtype=dtype)
    if eos:
        ends = eos[0] if len(eos) == 1 else list(eos)
        values_of_config["eos_token_id"] = ends
        folder.write_json(GENERATION, {"eos_token_id": ends})
    folder.write_json(CONFIG, values_of_config)
    return total


def read_config(folder: Store) -> tuple[Model, int]:
    """Return the model and the vocabulary size of a folder.

    Raises:
        ConfigError: it has no config.json, or the model cannot be imported.
    """
    try:
        values = json.loads(folder.read(CONFIG))
    except FileNotFoundError:
        raise ConfigError("there is no config.json", where=folder.uri,
                          fix="give a folder as `save_pretrained` writes it") from None
    except ValueError:
        raise ConfigError("not valid JSON", where=folder.at(CONFIG), fix="download the model again") from None
    return from_config(values, folder.at(CONFIG))


def read_weights(folder: Store, config: Model, vocabulary_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of each parameter exactly once, in the dtype of the files.

    Args:
        place: folder of the model.
        config: from `read_config`.
        vocabulary_size: from `read_config`.

    Raises:
        CheckpointError: weights are missing, of another shape, unknown, damaged, or not safetensors.
    """
    shapes = weight_shapes(config, vocabulary_size)
    files = weight_files(folder)
    present = {_whole_name(name, config) for names in files.values() for name in names}
    waiting: dict[str, Conversion] = {}
    for one in conversions(config, list(shapes), present):
        waiting |= dict.fromkeys(one.theirs, one)
        if not one.theirs:  # the format lacks it, and its value follows from that
            yield from _to_ours(one, (), shapes, folder.uri)
    held: dict[str, torch.Tensor] = {}
    for key in files:
        logger.info("reads weights from %s", folder.at(key))
        for listed, tensor in read_tensors(folder, key):
            name = _whole_name(listed, config)
            if name.endswith(config.HUGGING_FACE_IGNORED) or (name == "lm_head.weight" and config.tie_embeddings):
                continue  # they follow from the configuration, and the output is a copy of the embedding
            if name not in waiting:
                raise CheckpointError(f"{listed} is not a known weight", where=folder.at(key),
                                      fix="download the model again")
            held[name] = tensor
            one = waiting.pop(name)
            if not any(theirs in waiting for theirs in one.theirs):
                tensors = [held.pop(theirs) for theirs in one.theirs]
                yield from _to_ours(one, tensors, shapes, folder.at(key))
    if waiting:
        raise CheckpointError(f"{len(waiting)} weights are missing, {min(waiting)} for one", where=folder.uri,
                              fix="download the model again")


def _to_ours(one: Conversion, tensors: Sequence[torch.Tensor], shapes: Mapping[str, torch.Size],
             where: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name here, tensor) of a conversion.

    Raises:
        CheckpointError: a tensor has another shape than config.json says.
    """
    theirs = ", ".join(one.theirs[:3])
    try:
        ours = one.to_ours(tensors)
    except RuntimeError:  # torch cannot split or stack tensors of these shapes
        raise CheckpointError(f"{theirs} is {list(tensors[0].shape)}, which config.json does not say", where=where,
                              fix="download the model again") from None
    for name, tensor in zip(one.ours, ours, strict=True):
        if tensor.shape != shapes[name]:
            raise CheckpointError(f"{theirs} is {list(tensor.shape)}, config.json says {list(shapes[name])}",
                                  where=where, fix="download the model again")
        yield name, tensor


def _whole_name(name: str, config: Model) -> str:
    """Return a weight's name in a model with output; that of a model without one lacks the prefix."""
    outside = name.startswith(config.HUGGING_FACE_PREFIX) or name == config.HUGGING_FACE_ENDS["output.weight"]
    return name if outside else config.HUGGING_FACE_PREFIX + name


def padded(rows_VD: torch.Tensor, vocabulary_size: int) -> torch.Tensor:
    """Return an embedding or output matrix with additional rows, each the mean of the existing rows.

    By Jensen's inequality the logit of a mean row is at most the log of the mean of the other exponentials. So the
    probability of all new tokens together is at most their share of the vocabulary.

    Args:
        rows_VD: the matrix.
        vocabulary_size: number of rows of the result.
    """
    more = vocabulary_size - len(rows_VD)
    return torch.cat((rows_VD, rows_VD.float().mean(dim=0, keepdim=True).to(rows_VD.dtype).expand(more, -1)))
