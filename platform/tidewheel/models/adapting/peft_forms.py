"""Adapters in the format of the library peft: settings of adapter_config.json and tensors, both ways.

peft names modules as transformers does. A tensor of a module is "base_model.model.MODULE.lora_A.weight".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tidewheel.errors import ConfigError
from tidewheel.models import huggingface
from tidewheel.models.adapter import MARK
from tidewheel.models.adapting.names import matches
from tidewheel.models.blocks.embedding import Embedding
from tidewheel.models.decoder import Decoder
from tidewheel.models.family import Model

PREFIX = "base_model.model."
Tensors = dict[str, torch.Tensor]
Form = tuple[dict[str, Any], Tensors]
"""The settings of an adapter and its tensors."""
_OF_LINEAR = {"a": "lora_A.weight", "b": "lora_B.weight", "m": "lora_magnitude_vector"}
_OF_EMBEDDING = {"a": "lora_embedding_A", "b": "lora_embedding_B"}


def by_module(values: Mapping[str, torch.Tensor]) -> dict[str, Tensors]:
    """Return {module: {name of the parameter: value}} of an adapter's parameters."""
    modules: dict[str, Tensors] = {}
    for name, value in values.items():
        module, _, key = name.partition(MARK)
        modules.setdefault(module, {})[key] = value
    return modules


def their_modules(config: Model) -> dict[str, str]:
    """Return {name here: name in transformers} of a model's linear layers and its embedding.

    Layers whose matrices are joined or split in transformers are left out.
    """
    with torch.device("meta"):
        model = Decoder(config, 8)
    names: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Embedding) or name == "output":
            continue
        try:
            names[name] = huggingface.their_name(f"{name}.weight", config).removesuffix(".weight")
        except KeyError:
            continue
    return names


def _their(name: str, names: Mapping[str, str]) -> str:
    if name not in names:
        raise ConfigError(f"{name} has no layer of its own in transformers", where="adapter",
                          fix="merge the adapter and export the whole model")
    return names[name]


def shortest(chosen: Iterable[str], candidates: Iterable[str]) -> list[str]:
    """Return patterns that choose exactly some modules: last components of names if these suffice, else whole names."""
    wanted = set(chosen)
    ends = {name.rpartition(".")[2] for name in wanted}
    if {name for name in candidates if name.rpartition(".")[2] in ends} == wanted:
        return sorted(ends)
    return sorted(wanted)


# -- low rank ----------------------------------------------------------------------------------
def low_rank_to_peft(config: Model, values: Mapping[str, torch.Tensor], scale: Callable[[str], float], *,
                     stabilized: bool, directed: bool) -> Form:
    """Return a low-rank adapter in peft's form. One that began with singular vectors has twice the rank there.

    Args:
        config: of the model.
        values: the adapter's parameters.
        scale: returns the scale of a module, given its name.
        stabilized: scales are alpha / sqrt(rank).
        directed: it is DoRA.

    Raises:
        ConfigError: a module has no counterpart in transformers.
    """
    names, tensors = their_modules(config), {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, parts in by_module(values).items():
        theirs = _their(name, names)
        a, b = parts["a"], parts["b"]
        if "a0" in parts:
            a, b = torch.cat((a, parts["a0"])), torch.cat((b, -parts["b0"]), dim=1)
        keys = _OF_EMBEDDING if name == "embedding" else _OF_LINEAR
        for key, value in {**parts, "a": a, "b": b}.items():
            if key in keys:
                tensors[f"{PREFIX}{theirs}.{keys[key]}"] = value.float().contiguous()
        ranks[theirs] = len(a)
        alphas[theirs] = scale(name) * (math.sqrt(len(a)) if stabilized else len(a))
    rank = Counter(ranks.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    return {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "use_rslora": stabilized,
            "use_dora": directed, "target_modules": shortest(ranks, names.values()),
            "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
            "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
            "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "init_lora_weights": True}, tensors


def low_rank_from_peft(settings: Mapping[str, Any], tensors: Tensors, config: Model, where: str) -> Form:
    """Return the settings and the parameters of a low-rank adapter in peft's form.

    Args:
        settings: content of adapter_config.json.
        tensors: of adapter_model.safetensors.
        config: of the model.
        where: location for messages.

    Raises:
        ConfigError: the adapter has parts that are not known here, or is of another model.
    """
    unknown = ("modules_to_save", "layer_replication", "fan_in_fan_out", "lora_bias", "trainable_token_indices")
    odd = [name for name in unknown if settings.get(name)]
    if settings.get("bias", "none") != "none":
        odd.append("bias")
    if odd:
        raise ConfigError(f"not supported: {', '.join(odd)}", where=where,
                          fix="merge the adapter with peft, and import the whole model")
    ours = {theirs: name for name, theirs in their_modules(config).items()}
    keys = {theirs: key for key, theirs in (*_OF_LINEAR.items(), *_OF_EMBEDDING.items())}
    values = {}
    for name, value in tensors.items():
        if ".base_layer." in name:  # peft adds the frozen embedding to an adapter of it
            continue
        module, key = _split(name, keys, ours, where)
        values[f"{ours[module]}{MARK}{keys[key]}"] = value.float()
    stabilized = bool(settings.get("use_rslora"))
    modules = by_module(values)
    ranks = {name: len(parts["a"]) for name, parts in modules.items()}
    patterns: Mapping[str, float] = settings.get("alpha_pattern") or {}
    alphas = {name: float(_of_pattern(patterns, theirs, settings["lora_alpha"]))
              for theirs, name in ours.items() if name in modules}
    rank = int(settings["r"])
    alpha = float(settings["lora_alpha"])
    return {"rank": rank, "alpha": alpha, "rank_stabilized": stabilized,
            "targets": shortest(modules, ours.values()),
            "ranks": {name: value for name, value in ranks.items() if value != rank},
            "alphas": {name: value for name, value in alphas.items() if value != alpha}}, values


def _of_pattern(patterns: Mapping[str, float], name: str, default: float) -> float:
    """Return the value of the first of peft's patterns, regular expressions for the end of a module's name."""
    import re

    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", name)), default)


def _split(name: str, keys: Iterable[str], modules: Mapping[str, str], where: str) -> tuple[str, str]:
    """Return the module in transformers and the rest of a tensor's name."""
    inner = name.removeprefix(PREFIX)
    for key in keys:
        module = inner.removesuffix(f".{key}")
        if module != inner and module in modules:
            return module, key
    raise ConfigError(f"{name} belongs to no layer of this model", where=where,
                      fix="give the base model that the adapter was trained on")


# -- factors -----------------------------------------------------------------------------------
def factors_to_peft(config: Model, values: Mapping[str, torch.Tensor], input_patterns: Iterable[str]) -> Form:
    """Return learned factors in peft's form.

    Args:
        config: of the model.
        values: the adapter's parameters.
        input_patterns: match the modules whose inputs are multiplied.

    Raises:
        ConfigError: a module has no counterpart in transformers.
    """
    names, tensors, inputs = their_modules(config), {}, []
    for name, parts in by_module(values).items():
        theirs, value = _their(name, names), parts["l"].float()
        of_inputs = any(matches(pattern, name) for pattern in input_patterns)
        tensors[f"{PREFIX}{theirs}.ia3_l"] = (value[None] if of_inputs else value[:, None]).contiguous()
        inputs += [theirs] if of_inputs else []
    chosen = [name.removeprefix(PREFIX).removesuffix(".ia3_l") for name in tensors]
    return {"peft_type": "IA3", "target_modules": shortest(chosen, names.values()),
            "feedforward_modules": shortest(inputs, names.values()), "fan_in_fan_out": False,
            "init_ia3_weights": True}, tensors


def factors_from_peft(settings: Mapping[str, Any], tensors: Tensors, config: Model, where: str) -> Form:
    """Return settings and parameters of learned factors in peft's form.

    Args:
        settings: content of adapter_config.json.
        tensors: of adapter_model.safetensors.
        config: of the model.
        where: location for messages.

    Raises:
        ConfigError: the adapter is of another model.
    """
    ours = {theirs: name for name, theirs in their_modules(config).items()}
    values, inputs = {}, []
    for name, value in tensors.items():
        module, _ = _split(name, ["ia3_l"], ours, where)
        values[f"{ours[module]}{MARK}l"] = value.float().flatten()
        inputs += [ours[module]] if value.shape[0] == 1 else []
    return {"targets": shortest(by_module(values), ours.values()),
            "inputs": shortest(inputs, ours.values()) if inputs else []}, values


# -- prefixes ----------------------------------------------------------------------------------
def prefix_to_peft(config: Model, values: Mapping[str, torch.Tensor]) -> Form:
    """Return prefixes of all layers in peft's form: one matrix [tokens, layers x (keys, values) x heads x width].

    Args:
        config: of the model.
        values: the adapter's parameters.

    Raises:
        ConfigError: a layer has no prefix.
    """
    modules = by_module(values)
    if len(modules) != config.num_layers:
        raise ConfigError(f"{len(modules)} of {config.num_layers} layers have a prefix; in peft all have one",
                          where="adapter.targets", fix="export only prefixes of all layers")
    columns = []
    for layer in range(config.num_layers):
        parts = modules[f"blocks.{layer}.attention"]
        columns += [parts["keys"].flatten(1), parts["values"].flatten(1)]
    return {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": len(columns[0]), "num_layers": config.num_layers,
            "token_dim": config.kv_heads * config.head_width, "num_attention_heads": config.kv_heads,
            "num_transformer_submodules": 1, "prefix_projection": False, "encoder_hidden_size": config.dim,
            }, {"prompt_embeddings": torch.cat(columns, dim=1).float().contiguous()}


def prefix_from_peft(settings: Mapping[str, Any], tensors: Tensors, config: Model, where: str) -> Form:
    """Return settings and parameters of prefixes in peft's form.

    Args:
        settings: content of adapter_config.json.
        tensors: of adapter_model.safetensors.
        config: of the model.
        where: location for messages.

    Raises:
        ConfigError: the adapter is of another model, or its prefixes come from a projection.
    """
    matrix = tensors.get("prompt_embeddings")
    width = 2 * config.num_layers * config.kv_heads * config.head_width
    if matrix is None or matrix.shape[1] != width:
        shape = None if matrix is None else list(matrix.shape)
        raise ConfigError(f"prompt_embeddings is {shape}, this model has [tokens, {width}]", where=where,
                          fix="give the base model that the adapter was trained on, without a projection")
    pieces = matrix.float().unflatten(1, (2 * config.num_layers, config.kv_heads, config.head_width)).unbind(1)
    values = {}
    for layer in range(config.num_layers):
        begin = f"blocks.{layer}.attention{MARK}"
        values[f"{begin}keys"] = pieces[2 * layer].contiguous()
        values[f"{begin}values"] = pieces[2 * layer + 1].contiguous()
    return {"tokens": len(matrix)}, values


# -- prompts -----------------------------------------------------------------------------------
def prompt_to_peft(config: Model, values: Mapping[str, torch.Tensor]) -> Form:
    """Return a prompt in peft's form: one matrix [tokens, dim].

    Args:
        config: of the model.
        values: the adapter's parameters.
    """
    (matrix,) = values.values()
    return {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": len(matrix), "num_layers": config.num_layers,
            "token_dim": config.dim, "num_attention_heads": config.num_heads, "num_transformer_submodules": 1,
            "prompt_tuning_init": "RANDOM"}, {"prompt_embeddings": matrix.float().contiguous()}


def prompt_from_peft(tensors: Tensors, config: Model, where: str) -> Form:
    """Return settings and parameters of a prompt in peft's form.

    Args:
        tensors: of adapter_model.safetensors.
        config: of the model.
        where: location for messages.

    Raises:
        ConfigError: the adapter is of another model.
    """
    matrix = tensors.get("prompt_embeddings")
    if matrix is None or matrix.shape[1] != config.dim:
        shape = None if matrix is None else list(matrix.shape)
        raise ConfigError(f"prompt_embeddings is {shape}, this model has [tokens, {config.dim}]", where=where,
                          fix="give the base model that the adapter was trained on")
    return {"tokens": len(matrix)}, {f"embedding{MARK}embeddings": matrix.float()}
