"""Runs of `tests.chaos.training` that fine-tune a model: QLoRA, and DPO against the base as its reference."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.world import LENGTH, prepare, settings
from tests.unit.train.preferences.pairs import random_pairs, write_pairs
from tidewheel.elastic.trainer import fit_local
from tidewheel.inference.reference import ReferenceModel, make

TASKS = ("pretraining", "qlora", "dpo")
PAIRS, BASE_STEPS = 640, 2


def overrides(folder: Path, task: str) -> tuple[str, ...]:
    """Write what a run of the task starts from, and return its settings.

    The base model has trained for two steps. As in `jobs/configs/qlora.yaml`, it is in NF4 and sharded, and activations
    are computed again. The optimizer is AdamW, because reproducible mode refuses AdamW with 8 bits.
    """
    prepare(folder)
    if task == "pretraining":
        return ()
    base = settings(folder, "base", BASE_STEPS, workers=1)
    fit_local(base)
    start = f"model.init_from={base.run_uri}"
    if task == "qlora":
        return (start, "adapter.kind=lora", "adapter.rank=8", "adapter.targets=[attention,ffn]", "adapter.base=nf4",
                "parallel.data=zero3", "memory.activation_checkpointing=full")
    pairs = folder / "pairs"
    write_pairs(pairs, random_pairs(PAIRS, length=LENGTH), shards=4, length=LENGTH)
    made = make(ReferenceModel(base.run_uri), [str(pairs)], str(folder / "references"))
    return (start, "objective.kind=dpo", f"data.uri={pairs}", f"data.reference={made.uri}")
