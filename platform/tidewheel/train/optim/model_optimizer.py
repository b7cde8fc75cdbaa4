"""The optimizer of a whole model: one or more torch optimizers, with state that can be saved and resharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from tidewheel.errors import ConfigError
from tidewheel.train.optim.base import COUNT, Named
from tidewheel.train.optim.disk_state import DiskState
from tidewheel.train.optim.some_parameters import only

if TYPE_CHECKING:
    from tidewheel.train.optim.overlapped import OverlappedUpdate

Stored = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
"""From the name and value of a state tensor to {name: plain tensor} in a checkpoint."""


def unchanged(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the checkpoint's form of a state tensor that is plain already."""
    return {name: value}


class ModelOptimizer:
    """The torch optimizers of a model's parameters. All state exists before the first step.

    Args:
        named: (name in the whole model, tensor or DTensor) of each parameter.
        parts: torch optimizers; every parameter belongs to one of them.
        stored: converts a state tensor to the form in a checkpoint.

    Attributes:
        disk: the file that holds the state; None: it is in memory.
        overlapped: updates parameters during the backward pass, see `overlapped.overlap`; None: `step` does.
    """

    disk: DiskState | None = None
    overlapped: OverlappedUpdate | None = None

    def __init__(self, named: Iterable[Named], parts: Sequence[torch.optim.Optimizer],
                 stored: Stored = unchanged) -> None:
        self.parts = list(parts)
        self.named = list(named)
        self._stored = stored
        self._keys = {name: set(self._state(parameter)) for name, parameter in self.named}

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return float(self.parts[0].param_groups[0]["lr"])

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""
        for part in self.parts:
            for group in part.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def step(self, skip: torch.Tensor | None = None, factor: torch.Tensor | None = None) -> None:
        """Update the parameters with `factor` times their gradients.

        A fused optimizer reads both arguments on the device and multiplies in its own kernel. For any other, the
        gradients are multiplied before, and the host waits for `skip`.

        Args:
            skip: scalar on the device of the parameters; if it is not zero there is no update.
            factor: scalar on the device of the parameters; None: 1.
        """
        unfused = [part for part in self.parts if not is_fused(part)]
        if unfused and skip is not None and bool(skip):
            return
        if factor is not None:
            multiply(unfused, factor)
        for part in self.parts:
            if is_fused(part):  # torch.amp.GradScaler sets the same attributes
                part.grad_scale = None if factor is None else factor.reciprocal().float()  # type: ignore[attr-defined]
                part.found_inf = None if skip is None else skip.float()  # type: ignore[attr-defined]
            if self.disk is None:
                part.step()
            else:
                self.disk.step(part, self._updated)
        if self.disk is not None:
            self.disk.read_ahead()

    def updated_by_gradient(self) -> list[Named]:
        """Return (name, parameter) of those whose gradients `update` takes."""
        return self.named

    def update(self, parameters: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
        """Update some parameters alone, with `factor` times their gradients, as `step` would.

        Args:
            parameters: some of `updated_by_gradient`, in host memory.
            factor: scalar in host memory.
        """
        chosen = set(map(id, parameters))
        for part in self.parts:
            with only(part, chosen):
                if part.param_groups:
                    multiply([part], factor)
                    part.step()

    def _updated(self, parameters: Sequence[torch.Tensor]) -> None:
        """Handle that parameters were updated, while their state is in memory. Called with state on disk."""

    def move_to_disk(self, folder: Path) -> None:
        """Keep the state in a file on a local disk from now on, see `DiskState`.

        Raises:
            StorageError: the disk has not enough space.
        """
        self.disk = DiskState(folder, self.parts)

    def take_curvature(self, targets: float) -> None:
        """Give the gradients of drawn labels to the optimizers, see `Optimizer.curvature_every`."""
        for part in self.parts:
            part.take_curvature(targets)  # type: ignore[attr-defined]

    @property
    def skips_on_device(self) -> bool:
        """Return whether `step` can skip an update without synchronising the host with the device."""
        return all(is_fused(part) for part in self.parts)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state for a checkpoint: {"name.exp_avg": tensor placed like the parameter, "step": updates, ...}.

        The tensors share memory with the state. To restore a checkpoint, fill them and call `restored`.

        Raises:
            ConfigError: an update has created state that did not exist before the first one.
        """
        if self.disk is not None:
            self.disk.forget()
        tensors: dict[str, torch.Tensor] = {}
        counts = self._counts()
        if counts:
            tensors[COUNT] = counts[0]
        for name, parameter in self.named:
            state = self._state(parameter)
            _check_state(name, state, self._keys[name])
            for key, value in state.items():
                if key != COUNT:
                    tensors |= self._stored(f"{name}.{key}", value)
        return tensors

    def state_tensors(self, key: str) -> list[torch.Tensor]:
        """Return the state tensor `key` of each parameter, in the order of `named`."""
        return [self._state(parameter)[key] for _, parameter in self.named]

    def started(self) -> None:
        """Handle that the parameters have been initialised."""

    def close(self) -> None:
        """End the thread that updates during the backward pass, if there is one."""
        if self.overlapped is not None:
            self.overlapped.close()

    def restored(self) -> None:
        """Copy the restored number of updates to all parameters, after `tensors` were filled."""
        counts = self._counts()
        for count in counts[1:]:
            count.copy_(counts[0])

    def _counts(self) -> list[torch.Tensor]:
        """Return the counters of updates of all parameters that have one; they are equal."""
        states = [self._state(parameter) for _, parameter in self.named]
        return [state[COUNT] for state in states if COUNT in state]

    def _state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return next((part.state[parameter] for part in self.parts if parameter in part.state), {})


def is_fused(part: torch.optim.Optimizer) -> bool:
    """Return whether a torch optimizer takes `grad_scale` and `found_inf` on the device, as torch's fused ones do."""
    return bool(getattr(part, "_step_supports_amp_scaling", False))


def multiply(parts: Sequence[torch.optim.Optimizer], factor: torch.Tensor) -> None:
    """Multiply the gradients of the parameters of `parts`, in place: one pass that reads and writes all of them."""
    here = local_gradients(parameter for part in parts for group in part.param_groups for parameter in group["params"])
    if here:
        torch._foreach_mul_(here, factor.to(here[0].device, here[0].dtype))


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's part of the gradient of each parameter that has one."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def _check_state(name: str, state: dict[str, torch.Tensor], declared: set[str]) -> None:
    """Raise ConfigError if the state of the parameter `name` has tensors that did not exist before the first update."""
    wrong = sorted(key for key, value in state.items() if key not in declared or not isinstance(value, torch.Tensor))
    if wrong:
        raise ConfigError(f"the optimizer keeps {', '.join(wrong)} of {name}, which a checkpoint would not hold",
                          where="optimizer.kind", fix="name in STATE the tensors that it keeps for each parameter; "
                          "they are there, zero, before the first update, and stay tensors")
