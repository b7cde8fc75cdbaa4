"""Sum compressed gradients: residuals, slots, and the rounds of messages of each bucket.

A slot sends one compressed gradient a step. Outside reproducible mode that is a rank's gradient. In reproducible mode
it is that of a virtual rank, so what is compressed does not depend on the number of ranks.

    values = gradient + residual            # of each slot
    total  = Compression.sum(values)        # leaves in `values` what was not sent
    residual <- values                      # by `keep`, unless the update is withheld

The step before `keep` may still be repeated or withheld, and a checkpoint may be copying the residuals. So the new ones
are in memory of their own until then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tidewheel.errors import ConfigError
from tidewheel.parts import calling, name_of
from tidewheel.train.compression import At, Compression, Exchange, Message, Sum
from tidewheel.train.parallel.traffic import Traffic
from tidewheel.train.parallel.wire import Answer, Wire
from tidewheel.train.reproducible.gradient_order import GradientOrder

RESIDUAL = "residual"
"""Folder of a checkpoint's tensors that hold residuals, [slots, elements] each (`runtime.SUMMED`)."""


class Coded:
    """The compressed sums of a model's gradients.

    Args:
        compression: the part.
        named: (name, parameter) of all trained parameters.
        mesh: one-dimensional, the ranks; None: this rank alone.
        seed: of the run.
        traffic: counts bytes.
        order: of reproducible mode.

    Raises:
        ConfigError: no parameter is compressed.
    """

    def __init__(self, compression: Compression, named: Sequence[tuple[str, nn.Parameter]], mesh: DeviceMesh | None, *,
                 seed: int, traffic: Traffic, order: GradientOrder | None = None) -> None:
        ranks, rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
        own = 1 if order is None else order.virtual_ranks // ranks
        self.slots, self.all_slots = range(rank * own, (rank + 1) * own), own * ranks
        self._part, self._mesh, self._order, self._seed = compression, mesh, order, seed
        self._wire = Wire(None if mesh is None else mesh.get_group(), ranks, self.slots, traffic,
                          ordered=order is not None)
        self._count = torch.zeros((), dtype=torch.int64)
        with calling(compression):
            self._tensors = {parameter: _Coded(compression, name, parameter, own, seed) for name, parameter in named
                             if compression.takes(name, parameter.shape)}
        if not self._tensors:
            raise ConfigError(f"{name_of(type(compression))} compresses none of the {len(named)} parameters, such as "
                              f"{named[0][0]} {list(named[0][1].shape)}", where="compression",
                              fix="correct compression.only, lower compression.smallest, or leave compression out")
        self._rounds: list[_Round] = []

    def takes(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter's gradient is compressed."""
        return parameter in self._tensors

    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint, which share the memory: {"count", "residual/NAME", ...}."""
        tensors = {"count": self._count}
        for coded in self._tensors.values():
            if coded.residual is not None:
                tensors[f"{RESIDUAL}/{coded.name}"] = self._placed(coded.residual)
            for kept, value in coded.state.items():
                tensors[f"{kept}/{coded.name}"] = value
        return tensors

    def _placed(self, residual: torch.Tensor) -> torch.Tensor:
        if self._mesh is None:
            return residual
        return DTensor.from_local(residual, self._mesh, [Shard(0)], run_check=False)

    def residuals(self) -> Mapping[str, torch.Tensor]:
        """Return {name: fp32 [own slots, elements]}, what has not been sent."""
        return {coded.name: coded.residual for coded in self._tensors.values() if coded.residual is not None}

    # -- one step ------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Forget the messages of a step that was not finished."""
        self._rounds = []

    def add(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add the gradients of the current micro-batch to those of its virtual rank, in reproducible mode."""
        order = self._order
        assert order is not None
        row = order.leaf(order.member) - self.slots.start
        opens = order.number % order.parts == 0
        for parameter in parameters:
            values = self._tensors[parameter].values[row]
            if opens:
                values.copy_(_flat(parameter))
            else:
                values.add_(_flat(parameter))

    def send(self, parameters: Sequence[nn.Parameter]) -> None:
        """Compress a bucket of gradients and start to send them. All ranks send the same buckets in the same order."""
        exchanges = []
        for parameter in parameters:
            coded = self._tensors[parameter]
            if self._order is None:
                coded.values[0].copy_(_flat(parameter))
            if coded.residual is not None:
                coded.values.add_(coded.residual)
            coded.at = At(coded.name, tuple(parameter.shape), int(self._count), self._seed, self.slots, self.all_slots,
                          coded.state)
            exchange = _whole(coded.values) if coded.at.count < self._part.warmup_steps else self._part.sum(
                coded.values, coded.at)
            exchanges.append(self._wire.driven(exchange))
        with calling(self._part):
            self._rounds.append(_Round(self._wire, exchanges))

    def totals(self) -> Iterator[list[torch.Tensor]]:
        """Yield the sums of each bucket that was sent, [n] for each parameter.

        The messages of all buckets are under way at the same time.
        """
        rounds, self._rounds = self._rounds, []
        while any(not bucket.done for bucket in rounds):
            for bucket in rounds:
                with calling(self._part):
                    bucket.advance()
        for bucket in rounds:
            yield bucket.totals

    @torch.no_grad()
    def keep(self, skip: torch.Tensor | None) -> None:
        """Make the residuals of this step those of the next one, unless its update is withheld.

        Args:
            skip: scalar on the device; if it is not zero the residuals stay as they were.
        """
        for coded in self._tensors.values():
            pairs = [] if coded.residual is None else [(coded.residual, coded.values)]
            pairs += [(coded.state[name], value) for name, value in coded.new.items()]
            for old, new in pairs:
                old.copy_(new if skip is None else torch.where(skip.bool().to(new.device), old, new))
            coded.at = None
        self._count += 1


class _Coded:
    """What a rank keeps for one parameter."""

    def __init__(self, compression: Compression, name: str, parameter: nn.Parameter, slots: int, seed: int) -> None:
        self.name, device = name, parameter.device
        self.values = torch.zeros(slots, parameter.numel(), device=device)
        self.residual = torch.zeros_like(self.values) if compression.error_feedback else None
        self.state = {kept: value.to(device) for kept, value in compression.state(name, parameter.shape, seed).items()}
        self.at: At | None = None

    @property
    def new(self) -> dict[str, torch.Tensor]:
        """Return the new values of `state`."""
        return {} if self.at is None else self.at.new


class _Round:
    """The messages of a bucket's gradients, which take the same number of rounds on all ranks."""

    def __init__(self, wire: Wire, exchanges: Sequence[Exchange]) -> None:
        self._wire, self._exchanges = wire, list(exchanges)
        self._totals: dict[int, torch.Tensor] = {}
        self._waiting: list[tuple[int, Answer]] = []
        self._step(dict.fromkeys(range(len(self._exchanges))))

    @property
    def done(self) -> bool:
        """Return whether all sums are known."""
        return not self._waiting

    @property
    def totals(self) -> list[torch.Tensor]:
        """Return the sums, in the order of the exchanges."""
        return [self._totals[index] for index in range(len(self._exchanges))]

    def advance(self) -> None:
        """Wait for the answers to the messages under way, and start to send the next ones."""
        self._step({index: answer() for index, answer in self._waiting})

    @torch.no_grad()
    def _step(self, answers: Mapping[int, Any]) -> None:
        messages: list[tuple[int, Message]] = []
        for index, answer in answers.items():
            try:
                messages.append((index, self._exchanges[index].send(answer)))
            except StopIteration as end:
                self._totals[index] = end.value
        sent = self._wire.send([message for _, message in messages])
        self._waiting = [(index, answer) for (index, _), answer in zip(messages, sent)]


def _whole(values: torch.Tensor) -> Exchange:
    """Sum gradients without compression, in the steps of the warm-up."""
    total = yield Sum(values.clone())
    values.zero_()
    return total


def _flat(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.detach().reshape(-1)
