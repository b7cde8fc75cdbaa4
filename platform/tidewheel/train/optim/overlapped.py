"""Updates of offloaded parameters by a thread, while the backward pass goes on.

A layer's update begins when its gradient is final: summed over the micro-batches and over ranks, and in host memory. It
is the update that would follow the backward pass, so no bit changes. What an update needs of the whole gradient must
not matter: no norm clips it, and nothing withholds it (`overlapped_config`). The number of targets, which divides the
gradient, is summed over ranks before the passes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from tidewheel.daemon import DaemonThread
from tidewheel.train.optim.model_optimizer import ModelOptimizer, local_gradients


class Announces(Protocol):
    """Data parallelism that says when gradients are final."""

    def announce(self, to: OverlappedUpdate) -> None:
        """Call `to.ready` for each group of parameters in the backward pass of the last micro-batch of a step."""


class OverlappedUpdate:
    """The updates of one optimizer.

    Args:
        optimizer: updates the parameters.
        data: the data parallelism of the model's parts.

    Attributes:
        busy: seconds of the last step in which the thread updated parameters.
        waited: seconds of the last step in which `finish` waited for the thread.
        during: parameters of the last step that were given to the thread before its passes had ended.
    """

    def __init__(self, optimizer: ModelOptimizer, data: Iterable[Announces]) -> None:
        self._optimizer = optimizer
        self._thread = DaemonThread("updates")
        self._factor: torch.Tensor | None = None
        self._under_way: list[Future[None]] = []
        self._given: set[torch.Tensor] = set()
        self._norms: dict[torch.Tensor, torch.Tensor] = {}
        self.busy = self.waited = 0.0
        self.during = 0
        for part in data:
            part.announce(self)

    def begin(self, factor: torch.Tensor) -> None:
        """Update parameters from now on as soon as they are ready.

        Args:
            factor: of the gradients.
        """
        self._factor = factor.cpu()
        self._norms.clear()
        self._given.clear()
        self.busy = 0.0

    def ready(self, parameters: Sequence[torch.Tensor], events: Sequence[Any] = ()) -> None:
        """Update parameters whose gradients are final. Between two steps it does nothing.

        Args:
            parameters: some of the optimizer's; a second call for the same ones does nothing.
            events: the gradients are in host memory when they have happened.
        """
        if self._factor is None:
            return
        chosen = [parameter for parameter in parameters if parameter.grad is not None and parameter not in self._given]
        self._given.update(chosen)
        if chosen:
            self._under_way.append(self._thread.submit(self._update, chosen, list(events), self._factor))

    def finish(self) -> Mapping[torch.Tensor, torch.Tensor]:
        """Wait until all parameters are updated; return the norm of this rank's part of each one's gradient, fp32.

        The gradients themselves are changed by then.
        """
        self.during = len(self._given)
        self.ready([parameter for _, parameter in self._optimizer.updated_by_gradient()])
        began = time.perf_counter()
        under_way, self._under_way = self._under_way, []
        self._factor = None
        for update in under_way:
            update.result()
        self.waited = time.perf_counter() - began
        return self._norms

    def close(self) -> None:
        """End the thread. Updates that have not begun are dropped, as after a failure in the passes."""
        self._thread.stop(wait=False)

    @torch.no_grad()
    def _update(self, parameters: Sequence[torch.Tensor], events: Sequence[Any], factor: torch.Tensor) -> None:
        for event in events:
            event.synchronize()
        began = time.perf_counter()
        gradients = local_gradients(parameters)
        held = [(parameter, gradient) for parameter, gradient in zip(parameters, gradients) if gradient.numel()]
        norms = torch._foreach_norm([gradient for _, gradient in held]) if held else ()
        for (parameter, _), norm in zip(held, norms):
            self._norms[parameter] = norm
        self._optimizer.update(parameters, factor)
        self.busy += time.perf_counter() - began


def overlap(optimizer: ModelOptimizer, data: Iterable[Announces]) -> OverlappedUpdate:
    """Update an optimizer's parameters during the backward pass from now on.

    Args:
        optimizer: updates the parameters.
        data: the data parallelism of the model's parts.
    """
    optimizer.overlapped = OverlappedUpdate(optimizer, data)
    return optimizer.overlapped
