"""The averages of one worker's parameters: kept beside the optimizer's state, and put in the parameters' place."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tidewheel.parts import Part, as_json, calling, name_of
from tidewheel.train.average import Average
from tidewheel.train.callback import Callback
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.model_optimizer import ModelOptimizer
from tidewheel.train.optimizers.rules.on_device import local
from tidewheel.train.parallel import ParallelModel


@dataclass
class Kept:
    """One average."""

    part: Average
    tensors: list[list[torch.Tensor]]
    """The average of each parameter, then the further tensors, fp32 and placed like the parameters."""
    since: int = 0
    """Step at which it began."""

    def takes(self, step: int) -> bool:
        """Return whether it takes the parameters in after this step."""
        return self.part.taken(self.since, step) > self.part.taken(self.since, step - 1)


class Averages:
    """The averages of a run's configuration.

    Args:
        config: the run's settings.
        optimizer: has the parameters as it updates them, in fp32, and may itself keep an average.
        model: evaluated with the averages in the place of its parameters.
    """

    def __init__(self, config: TrainConfig, optimizer: ModelOptimizer, model: ParallelModel) -> None:
        self._weights, self._model, rule = optimizer.named, model, config.optimizer
        callbacks = config.callbacks
        self._of_optimizer = {short_name(rule): optimizer.state_tensors(rule.AVERAGE)} if rule.AVERAGE else {}
        self._key = rule.AVERAGE
        self._kept = {name: Kept(part, [self._like_weights() for _ in range(1 + part.others)])
                      for name, part in named(callbacks).items()}

    def _like_weights(self) -> list[torch.Tensor]:
        return [torch.zeros_like(weight, dtype=torch.float32).detach() for _, weight in self._weights]

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors for a checkpoint, {"ema/blocks.0.norm.weight": average, "lawa.1/...": ..., ...}."""
        tensors: dict[str, torch.Tensor] = {}
        for name, kept in self._kept.items():
            for number, values in enumerate(kept.tensors):
                group = f"{name}.{number}" if number else name
                tensors |= {f"{group}/{weight}": value for (weight, _), value in zip(self._weights, values)}
        return tensors

    def extra(self) -> dict[str, Any]:
        """Return the JSON values for a checkpoint: since when each is kept, and its settings."""
        kept = {name: {"since": kept.since, "settings": as_json(kept.part)} for name, kept in self._kept.items()}
        return {**kept, **{name: {"optimizer": self._key} for name in self._of_optimizer}}

    @torch.no_grad()
    def begin(self, step: int, saved: Mapping[str, Any] | None = None) -> list[str]:
        """Begin the averages at a step whose parameters are set; return the names of those that begin anew.

        Args:
            step: the last step done.
            saved: `extra` of the checkpoint whose tensors were loaded. Averages that it holds with the same settings
                go on.
        """
        begun = []
        for name, kept in self._kept.items():
            before = (saved or {}).get(name)
            if before is not None and before["settings"] == as_json(kept.part):
                kept.since = int(before["since"])
                continue
            begun.append(name)
            kept.since = step
            for values in kept.tensors:
                self._copy(values)
        return begun

    def _copy(self, values: list[torch.Tensor]) -> None:
        for value, (_, weight) in zip(values, self._weights):
            local(value).copy_(local(weight))

    @torch.no_grad()
    def take(self, step: int) -> None:
        """Take the parameters of a step in, where that is due. Enqueue it before the next step changes them."""
        due = [kept for kept in self._kept.values() if kept.takes(step)]
        if not due:
            return
        weights = [local(weight) for _, weight in self._weights]
        for kept in due:
            average, *others = [[local(value) for value in values] for values in kept.tensors]
            with calling(kept.part):
                kept.part.take(average, others, weights, kept.part.taken(kept.since, step) - 1)

    def names(self, step: int) -> list[str]:
        """Return the names of the averages that have taken parameters in up to this step."""
        kept = [name for name, kept in self._kept.items() if kept.part.taken(kept.since, step)]
        return [*kept, *(self._of_optimizer if step else ())]

    @contextlib.contextmanager
    def in_place(self, name: str) -> Iterator[None]:
        """Put an average in the place of the model's parameters inside the block, and these back after it.

        All ranks call it together. It takes a copy of this rank's part of the parameters.
        """
        parameters = [parameter for _, parameter in self._model.named_parameters()]
        before = [local(parameter).clone() for parameter in parameters]
        values = self._of_optimizer[name] if name in self._of_optimizer else self._kept[name].tensors[0]
        self._set(parameters, [local(value) for value in values])
        try:
            yield
        finally:
            self._set(parameters, before)

    @torch.no_grad()
    def _set(self, parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        for parameter, value in zip(parameters, values):
            local(parameter).copy_(value)
        self._model.refresh()


def short_name(part: Part) -> str:
    """Return the name of a part without its module, "ema"."""
    return name_of(type(part)).rpartition(":")[2].lower()


def named(callbacks: Sequence[Callback]) -> dict[str, Average]:
    """Return the averages among callbacks, by the names that checkpoints and metrics give them: "ema", "ema_2".

    Args:
        callbacks: of a configuration.
    """
    averages: dict[str, Average] = {}
    numbers: Counter[str] = Counter()
    for part in callbacks:
        if not isinstance(part, Average):
            continue
        kind = short_name(part)
        numbers[kind] += 1
        averages[kind if numbers[kind] == 1 else f"{kind}_{numbers[kind]}"] = part
    return averages
