"""Import from and export to Hugging Face's format: config.json and safetensors files.

Nothing is unpickled: weights that are not safetensors are refused. RoPE rotates the same pairs as in transformers, so
weights are renamed but never permuted.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import safetensors
import safetensors.torch
import torch

from tidewheel.errors import CheckpointError, ConfigError
from tidewheel.models import families
from tidewheel.models.decoder import Decoder
from tidewheel.models.family import Model
from tidewheel.storage import Store

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 2_000_000_000
"""Weights of a larger model are written in several files of at most this size, with an index. Only one file's weights
are in memory at a time."""

_OUTER = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
          "output.weight": "lm_head.weight"}


def their_name(name: str, config: Model) -> str:
    """Return the name of a parameter at Hugging Face.

    "blocks.3.attention.wq.weight" is "model.layers.3.self_attn.q_proj.weight".
    """
    if name in _OUTER:
        return _OUTER[name]
    _, layer, inner = name.split(".", 2)
    module, _, kind = inner.rpartition(".")
    return f"model.layers.{layer}.{config.hugging_face_names()[module]}.{kind}"


def parameter_shapes(config: Model, vocabulary_size: int) -> dict[str, torch.Size]:
    """Return {name: shape} of a decoder's parameters, in order."""
    with torch.device("meta"):
        model = Decoder(config, vocabulary_size)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


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
        raise ConfigError(f"model_type is {model_type!r}", where=where, fix=f"{' and '.join(known)} can be imported")
    config = known[model_type].from_hugging_face(values, where)
    if "vocab_size" not in values:
        raise ConfigError("config.json is not complete: 'vocab_size' is missing", where=where,
                          fix="download the model again")
    return config, int(values["vocab_size"])


# -- weights -----------------------------------------------------------------------------------
def write(folder: Store, config: Model, vocabulary_size: int, read: Callable[[list[str]], dict[str, torch.Tensor]],
          *, dtype: torch.dtype = torch.float32, eos: int | None = None, shard_bytes: int = SHARD_BYTES) -> int:
    """Write config.json and the weights to `place`, ready for `AutoModelForCausalLM.from_pretrained`.

    Args:
        place: the output folder.
        config: the model.
        vocabulary_size: rows of the embedding.
        read: from parameter names to whole tensors; called once for each file.
        dtype: of the weights in the files.
        eos: id of the token that ends a document.
        shard_bytes: largest size of a file.

    Returns:
        Number of bytes of weights.
    """
    itemsize = torch.empty((), dtype=dtype).element_size()
    sizes = {name: math.prod(shape) * itemsize for name, shape in parameter_shapes(config, vocabulary_size).items()}
    files: list[list[str]] = [[]]
    for name, size in sizes.items():
        if files[-1] and sum(sizes[other] for other in files[-1]) + size > shard_bytes:
            files.append([])
        files[-1].append(name)
    where: dict[str, str] = {}
    for index, names in enumerate(files, start=1):
        key = WEIGHTS if len(files) == 1 else f"model-{index:05d}-of-{len(files):05d}.safetensors"
        tensors = {their_name(name, config): tensor.to(dtype).contiguous() for name, tensor in read(names).items()}
        folder.write(key, safetensors.torch.save(tensors, {"format": "pt"}))
        logger.info("wrote %s with %d tensors", folder.at(key), len(tensors))
        where |= {their_name(name, config): key for name in names}
    total = sum(sizes.values())
    if len(files) > 1:
        folder.write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    folder.write_json(CONFIG, to_config(config, vocabulary_size, eos=eos, dtype=dtype))
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
    shapes = parameter_shapes(config, vocabulary_size)
    ours = {their_name(name, config): name for name in shapes}
    for key in _weight_files(folder):
        logger.info("reads weights from %s", folder.at(key))
        for theirs, tensor in _tensors(folder, key):
            if theirs.endswith("rotary_emb.inv_freq") or (theirs == "lm_head.weight" and config.tie_embeddings):
                continue  # the first follows from the configuration, the second is a copy of the embedding
            name = ours.pop(theirs, "")
            if not name or tensor.shape != shapes[name]:
                what = f"{list(tensor.shape)}, config.json says {list(shapes[name])}" if name else "not a known weight"
                raise CheckpointError(f"{theirs} is {what}", where=folder.at(key), fix="download the model again")
            yield name, tensor
    if ours:
        raise CheckpointError(f"{len(ours)} weights are missing, {min(ours)} for one", where=folder.uri,
                              fix="download the model again")


def _weight_files(folder: Store) -> list[str]:
    if folder.exists(INDEX):
        return sorted({str(key) for key in folder.read_json(INDEX)["weight_map"].values()})
    if not folder.exists(WEIGHTS):
        raise CheckpointError(f"there is neither {WEIGHTS} nor {INDEX}", where=folder.uri,
                              fix="give a model in safetensors format; pickled weights are not loaded")
    return [WEIGHTS]


def _tensors(folder: Store, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    path = folder.local_path(key)
    try:
        if path is None:
            yield from safetensors.torch.load(folder.read(key)).items()
            return
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                yield name, file.get_tensor(name)
    except (FileNotFoundError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"cannot be read: {str(error) or 'missing'}", where=folder.at(key),
                              fix="download the model again") from None


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
