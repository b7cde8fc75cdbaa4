"""A decoder spread over the ranks of a run: the mesh, what is legal on it, and the model on this rank."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidewheel.train.parallel.mesh import Mesh
    from tidewheel.train.parallel.model import ParallelModel, build, init_weights, local

_HOMES = {"Mesh": "mesh", "ParallelModel": "model", "build": "model", "init_weights": "model", "local": "model"}

__all__ = ["Mesh", "ParallelModel", "build", "init_weights", "local"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the configuration beside it must not wait for torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
