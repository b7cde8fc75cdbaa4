"""Models in Hugging Face's form: config.json and safetensors files, both ways.

Nothing is unpickled: weights that are not safetensors are refused. RoPE turns the same pairs here and there, so that
weights are renamed and never permuted.
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
"""Weights of a larger model are written in several files of at most this size, and an index; one file's weights are in
memory at a time."""

_OUTER = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
          "output.weight": "lm_head.weight"}


def their_name(name: str, config: Model) -> str:
    """Hugging Face's name of our parameter "blocks.3.attention.wq.weight": "model.layers.3.self_attn.q_proj.weight"."""
    if name in _OUTER:
        return _OUTER[name]
    _, layer, inner = name.split(".", 2)
    module, _, kind = inner.rpartition(".")
    return f"model.layers.{layer}.{config.hugging_face_names()[module]}.{kind}"


def parameter_shapes(config: Model, vocabulary_size: int) -> dict[str, torch.Size]:
    """Our parameters, in order."""
    with torch.device("meta"):
        model = Decoder(config, vocabulary_size)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


# -- config.json -------------------------------------------------------------------------------
def to_config(config: Model, vocabulary_size: int, *, eos: int | None = None,
              dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The content of config.json, for transformers 4 and 5.

    Raises:
        ConfigError: transformers has no such model.
    """
    return config.to_hugging_face(vocabulary_size, eos=eos, dtype=str(dtype).removeprefix("torch."))


def from_config(values: Mapping[str, Any], where: str) -> tuple[Model, int]:
    """Our configuration and the vocabulary's size, of a config.json.

    Raises:
        ConfigError: another family, or a variant of it that is computed differently.
    """
    wanted = values.get("model_type")
    known: dict[str, type[Model]] = {}
    for name in families.KIND.names():
        family = families.KIND.find(name)
        known |= dict.fromkeys(family.MODEL_TYPES, family)
    if wanted not in known:
        raise ConfigError(f"model_type is {wanted!r}", where=where, mend=f"{' and '.join(known)} can be imported")
    config = known[wanted].from_hugging_face(values, where)
    if "vocab_size" not in values:
        raise ConfigError("config.json is not complete: 'vocab_size' is missing", where=where,
                          mend="download the model anew")
    return config, int(values["vocab_size"])


# -- weights -----------------------------------------------------------------------------------
def write(place: Store, config: Model, vocabulary_size: int, read: Callable[[list[str]], dict[str, torch.Tensor]],
          *, dtype: torch.dtype = torch.float32, eos: int | None = None, shard_bytes: int = SHARD_BYTES) -> int:
    """Write config.json and the weights to `place`, ready for `AutoModelForCausalLM.from_pretrained`.

    Args:
        read: our names to whole tensors; called for one file's weights at a time.
        dtype: of the weights in the files.

    Returns:
        Bytes of weights.
    """
    itemsize = torch.empty((), dtype=dtype).element_size()
    sizes = {name: math.prod(shape) * itemsize for name, shape in parameter_shapes(config, vocabulary_size).items()}
    files: list[list[str]] = [[]]
    for name, size in sizes.items():
        if files[-1] and sum(sizes[each] for each in files[-1]) + size > shard_bytes:
            files.append([])
        files[-1].append(name)
    where: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        key = WEIGHTS if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {their_name(name, config): tensor.to(dtype).contiguous() for name, tensor in read(names).items()}
        place.write(key, safetensors.torch.save(tensors, {"format": "pt"}))
        logger.info("wrote %s with %d tensors", place.at(key), len(tensors))
        where |= {their_name(name, config): key for name in names}
    total = sum(sizes.values())
    if len(files) > 1:
        place.write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    place.write_json(CONFIG, to_config(config, vocabulary_size, eos=eos, dtype=dtype))
    return total


def read_config(place: Store) -> tuple[Model, int]:
    """The configuration and vocabulary size of the model in `place`; ConfigError when it cannot be imported."""
    try:
        values = json.loads(place.read(CONFIG))
    except FileNotFoundError:
        raise ConfigError("there is no config.json", where=place.uri,
                          mend="give a folder as `save_pretrained` writes it") from None
    except ValueError:
        raise ConfigError("not valid JSON", where=place.at(CONFIG), mend="download the model anew") from None
    return from_config(values, place.at(CONFIG))


def read_weights(place: Store, config: Model, vocabulary_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Our names and whole tensors of the model in `place`, as they are stored; each exactly once.

    Raises:
        CheckpointError: weights are missing, of another shape, unknown, damaged, or not safetensors.
    """
    shapes = parameter_shapes(config, vocabulary_size)
    ours = {their_name(name, config): name for name in shapes}
    for key in _weight_files(place):
        logger.info("reads weights from %s", place.at(key))
        for theirs, tensor in _tensors(place, key):
            if theirs.endswith("rotary_emb.inv_freq") or (theirs == "lm_head.weight" and config.tie_embeddings):
                continue  # computed from the configuration; a copy of the embedding
            name = ours.pop(theirs, "")
            if not name or tensor.shape != shapes[name]:
                what = f"{list(tensor.shape)}, config.json says {list(shapes[name])}" if name else "not a known weight"
                raise CheckpointError(f"{theirs} is {what}", where=place.at(key), mend="download the model anew")
            yield name, tensor
    if ours:
        raise CheckpointError(f"{len(ours)} weights are missing, {min(ours)} for one", where=place.uri,
                              mend="download the model anew")


def _weight_files(place: Store) -> list[str]:
    if place.exists(INDEX):
        return sorted({str(key) for key in place.read_json(INDEX)["weight_map"].values()})
    if not place.exists(WEIGHTS):
        raise CheckpointError(f"there is neither {WEIGHTS} nor {INDEX}", where=place.uri,
                              mend="give a model in safetensors format; pickled weights are not loaded")
    return [WEIGHTS]


def _tensors(place: Store, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    path = place.local_path(key)
    try:
        if path is None:
            yield from safetensors.torch.load(place.read(key)).items()
            return
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                yield name, file.get_tensor(name)
    except (FileNotFoundError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"cannot be read: {str(error) or 'missing'}", where=place.at(key),
                              mend="download the model anew") from None


def padded(rows_VD: torch.Tensor, vocabulary_size: int) -> torch.Tensor:
    """An embedding or output matrix with rows for further tokens, each the mean of the others.

    By Jensen's inequality the logit of a mean row is at most the log of the mean of the others' exponentials: together
    the new tokens get at most their share by number of the probability.
    """
    more = vocabulary_size - len(rows_VD)
    return torch.cat((rows_VD, rows_VD.float().mean(dim=0, keepdim=True).to(rows_VD.dtype).expand(more, -1)))
