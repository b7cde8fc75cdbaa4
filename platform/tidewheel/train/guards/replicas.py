"""Compare the copies of weights and optimizer state that ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tidewheel.train.config import TrainConfig
from tidewheel.train.guards.digest import digest
from tidewheel.train.guards.verdict import Finding, of_replicas
from tidewheel.train.optim.build import model_state
from tidewheel.train.optim.model_optimizer import ModelOptimizer
from tidewheel.train.parallel import ParallelModel, local
from tidewheel.train.parallel.mesh import DIMS, GRADIENTS

WEIGHTS, OPTIMIZER = "weights", "optimizer"


@dataclass(frozen=True)
class Replicas:
    """What this rank holds that others hold too.

    - ddp: every data rank has all weights and moments.
    - zero1: it has all weights, and the moments of its rows alone.
    - zero2 and zero3: the ranks of `parallel.replicate` have the same shards. Without them nothing has a copy.

    Args:
        model: this rank's part of the model.
        optimizer: its state.
        dims: of the mesh; ranks that differ only along them hold the same.
        whole: zero1: the copies are those of the weights that the forward pass reads.
    """

    model: ParallelModel
    optimizer: ModelOptimizer
    dims: tuple[str, ...]
    whole: bool

    @classmethod
    def of(cls, config: TrainConfig, model: ParallelModel, optimizer: ModelOptimizer) -> Replicas:
        """Return what has copies under the layout of a run. All ranks call it together.

        Args:
            config: of the run.
            model: this rank's part of the model.
            optimizer: its state.
        """
        sharded = config.parallel.fully_sharded and model.mesh.size("shard", "context") > 1
        replicas = cls(model, optimizer, ("replicate",) if sharded else GRADIENTS, config.parallel.data == "zero1")
        model.mesh.group(*replicas.dims)  # the first call creates it
        return replicas

    @property
    def group(self) -> Any:
        """Return the process group of the copies; None if there is no other one."""
        return self.model.mesh.group(*self.dims)

    @property
    def key(self) -> int:
        """Return a number that the ranks with the same copies share."""
        return self.model.mesh.coordinate(*(name for name in DIMS if name not in self.dims))

    def digests(self) -> torch.Tensor:
        """Return the digests of the copies of weights and optimizer state, int64 [2]; 0 for what has none."""
        weights: list[torch.Tensor]
        if self.whole:
            weights = [parameter for data in self.model.data for _, parameter in data.part.named_parameters()
                       if parameter.requires_grad]
            moments: list[torch.Tensor] = []
        else:
            weights = list(model_state(self.model).values())
            moments = list(self.optimizer.tensors().values())
        found = [digest(map(local, tensors)) if tensors else torch.zeros((), dtype=torch.int64)
                 for tensors in (weights, moments)]
        return torch.stack([value.to(self.model.device) for value in found])

    def differ(self, device: torch.device) -> torch.Tensor:
        """Return 1 if the copies differ, else 0, fp64 [1]. All ranks call it; the host does not wait.

        Args:
            device: of the result, on which collectives work.
        """
        group = self.group
        if group is None:
            return torch.zeros(1, dtype=torch.float64, device=device)
        own = self.digests().to(device)
        least = torch.stack((own, ~own))  # the least of the complements is the complement of the largest
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        return (least[0] != ~least[1]).any().double()[None]

    def findings(self, keys: Sequence[int], digests: torch.Tensor) -> list[Finding]:
        """Return which ranks hold a copy that differs from the others'.

        Args:
            keys: of all ranks.
            digests: of all ranks, int64 [ranks, 2].
        """
        result = []
        for column, place in enumerate((WEIGHTS, OPTIMIZER)):
            for key in sorted(set(keys)):
                found = [(rank, int(digests[rank, column])) for rank, other in enumerate(keys) if other == key]
                finding = of_replicas(place, found)
                if finding is not None:
                    result.append(finding)
        return result
