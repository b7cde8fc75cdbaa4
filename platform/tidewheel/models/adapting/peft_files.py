"""Read and write adapters as the library peft does: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
SCORE = "score"
"""Name in transformers of the head."""


@dataclass(frozen=True)
class Head:
    """The head of a reward model beside its adapter.

    Args:
        kind: "outcome" or "process"; see `Objective.head_kind`.
        matrix: fp32 [1, D].
    """

    kind: str
    matrix: torch.Tensor


def write(folder: Store, config: Model, adapter: Adapter, values: Mapping[str, torch.Tensor], *, base: str = "",
          head: Head | None = None) -> int:
    """Write an adapter for `peft.PeftModel.from_pretrained`; return the number of its parameters there.

    Args:
        folder: the output folder.
        config: of the model.
        adapter: its settings.
        values: its whole parameters, by their names in the whole model.
        base: name or folder of the base model in transformers' format.
        head: of a reward model. In transformers that of token classification has a bias, which is 0.

    Raises:
        ConfigError: peft has no such adapter, or a layer has no counterpart in transformers.
    """
    settings, tensors = adapter.to_peft(config, values)
    common = {"base_model_name_or_path": base or None, "task_type": "CAUSAL_LM", "inference_mode": True,
              "peft_version": None}
    if head is not None:
        settings |= {"task_type": HEADS[head.kind], "modules_to_save": [SCORE]}
        tensors[f"{PREFIX}{SCORE}.weight"] = head.matrix.float()
        if head.kind == "process":
            tensors[f"{PREFIX}{SCORE}.bias"] = torch.zeros(len(head.matrix))
    folder.write(WEIGHTS, safetensors.torch.save(dict(tensors), {"format": "pt"}))
    folder.write_json(CONFIG, {**common, **settings})
    return sum(tensor.numel() for tensor in tensors.values())


def fingerprint(folder: Store) -> str:
    """Return a hash of an adapter's settings and weights. Reads all of them."""
    return content_hash("\n".join(f"{name} {folder.hash(name)}" for name in (CONFIG, WEIGHTS)).encode())


def read(folder: Store, config: Model) -> tuple[Adapter, dict[str, torch.Tensor]]:
    """Return the settings and the parameters of a decoder's adapter that peft wrote.

    Args:
        folder: with both files.
        config: of the base model.

    Raises:
        ConfigError: see `read_with_head`; or the adapter has the head of a reward model.
        CheckpointError: the weights cannot be read.
    """
    adapter, values, head = read_with_head(folder, config)
    if head is not None:
        raise ConfigError("the adapter of a reward model, whose head gives no logits; a decoder is expected",
                          where=folder.at(CONFIG), fix="give an adapter of task_type CAUSAL_LM; `tidewheel checkpoint "
                          "import-adapter` takes this one")
    return adapter, values


def read_with_head(folder: Store, config: Model) -> tuple[Adapter, dict[str, torch.Tensor], Head | None]:
    """Return the settings and the parameters of an adapter that peft wrote, and its head if it is of a reward model.

    Args:
        folder: with both files.
        config: of the base model.

    Raises:
        ConfigError: the folder has no adapter, one that is not known here, or one of another model; or its head does
            not fit the model.
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
    head = _take_head(settings, tensors, config, folder.at(CONFIG))
    for name in adapters.KIND.names():
        part = adapters.KIND.find(name)
        if part.reads_peft(settings):
            known, values = part.from_peft(settings, tensors, config, folder.at(CONFIG))
            return part.model_validate(known), values, head
    raise ConfigError(f"peft_type {kind} is not known here", where=folder.at(CONFIG),
                      fix="merge the adapter with peft, and import the whole model")


def _take_head(settings: dict[str, Any], tensors: dict[str, torch.Tensor], config: Model, where: str) -> Head | None:
    """Remove a reward model's head from an adapter's settings and tensors, and return it; None: there is none."""
    beside = set(settings.get("modules_to_save") or ())
    if SCORE not in beside:
        return None
    settings["modules_to_save"] = sorted(beside - {SCORE, "classifier"})  # peft names both, whichever there is
    matrix = tensors.pop(f"{PREFIX}{SCORE}.weight", None)
    bias = tensors.pop(f"{PREFIX}{SCORE}.bias", None)
    task = settings.get("task_type")
    kind = next((kind for kind, name in HEADS.items() if name == task), "")
    if matrix is None:
        problem, fix = f"{SCORE}.weight is missing, though modules_to_save names it", "save the adapter with peft again"
    elif not kind:
        problem = f"task_type {task} does not say what its head `{SCORE}` is of"
        fix = "set task_type: SEQ_CLS for a reward of each answer, TOKEN_CLS for rewards of steps"
    elif matrix.shape[0] != 1:
        problem, fix = f"the head has {len(matrix)} labels, a reward is one", "train it with num_labels=1"
    elif matrix.shape != (1, config.dim):
        problem = f"the head is {list(matrix.shape)}, a head of this model is {[1, config.dim]}"
        fix = "give the base model that the adapter was trained on"
    elif bias is not None and bias.any():
        problem, fix = f"{SCORE}.bias is {float(bias[0]):g}; heads here have none", f"train it with {SCORE}.bias = 0"
    else:
        return Head(kind, matrix.float())
    raise ConfigError(problem, where=where, fix=fix)
