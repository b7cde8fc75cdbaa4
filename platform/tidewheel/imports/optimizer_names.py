"""Other tools' names of optimizers and schedules, in lower case, and ours."""

from __future__ import annotations

from typing import Any

from tidewheel.imports.table import Unavailable
from tidewheel.train import optimizers

NAMES = {
    "adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "cpuadam": "adamw", "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw", "adamw_torch_xla": "adamw", "adamw_torch_npu_fused": "adamw",
    "adamw_apex_fused": "adamw", "adamw_hf": "adamw", "adamw_anyprecision": "adamw", "dist_adam": "adamw",
    "adafactor": "adafactor", "lion": "lion", "lion_32bit": "lion", "muon": "muon", "dist_muon": "muon",
    "adamw_bnb_8bit": "adamw8bit", "adamw_8bit": "adamw8bit", "adamw_torch_8bit": "adamw8bit",
    "paged_adamw_8bit": "adamw8bit", "sgd": "sgd", "ademamix": "ademamix",
    "adagrad": "adagrad", "lamb": "lamb", "fusedlamb": "lamb", "schedule_free_adamw": "schedule_free",
}


def optimizer(given: Any) -> str:
    """Return our optimizer of another tool's name.

    Raises:
        Unavailable: there is none.
    """
    name = NAMES.get(str(given).lower(), "")
    if name not in optimizers.KIND.names():
        raise Unavailable(f"there is no optimizer {given}, only {', '.join(optimizers.KIND.names())}")
    return name


def known_optimizer(given: Any) -> str | None:
    """Return our optimizer of another tool's name; None if there is none."""
    try:
        return optimizer(given)
    except Unavailable:
        return None
