"""Read and write adapters as the library peft does: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping

import safetensors
import safetensors.torch
import torch

from tidewheel.errors import CheckpointError, ConfigError
from tidewheel.models import adapters
from tidewheel.models.adapter import Adapter
from tidewheel.models.adapting.peft_names import PREFIX
from tidewheel.models.family import Model
from tidewheel.storage import Store, content_hash

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


HEADS = {"outcome": "SEQ_CLS", "process": "TOKEN_CLS"}
"""`task_type` of an adapter with a head, by `Objective.head_kind`."""


def write(folder: Store, config: Model, adapter: Adapter, values: Mapping[str, torch.Tensor], *, base: str = "",
          head: tuple[str, torch.Tensor] | None = None) -> int:
    """Write an adapter for `peft.PeftModel.from_pretrained`; return the number of its parameters there.

    Args:
        folder: the output folder.
        config: of the model.
        adapter: its settings.
        values: its whole parameters, by their names in the whole model.
        base: name or folder of the base model in transformers' format.
        head: of a reward model, its kind (see `HEADS`) and its matrix [1, D]. transformers calls it `score`; that of
            token classification has a bias, which is 0.

    Raises:
        ConfigError: peft has no such adapter, or a layer has no counterpart in transformers.
    """
    settings, tensors = adapter.to_peft(config, values)
    common = {"base_model_name_or_path": base or None, "task_type": "CAUSAL_LM", "inference_mode": True,
              "peft_version": None}
    if head is not None:
        kind, matrix = head
        settings |= {"task_type": HEADS[kind], "modules_to_save": ["score"]}
        tensors[f"{PREFIX}score.weight"] = matrix.float()
        if kind == "process":
            tensors[f"{PREFIX}score.bias"] = torch.zeros(len(matrix))
    folder.write(WEIGHTS, safetensors.torch.save(dict(tensors), {"format": "pt"}))
    folder.write_json(CONFIG, {**common, **settings})
    return sum(tensor.numel() for tensor in tensors.values())


def fingerprint(folder: Store) -> str:
    """Return a hash of an adapter's settings and weights. Reads all of them."""
    return content_hash("\n".join(f"{name} {folder.hash(name)}" for name in (CONFIG, WEIGHTS)).encode())


def read(folder: Store, config: Model) -> tuple[Adapter, dict[str, torch.Tensor]]:
    """Return the settings and the parameters of an adapter that peft wrote.

    Args:
        folder: with both files.
        config: of the base model.

    Raises:
        ConfigError: the folder has no adapter, one that is not known here, or one of another model.
        CheckpointError: the weights cannot be read.
    """
    try:
        settings = json.loads(folder.read(CONFIG))
        kind = str(settings["peft_type"])
    except FileNotFoundError:
        raise ConfigError(f"there is no {CONFIG}", where=folder.uri,
                          fix="give a folder as peft's `save_pretrained` writes it") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError("not the settings of an adapter", where=folder.at(CONFIG), fix="download it again") from None
    try:
        tensors = safetensors.torch.load(folder.read(WEIGHTS))
    except (FileNotFoundError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"cannot be read: {str(error) or 'missing'}", where=folder.at(WEIGHTS),
                              fix="download the adapter again; pickled weights are not loaded") from None
    for name in adapters.KIND.names():
        part = adapters.KIND.find(name)
        if part.reads_peft(settings):
            known, values = part.from_peft(settings, tensors, config, folder.at(CONFIG))
            return part.model_validate(known), values
    raise ConfigError(f"peft_type {kind} is not known here", where=folder.at(CONFIG),
                      fix="merge the adapter with peft, and import the whole model")
