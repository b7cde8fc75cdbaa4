"""Parallelism: the mesh of ranks, checks of a layout, and this rank's part of the model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidewheel.train.parallel.building import build
    from tidewheel.train.parallel.data_parallel import local
    from tidewheel.train.parallel.initial_weights import init_weights
    from tidewheel.train.parallel.mesh import Mesh
    from tidewheel.train.parallel.model import ParallelModel

_MODULES = {"Mesh": "mesh", "ParallelModel": "model", "build": "building", "init_weights": "initial_weights",
            "local": "data_parallel"}

__all__ = ["Mesh", "ParallelModel", "build", "init_weights", "local"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that importing the configuration does not import torch."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
