"""What an optimizer is: a part that builds torch optimizers and says of itself what others must know.

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
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pydantic import Field, field_validator

from tidewheel.parts import Part
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch

Named = tuple[str, "torch.Tensor"]
COUNT = "step"
"""Name of a state tensor that counts updates."""


ParameterGroups: TypeAlias = list[dict[str, Any]]
"""Parameter groups, in the type that torch's optimizers take."""


class Optimizer(Part):
    """Base of every optimizer: the update of the weights.

    Weight decay is decoupled, and there is none on norms, biases and embeddings. The gradient is clipped by the norm of
    the whole model's gradient before an update.
    """

    VERSION: ClassVar[Version] = Version("optimizer_groups")
    """Version of what all optimizers share: which parameters decay."""
    STATE: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors that it keeps for each parameter: fp32, zero at the start, of the parameter's shape and
    placed like it. "step" is a scalar that counts updates."""
    NOT_REPRODUCIBLE: ClassVar[str] = "does not say that it updates each element by itself (NOT_REPRODUCIBLE = \"\")"
    """Why an update depends on how parameters are sharded; "" if each element's update follows from its own gradient
    and state. Reproducible mode refuses an optimizer with a reason."""
    NOT_OFFLOADABLE: ClassVar[str] = ""
    """Why its state cannot be in host memory (`parallel.offload`); "" if it can."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay of matrices, times the learning rate."""
    clip_norm: float = Field(default=1.0, ge=0)
    """The gradient is scaled down to this norm; 0: never."""

    @field_validator("learning_rate", check_fields=False)
    @classmethod
    def _positive(cls, value: float) -> float:
        if value <= 0:  # a subclass may have a default of its own, without bounds
            raise ValueError("the learning rate must be greater than 0")
        return value

    def build(self, groups: ParameterGroups) -> torch.optim.Optimizer:
        """Return the torch optimizer of fp32 parameters.

        Args:
            groups: parameter groups, {"params": tensors or DTensors, "weight_decay": this group's}.
        """
        raise NotImplementedError

    def build_all(self, named: Sequence[Named]) -> list[torch.optim.Optimizer]:
        """Return the torch optimizers that share out fp32 parameters, with all state allocated.

        Args:
            named: the parameters on this rank by their names in the whole model; plain tensors or DTensors.
        """
        return [allocate(self.build(groups(named, self.weight_decay)), self.STATE)] if named else []

    def state_bytes(self, parameters: int, block_matrices: int) -> float:
        """Return the bytes of state that all ranks together keep.

        Args:
            parameters: of the whole model.
            block_matrices: those of them that are in the matrices of blocks.
        """
        return 4.0 * parameters * len([name for name in self.STATE if name != COUNT])

    def stored(self, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what a checkpoint holds of a state tensor: plain tensors or DTensors that share its memory, by name.

        Args:
            name: of the parameter and the state tensor, "output.weight.exp_avg".
            value: the state tensor.
        """
        return {name: value}


def moment_decays(betas: tuple[float, float]) -> tuple[float, float]:
    """Return `betas`; raise ValueError unless they are decays of moments."""
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError("betas must be in [0, 1)")
    return betas


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies: to matrices that are not a look-up table; not to norms and biases."""
    return parameter.ndim > 1 and not name.startswith("embedding.")


def groups(named: Iterable[Named], weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups of one weight decay and one device mesh each: list operations take one mesh at a time."""
    from torch.distributed.tensor import DTensor

    found: dict[tuple[float, Any], list[torch.Tensor]] = defaultdict(list)
    for name, parameter in named:
        decay = weight_decay if decays(name, parameter) else 0.0
        found[decay, parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    return [{"params": parameters, "weight_decay": decay} for (decay, _), parameters in found.items()]


def allocate(optimizer: torch.optim.Optimizer, state: Iterable[str]) -> torch.optim.Optimizer:
    """Give every parameter of `optimizer` the tensors named in `state`, zero, and return it; see `Optimizer.STATE`."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # a fused optimizer counts on the device, any other on the host
            device = parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
            for name in state:
                optimizer.state[parameter][name] = (
                    torch.zeros((), dtype=torch.float32, device=device) if name == COUNT
                    else torch.zeros_like(parameter))
    return optimizer
