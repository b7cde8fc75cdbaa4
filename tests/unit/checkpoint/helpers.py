"""A small state, the events of a manager, and stores that hang or fail."""

import threading
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.storage import LocalStore, Store

SHAPES = {"embedding.weight": (7, 5), "blocks.0.norm.weight": (5,), "head.weight": (1, 4), "wide": (3, 2, 4)}


def state(seed: float, mesh: Any = None) -> dict[str, dict[str, torch.Tensor]]:
    """Return parameters and moments of several dtypes that depend on `seed`, sharded in dimension 0 over `mesh`."""
    generator = torch.Generator().manual_seed(int(seed))
    model = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    moments = {f"{name}.exp_avg": torch.randn(shape, generator=generator).double() for name, shape in SHAPES.items()}
    moments["half"] = torch.randn(6, generator=generator).to(torch.bfloat16)
    moments["mask"] = torch.randn(9, generator=generator) > 0
    moments["count"] = torch.tensor(int(seed))
    moments["empty"] = torch.empty(0, 3)
    if mesh is not None:
        from torch.distributed.tensor import Shard

        model = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in model.items()}
        for name in SHAPES:
            moments[f"{name}.exp_avg"] = distribute_tensor(moments[f"{name}.exp_avg"], mesh, [Shard(0)])
    return {"model": model, "optimizer": moments}


@torch.no_grad()
def clear(values: dict[str, Any]) -> None:
    """Set all tensors to zero."""
    for group in values.values():
        for tensor in group.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether two states have the same names and the same bits; a collective when they are sharded."""
    if {group: list(a[group]) for group in a} != {group: list(b[group]) for group in b}:
        return False
    return all(torch.equal(_whole(a[group][name]), _whole(b[group][name])) for group in a for name in a[group])


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Events(list):
    """A list of the events that `on_event` received."""

    def __call__(self, kind: str, detail: dict[str, Any]) -> None:
        self.append((kind, detail))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [detail for recorded, detail in self if recorded == kind]


def manager(store: Store, events: Events | None = None, **options: Any) -> CheckpointManager:
    """Return a manager that reports its events to `events`."""
    return CheckpointManager(store, on_event=events if events is not None else Events(), **options)


class HangingStore(LocalStore):
    """A folder on a hanging file system: writes of keys that contain `part` wait until `released` is set."""

    def __init__(self, root: Any, part: str = "") -> None:
        super().__init__(root)
        self.part = part
        self.entered = threading.Event()
        self.released = threading.Event()

    def writer(self, key: str):
        if self.part in key:
            self.entered.set()
            self.released.wait()
        return super().writer(key)


class FlakyStore(LocalStore):
    """A folder whose writes of keys that contain `part` fail `failures` times."""

    def __init__(self, root: Any, failures: int = 0, part: str = "") -> None:
        super().__init__(root)
        self.failures, self.part = failures, part

    def writer(self, key: str):
        from tidewheel.errors import StorageError

        if self.part in key and self.failures > 0:
            self.failures -= 1
            raise StorageError("the object store failed", where=key, fix="try again")
        return super().writer(key)
