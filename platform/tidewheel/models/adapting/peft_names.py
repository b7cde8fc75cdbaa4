"""Names of modules and tensors in the library peft, which names modules as transformers does.

A tensor of a module is "base_model.model.MODULE.lora_A.weight".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tidewheel import expressions
from tidewheel.errors import ConfigError
from tidewheel.models import huggingface
from tidewheel.models.blocks.embedding import Embedding
from tidewheel.models.decoder import Decoder
from tidewheel.models.family import Model

PREFIX = "base_model.model."
Tensors = dict[str, torch.Tensor]
Form = tuple[dict[str, Any], Tensors]
"""The settings of an adapter and its tensors."""


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


def theirs(name: str, names: Mapping[str, str]) -> str:
    """Return the name in transformers of a module, given `their_modules`.

    Raises:
        ConfigError: it has none.
    """
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


def of_patterns(patterns: Mapping[str, float], names: Sequence[str], default: float, where: str) -> dict[str, float]:
    """Return the value of the first of peft's patterns that matches, for each of some modules.

    Args:
        patterns: regular expressions for the end of a module's name.
        names: of the modules in transformers.
        default: of those that none matches.
        where: location for messages.

    Raises:
        ConfigError: an expression is not valid, or takes too much time.
    """
    try:
        matched = expressions.first_matches([rf"(.*\.)?({pattern})$" for pattern in patterns], names)
    except expressions.ExpressionError as error:
        raise ConfigError(f"a pattern of alpha_pattern: {error}", where=where, fix="write the modules' names there"
                          ) from None
    values = list(patterns.values())
    return {name: default if index is None else values[index] for name, index in zip(names, matched)}


def split(name: str, keys: Iterable[str], modules: Iterable[str], where: str) -> tuple[str, str]:
    """Return the module in transformers and the rest of a tensor's name.

    Args:
        name: of the tensor.
        keys: ends of the names of tensors.
        modules: their names in transformers.
        where: location for messages.

    Raises:
        ConfigError: the tensor belongs to none of the modules.
    """
    inner = name.removeprefix(PREFIX)
    for key in keys:
        module = inner.removesuffix(f".{key}")
        if module != inner and module in modules:
            return module, key
    raise ConfigError(f"{name} belongs to no layer of this model", where=where,
                      fix="give the base model that the adapter was trained on")


def embeddings(tensors: Tensors, width: int, where: str) -> torch.Tensor:
    """Return the matrix [tokens, width] of a prompt or of prefixes, in fp32.

    Args:
        tensors: of adapter_model.safetensors.
        width: of the matrix.
        where: location for messages.

    Raises:
        ConfigError: it is missing, or of another width.
    """
    matrix = tensors.get("prompt_embeddings")
    if matrix is None or matrix.shape[1] != width:
        shape = None if matrix is None else list(matrix.shape)
        raise ConfigError(f"prompt_embeddings is {shape}, this model has [tokens, {width}]", where=where,
                          fix="give the base model that the adapter was trained on, without a projection")
    return matrix.float()
