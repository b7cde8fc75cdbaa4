"""The base of optimizers: a part that builds torch optimizers and declares its state.

    class Momentum(tw.Optimizer):
        "Gradient descent with momentum."
        STATE = ("momentum_buffer",)
        NOT_REPRODUCIBLE = ""
        learning_rate: float = 0.1
        momentum: float = 0.9

        def build(self, groups):
            return torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.momentum, foreach=True)

Nothing here imports torch before an optimizer is built.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pydantic import Field, field_validator

from tidewheel.parts import Part
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch

Named = tuple[str, "torch.Tensor"]
COUNT = "step"
"""Name of the state tensor that counts updates."""


ParameterGroups: TypeAlias = list[dict[str, Any]]
"""Parameter groups, in the type that torch's optimizers take."""


class Optimizer(Part):
    """Base of every optimizer.

    Weight decay is decoupled; norms, biases and embeddings have none. Before an update the gradient is clipped by the
    norm of the whole model's gradient.
    """

    VERSION: ClassVar[Version] = Version("optimizer_groups")
    """Version of what all optimizers share: which parameters decay."""
    STATE: ClassVar[tuple[str, ...]] = ()
    """Names of the state tensors of each parameter. They are fp32, initially zero, and have the parameter's shape and
    placement. "step" is a scalar that counts updates."""
    AVERAGE: ClassVar[str] = ""
    """Name of the state tensor that is an average of the parameters, to evaluate and export beside them; "": none. It
    has the parameters' values once there was an update."""
    NOT_REPRODUCIBLE: ClassVar[str] = "does not say that it updates each element by itself (NOT_REPRODUCIBLE = \"\")"
    """Why an update depends on how parameters are sharded; "" if the update of an element depends only on its own
    gradient and state. Reproducible mode refuses an optimizer with a reason."""
    NOT_OFFLOADABLE: ClassVar[str] = ""
    """Why its state cannot be kept in host memory (`parallel.offload`); "" if it can."""
    NOT_OVERLAPPED: ClassVar[str] = "does not say that its update needs no other worker (NOT_OVERLAPPED = \"\")"
    """Why a thread cannot update layers while the backward pass goes on (`parallel.overlap_update`): the collectives of
    an update would mix with those of the passes. "" if an update communicates nothing."""
    HOST_TRAFFIC: ClassVar[float] = 84.0
    """Bytes of a parameter that an update in host memory moves, for plans. The default is what
    `torch.optim.AdamW(foreach=True)` moves on a CPU, operation by operation; a test counts it."""
    STATE_NOTE: ClassVar[str] = ""
    """What a plan says of its bytes."""
    LEANER: ClassVar[Mapping[str, Any]] = {}
    """Settings with which it keeps less state, for plans."""
    COMPACT: ClassVar[str] = ""
    """What a plan calls its state when it proposes it because memory is short; "": it does not."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay of matrices, times the learning rate."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Largest norm of the gradient; a larger gradient is scaled down. 0: no clipping."""

    @field_validator("learning_rate", check_fields=False)
    @classmethod
    def _positive(cls, value: float) -> float:
        if value <= 0:  # a subclass may redeclare the field without bounds
            raise ValueError("the learning rate must be greater than 0")
        return value

    @property
    def curvature_every(self) -> int:
        """Steps between two estimates of the curvature; 0: it wants none.

        Before such a step, the first one included, the torch optimizers' `take_curvature(targets)` is called. Then
        `grad` is the sum of the gradients of `targets` tokens whose labels the model has drawn (`train.curvature`).
        """
        return 0

    def build(self, groups: ParameterGroups) -> torch.optim.Optimizer:
        """Return the torch optimizer of fp32 parameters.

        Args:
            groups: parameter groups, {"params": fp32 tensors or DTensors, "weight_decay": float}.
        """
        raise NotImplementedError

    def build_all(self, named: Sequence[Named]) -> list[torch.optim.Optimizer]:
        """Return torch optimizers with allocated state; each parameter belongs to exactly one.

        Args:
            named: (name in the whole model, fp32 tensor or DTensor) of each parameter on this rank.
        """
        return [allocate(self.build(groups(named, self.weight_decay)), self.STATE)] if named else []

    def state_bytes(self, parameters: int, block_matrices: int) -> float:
        """Return the total bytes of state over all ranks.

        Args:
            parameters: number of parameters of the whole model.
            block_matrices: number of them in the matrices of blocks.
        """
        return 4.0 * parameters * len([name for name in self.STATE if name != COUNT])

    def host_bytes(self, parameters: int, block_matrices: int) -> float:
        """Return how many of `state_bytes` are in host memory where there are GPUs; see it for the arguments."""
        return 0.0

    def stored(self, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the checkpoint's form of a state tensor: {name: plain tensor or DTensor that shares its memory}.

        Args:
            name: name of the parameter and of the state tensor, "output.weight.exp_avg".
            value: the state tensor.
        """
        return {name: value}


def moment_decays(betas: tuple[float, float]) -> tuple[float, float]:
    """Return `betas`, a validator.

    Raises:
        ValueError: one is not in [0, 1).
    """
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError("betas must be in [0, 1)")
    return betas


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies: to matrices except the embedding, not to norms and biases.

    The biases of experts, [E, F], are one tensor and no matrix.
    """
    return parameter.ndim > 1 and not name.startswith("embedding.") and not name.endswith("_bias")


def groups(named: Iterable[Named], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups, each of one weight decay and one device mesh, because foreach operations take one mesh.

    Args:
        named: (name in the whole model, tensor or DTensor).
        weight_decay: of parameters that decay.
    """
    from torch.distributed.tensor import DTensor

    by_decay_and_mesh: dict[tuple[float, Any], list[torch.Tensor]] = defaultdict(list)
    for name, parameter in named:
        decay = weight_decay if decays(name, parameter) else 0.0
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_decay_and_mesh[decay, mesh].append(parameter)
    return [{"params": parameters, "weight_decay": decay} for (decay, _), parameters in by_decay_and_mesh.items()]


def on_cuda(groups: Iterable[dict[str, Any]]) -> bool:
    """Return whether all parameters are on CUDA, where an optimizer can take decisions without the host."""
    return all(parameter.is_cuda for group in groups for parameter in group["params"])


def allocate(optimizer: torch.optim.Optimizer, state: Iterable[str]) -> torch.optim.Optimizer:
    """Allocate the state tensors of every parameter, zero, and return the optimizer; see `Optimizer.STATE`."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # a fused optimizer has its counter on the device, any other on the host
            device = parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
            for name in state:
                optimizer.state[parameter][name] = (
                    torch.zeros((), dtype=torch.float32, device=device) if name == COUNT
                    else torch.zeros_like(parameter))
    return optimizer
