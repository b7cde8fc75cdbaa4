"""One optimizer for a whole model, whatever it is made of, and its state in a form that can be saved and resharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from tidewheel.errors import ConfigError
from tidewheel.train.optim.base import COUNT, Named

Stored = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
"""From the name and value of a state tensor to the plain tensors that a checkpoint holds of it."""


def as_it_is(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """A state tensor that is plain already."""
    return {name: value}


class ModelOptimizer:
    """Torch optimizers that share out a model's parameters; all state is there before the first step.

    Args:
        named: the parameters by their names in the whole model; plain tensors or DTensors.
        parts: every parameter belongs to one of them.
        stored: how a checkpoint holds their state.
    """

    def __init__(self, named: Iterable[Named], parts: Sequence[torch.optim.Optimizer],
                 stored: Stored = as_it_is) -> None:
        self.parts = list(parts)
        self.named = list(named)
        self._stored = stored
        self._keys = {name: set(self._state(parameter)) for name, parameter in self.named}

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return float(self.parts[0].param_groups[0]["lr"])

    def set_learning_rate(self, rate: float) -> None:
        """For the next step."""
        for part in self.parts:
            for group in part.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def step(self, skip: torch.Tensor | None = None) -> None:
        """Update the parameters, unless `skip` (a scalar on their device) is not zero.

        A fused optimizer looks at `skip` on the device; for any other the host waits for it.
        """
        if skip is not None and not self.skips_on_device and bool(skip):
            return
        for part in self.parts:
            if self.skips_on_device and skip is not None:
                part.grad_scale, part.found_inf = None, skip.float()  # type: ignore[attr-defined]
            part.step()

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` can skip an update without the host waiting for the device."""
        return all(group.get("fused") for part in self.parts for group in part.param_groups)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state for a checkpoint: {"name.exp_avg": tensor placed like the parameter, ..., "step": updates
        done}. They share memory with the state: fill them, then call `restored`.

        Raises:
            ConfigError: an update has made state that was not there before the first one.
        """
        found: dict[str, torch.Tensor] = {}
        counts = self._counts()
        if counts:
            found[COUNT] = counts[0]
        for name, parameter in self.named:
            state = self._state(parameter)
            _as_declared(name, state, self._keys[name])
            for key, value in state.items():
                if key != COUNT:
                    found |= self._stored(f"{name}.{key}", value)
        return found

    def started(self) -> None:
        """The parameters were given their initial values."""

    def restored(self) -> None:
        """The tensors of `tensors` were filled: tell all parameters how many updates there were."""
        counts = self._counts()
        for count in counts[1:]:
            count.copy_(counts[0])

    def _counts(self) -> list[torch.Tensor]:
        """The counter of updates of each parameter that has one; they are equal."""
        held = [self._state(parameter) for _, parameter in self.named]
        return [state[COUNT] for state in held if COUNT in state]

    def _state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return next((part.state[parameter] for part in self.parts if parameter in part.state), {})


def _as_declared(name: str, state: dict[str, torch.Tensor], declared: set[str]) -> None:
    """Raise ConfigError unless the state of the parameter `name` is the tensors that were there before any update."""
    wrong = sorted(key for key, value in state.items() if key not in declared or not isinstance(value, torch.Tensor))
    if wrong:
        raise ConfigError(f"the optimizer keeps {', '.join(wrong)} of {name}, which a checkpoint would not hold",
                          where="optimizer.kind", mend="name in STATE the tensors that it keeps for each parameter; "
                          "they are there, zero, before the first update, and stay tensors")
