"""Train a group of a DiLoCo run again, undisturbed and alone, with the outer states that the record says it took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.chaos.rounds import Rounds, Take, sends_after
from tidewheel import storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.staging import local
from tidewheel.outer import quantise
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.outer_exchange import OuterExchange
from tidewheel.train.runtime import Runtime
from tidewheel.train.training import Training


class Recorded(OuterExchange):
    """Takes the recorded outer states after the recorded steps, and compares what the group sent with what it would.

    Args:
        training: of one process.
        rounds: the record.
        takes: of the group.
        compare: whether its outer gradients must have the same bits.
    """

    def __init__(self, training: Training, rounds: Rounds, takes: list[Take], *, compare: bool) -> None:
        assert training.config.outer is not None
        self._config, self._steps = training.config.outer, training.config.steps
        self._model, self._named = training.model, list(training.optimizer.named)
        self._rounds, self._takes, self._compare = rounds, list(takes), compare
        self._last: Take | None = None
        self._send: int | None = None
        self._base: dict[str, torch.Tensor] = {}
        self._residuals = {name: torch.zeros_like(local(weight)) for name, weight in self._named}
        self.compared = 0
        """Outer gradients that were compared."""

    def restore(self, saved: list[dict[str, Any]]) -> None:
        raise AssertionError("a replay trains from the first step on")

    def begin(self, step: int) -> None:
        assert step == 0, "a replay trains from the first step on"

    def is_due(self, step: int) -> bool:
        return self._send == step or (bool(self._takes) and self._takes[0].step == step)

    def meet(self, step: int, ask: Callable[[], int]) -> int:
        if self._send == step:
            self._send = None
            self._offer(step)
            return 0
        take = self._takes.pop(0)
        state = self._rounds.states[take.round]
        merge = self._config.merge if 0 <= take.sent < step else 0.0
        with torch.no_grad():
            for name, weight in self._named:
                base = torch.from_numpy(state[f"model/{name}"]).clone()
                self._base[name] = base
                part = local(weight)
                part.copy_(base if not merge else base + (part - base) * merge)
                if take.sent < 0:
                    self._residuals[name].zero_()
        self._model.refresh()
        self._last = take
        self._send = sends_after(take, self._config, self._steps)
        return 0

    @torch.no_grad()
    def _offer(self, step: int) -> None:
        """Compare the outer gradient with the one that the group sent, if the round was decided with it."""
        assert self._last is not None
        number, config = self._last.round + 1, self._config
        ours: dict[str, torch.Tensor] = {}
        for name, weight in self._named:
            part = local(weight)
            gradient = part if config.averages_weights else self._base[name] - part
            if config.error_feedback:
                gradient = gradient + self._residuals[name]
            encoded = quantise.encode(gradient, config.quantise)
            ours |= {f"{kind}/{name}": tensor.clone() for kind, tensor in encoded.items()}
            if config.error_feedback:
                width = part.shape[-1] if part.ndim else 1
                self._residuals[name] = gradient - quantise.decode(encoded, config.quantise, width)
        if not self._compare or config.group not in self._rounds.members(number):
            return
        sent, self.compared = self._rounds.offer(number, config.group), self.compared + 1
        different = [name for name, tensor in ours.items() if not torch.equal(tensor, sent[name])]
        if different:
            self._rounds.problems.append(f"group {config.group} sent another {different[0]} after step {step} in round "
                                         f"{number} than the replay")

    def tensors(self) -> dict[str, torch.Tensor]:
        held = self._residuals if self._config.error_feedback else {}
        return {f"residual/{name}": tensor for name, tensor in held.items()}

    def state(self) -> list[dict[str, Any]]:
        return []

    def base(self) -> int:
        return 0 if self._last is None else self._last.round

    def figures(self) -> dict[str, float]:
        return {}


def replay(config: TrainConfig, rounds: Rounds, takes: list[Take]) -> int:
    """Train a group with recorded outcomes as the run of `config`; return how many outer gradients were compared."""
    exchanges: list[Recorded] = []

    def open_(training: Training) -> Recorded:
        exchanges.append(Recorded(training, rounds, takes, compare=config.reproducible))
        return exchanges[-1]

    manager = CheckpointManager(storage.store(config.run_uri).child("checkpoints"), asynchronous=False)
    train(config, Runtime(checkpoints=manager, outer=open_))
    return exchanges[0].compared
