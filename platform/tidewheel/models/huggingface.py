"""Llama and Qwen 3 in Hugging Face's form: config.json and safetensors files, both ways.

Nothing is unpickled: weights that are not safetensors are refused. RoPE turns the same pairs here and there, so that
weights are renamed and never permuted.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pydantic
import safetensors
import safetensors.torch
import torch

from tidewheel.errors import CheckpointError, ConfigError
from tidewheel.models.config import ModelConfig
from tidewheel.models.decoder import Decoder
from tidewheel.storage import Store

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 2_000_000_000
"""Weights of a larger model are written in several files of at most this size, and an index; one file's weights are in
memory at a time."""

_OUTER = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
          "output.weight": "lm_head.weight"}
_INNER = {
    "attention_norm": "input_layernorm", "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn.w1": "mlp.gate_proj",
    "ffn.w3": "mlp.up_proj", "ffn.w2": "mlp.down_proj"}
_PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False,
          "partial_rotary_factor": 1.0}
"""Settings of theirs that have one value here, which is also their default."""


def their_name(name: str) -> str:
    """Hugging Face's name of our parameter "blocks.3.attention.wq.weight": "model.layers.3.self_attn.q_proj.weight"."""
    if name in _OUTER:
        return _OUTER[name]
    _, layer, inner = name.split(".", 2)
    return f"model.layers.{layer}.{_INNER[inner.removesuffix('.weight')]}.weight"


def parameter_shapes(config: ModelConfig, vocabulary_size: int) -> dict[str, torch.Size]:
    """Our parameters, in order."""
    with torch.device("meta"):
        model = Decoder(config, vocabulary_size)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


# -- config.json -------------------------------------------------------------------------------
def to_config(config: ModelConfig, vocabulary_size: int, *, eos: int | None = None,
              dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The content of config.json, for transformers 4 and 5: Qwen 3 with norms on queries and keys, else Llama.

    Raises:
        ConfigError: transformers has no such model.
    """
    if not config.qk_norm and config.dim % config.num_heads:
        raise ConfigError(f"dim {config.dim} is not a multiple of num_heads {config.num_heads}, which transformers "
                          "demands of Llama", where="model", mend="export models with such widths or with qk_norm")
    kind = "Qwen3" if config.qk_norm else "Llama"
    rope: dict[str, Any] = {"rope_type": "default"}
    if (scaling := config.rope_scaling) is not None:
        rope = {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_frequency_factor,
                "high_freq_factor": scaling.high_frequency_factor,
                "original_max_position_embeddings": scaling.original_length}
    values = {
        "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), "vocab_size": vocabulary_size,
        "hidden_size": config.dim, "intermediate_size": config.ffn_width, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width, "max_position_embeddings": config.max_sequence_length,
        "rms_norm_eps": config.norm_epsilon, "tie_word_embeddings": config.tie_embeddings, "hidden_act": "silu",
        "attention_bias": False, "attention_dropout": 0.0, "initializer_range": config.weight_std,
        "rope_theta": config.rope_theta, "rope_scaling": rope if scaling else None,  # transformers 4
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},  # transformers 5
        "bos_token_id": None, "eos_token_id": eos, "torch_dtype": str(dtype).removeprefix("torch.")}
    return values if config.qk_norm else {**values, "mlp_bias": False}


def from_config(values: Mapping[str, Any], where: str) -> tuple[ModelConfig, int]:
    """Our configuration and the vocabulary's size, of a config.json.

    Raises:
        ConfigError: another family, or a variant of it that is computed differently.
    """
    family = values.get("model_type")
    if family not in ("llama", "qwen3"):
        raise ConfigError(f"model_type is {family!r}", where=where, mend="llama and qwen3 can be imported")
    odd = [f"{name}: {values[name]!r}" for name, plain in _PLAIN.items() if values.get(name, plain) != plain]
    rope = {"rope_theta": values.get("rope_theta", 10_000.0), "rope_type": "default",
            **(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    kind = rope.get("type", rope["rope_type"]) if rope["rope_type"] == "default" else rope["rope_type"]
    if kind not in ("default", "llama3"):
        odd.append(f"rope_type: {kind!r}")
    if odd:
        raise ConfigError(f"not supported: {', '.join(odd)}", where=where,
                          mend="models without biases and sliding windows, with plain or Llama-3 RoPE, can be imported")
    try:
        scaling = None if kind == "default" else {
            "factor": rope["factor"], "low_frequency_factor": rope["low_freq_factor"],
            "high_frequency_factor": rope["high_freq_factor"],
            "original_length": rope["original_max_position_embeddings"]}
        config = ModelConfig.model_validate({
            "dim": values["hidden_size"], "num_layers": values["num_hidden_layers"],
            "num_heads": values["num_attention_heads"],
            "num_kv_heads": values.get("num_key_value_heads") or values["num_attention_heads"],
            "head_dim": values.get("head_dim") or (128 if family == "qwen3" else None),
            "ffn_dim": values["intermediate_size"], "max_sequence_length": values["max_position_embeddings"],
            "rope_theta": rope["rope_theta"], "rope_scaling": scaling, "norm_epsilon": values["rms_norm_eps"],
            "qk_norm": family == "qwen3", "tie_embeddings": values.get("tie_word_embeddings", False)})
        return config, int(values["vocab_size"])
    except (KeyError, TypeError, pydantic.ValidationError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ConfigError(f"config.json is not complete: {reason[:300]}", where=where,
                          mend="download the model anew") from None


# -- weights -----------------------------------------------------------------------------------
def write(place: Store, config: ModelConfig, vocabulary_size: int, read: Callable[[list[str]], dict[str, torch.Tensor]],
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
        tensors = {their_name(name): tensor.to(dtype).contiguous() for name, tensor in read(names).items()}
        place.write(key, safetensors.torch.save(tensors, {"format": "pt"}))
        logger.info("wrote %s with %d tensors", place.at(key), len(tensors))
        where |= {their_name(name): key for name in names}
    total = sum(sizes.values())
    if len(files) > 1:
        place.write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    place.write_json(CONFIG, to_config(config, vocabulary_size, eos=eos, dtype=dtype))
    return total


def read_config(place: Store) -> tuple[ModelConfig, int]:
    """The configuration and vocabulary size of the model in `place`; ConfigError when it cannot be imported."""
    try:
        values = json.loads(place.read(CONFIG))
    except FileNotFoundError:
        raise ConfigError("there is no config.json", where=place.uri,
                          mend="give a folder as `save_pretrained` writes it") from None
    except ValueError:
        raise ConfigError("not valid JSON", where=place.at(CONFIG), mend="download the model anew") from None
    return from_config(values, place.at(CONFIG))


def read_weights(place: Store, config: ModelConfig, vocabulary_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Our names and whole tensors of the model in `place`, as they are stored; each exactly once.

    Raises:
        CheckpointError: weights are missing, of another shape, unknown, damaged, or not safetensors.
    """
    shapes = parameter_shapes(config, vocabulary_size)
    ours = {their_name(name): name for name in shapes}
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
