"""Make a mixture of experts from a dense checkpoint: every expert begins as the dense feed-forward.

Sparse upcycling, https://arxiv.org/abs/2212.05055. All other weights are copied, and the router begins as in a new
model. If the weights of a token's experts add up to 1, the first logits are those of the dense model.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tidewheel import storage
from tidewheel.checkpoint import tokenizer_files
from tidewheel.checkpoint.conversion import Converted, model_of, read_weights, save_weights
from tidewheel.checkpoint.manifest import read_manifest
from tidewheel.checkpoint.verify import check_files, locate
from tidewheel.errors import ConfigError
from tidewheel.models import families, huggingface
from tidewheel.models.family import Model
from tidewheel.models.initial_values import init_parameter
from tidewheel.models.moe.config import MixtureOfExperts

EXPERTS = ".ffn.experts."
SHARED_SETTINGS = ("dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_sequence_length", "rope_theta",
                   "rope_scaling", "norm_epsilon", "tie_embeddings", "init_std")
"""Settings that the mixture takes from the dense model."""


def upcycle(uri: str, out: str, settings: Mapping[str, Any], *, noise: float = 0.0, seed: int = 0) -> Converted:
    """Write a checkpoint of step 0 of a mixture of experts, from a dense checkpoint.

    Args:
        uri: a run (its newest complete checkpoint), or one checkpoint.
        out: the run to write.
        settings: of the mixture: `kind` of a family with experts, `num_experts` and so on. The shape of attention and
            of the feed-forward is that of the dense model.
        noise: standard deviation of what is added to each expert's matrices, relative to that of the matrix. 0: all
            experts are equal until their routes differ.
        seed: of the router and the noise.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged.
        ConfigError: the mixture has weights that the dense model lacks, or lacks some that it has.
        StorageError: `out` cannot be written to.
    """
    run, checkpoints, name = locate(uri)
    manifest = read_manifest(checkpoints, name)
    check_files(checkpoints, name, manifest)
    dense, vocabulary_size = model_of(manifest, checkpoints.at(name))
    config = mixture_of(dense, settings)
    target = storage.store(out)
    target.check()
    dense_shapes = huggingface.weight_shapes(dense, vocabulary_size)
    shapes = huggingface.weight_shapes(config, vocabulary_size)
    check_weights(dense_shapes, shapes)
    held = read_weights(checkpoints, name, manifest, list(dense_shapes))
    weights: dict[str, torch.Tensor] = {}
    for weight, shape in shapes.items():
        if EXPERTS in weight:
            copied = held[dense_name(weight)].float().expand(shape)
            weights[weight] = with_noise(copied, weight, config, noise, seed)
        elif weight in held:
            weights[weight] = held[weight].float()
        elif weight.endswith("router.weight"):
            weights[weight] = init_parameter(weight, shape, config, seed)
        else:  # the selection bias
            weights[weight] = torch.zeros(shape)
    save_weights(target, config, weights, {"imported": {"from": checkpoints.at(name), "time": time.time()}})
    has_tokenizer = tokenizer_files.copy(run, target)
    count = sum(shape.numel() for shape in huggingface.parameter_shapes(config, vocabulary_size).values())
    return Converted(target.uri, count, config, vocabulary_size, has_tokenizer, checkpoints.at(name))


def mixture_of(dense: Model, settings: Mapping[str, Any]) -> MixtureOfExperts:
    """Return the mixture's configuration.

    Args:
        dense: the dense model.
        settings: see `upcycle`.

    Raises:
        ConfigError: the settings are not those of a mixture of experts, or its first output would not be the dense one.
    """
    shape = {name: value for name, value in dense.shape().items() if name in SHARED_SETTINGS}
    config = families.of_shape({**shape, "ffn_dim": dense.ffn_width, **settings})
    if not isinstance(config, MixtureOfExperts):
        raise ConfigError(f"{settings.get('kind', families.DEFAULT)!r} has no experts", where="kind",
                          fix="give a family with experts: --set kind=NAME")
    only = {"expert_width": dense.ffn_width, "shared_experts": 0, "weight_scale": 1.0, "normalise_weights": True,
            "routing": "token_choice"}
    for name, value in only.items():
        if getattr(config, name) != value:
            setting = "expert_ffn_dim" if name == "expert_width" else name
            raise ConfigError(f"{setting} is {getattr(config, name)!r}: the first output would not be that of the "
                              "dense model", where=setting, fix=f"set {setting}={value}")
    return config


def dense_name(weight: str) -> str:
    """Return the dense model's name of an expert's matrix: blocks.0.ffn.w1.weight of blocks.0.ffn.experts.w1."""
    return weight.replace(EXPERTS, ".ffn.") + ".weight"


def check_weights(dense: Mapping[str, Sequence[int]], mixture: Mapping[str, Sequence[int]]) -> None:
    """Check that every weight of the dense model has a place in the mixture, and the other way round.

    Args:
        dense: {name: shape} of the dense model.
        mixture: {name: shape} of the mixture.

    Raises:
        ConfigError: a weight has none, or another shape.
    """
    used = set()
    for name, shape in mixture.items():
        if name.endswith((".router.weight", ".router.selection_bias")):
            continue
        source = dense_name(name) if EXPERTS in name else name
        wanted = list(shape[1:]) if EXPERTS in name else list(shape)
        if list(dense.get(source, ())) != wanted:
            raise ConfigError(f"the mixture has {name} {list(shape)}, which the dense model lacks", where="kind",
                              fix="give a family with the attention and the feed-forward of the dense model")
        used.add(source)
    if left := sorted(set(dense) - used):
        raise ConfigError(f"the dense model has {left[0]}, which the mixture lacks", where="kind",
                          fix="give a family with the attention and the feed-forward of the dense model")


def with_noise(copied: torch.Tensor, name: str, config: Model, noise: float, seed: int) -> torch.Tensor:
    """Return the experts' matrices [E, ...] with noise of `noise` times their standard deviation.

    Args:
        copied: the dense matrix for each expert.
        name: of the parameter.
        config: of the mixture.
        noise: relative standard deviation.
        seed: of the noise.
    """
    if not noise:
        return copied.contiguous()
    drawn = init_parameter(f"{name}.noise", copied.shape, config, seed)
    return copied + drawn * (noise * copied[0].std() / drawn.std())
