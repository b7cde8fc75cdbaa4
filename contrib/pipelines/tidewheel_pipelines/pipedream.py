"""PipeDream (https://arxiv.org/abs/1806.03377) and PipeDream-2BW: pipelines that never empty, with stashed weights.

Stage s of p runs p - 1 - s micro-batches ahead of its backward passes, also over the ends of steps. It updates its
weights as soon as it has the gradients, while other stages are at other micro-batches. A micro-batch's backward pass
has the weights of its forward pass, which are stashed meanwhile. Its gradient updates newer ones: it is stale.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field

import tidewheel as tw
from tidewheel_pipelines.weights import Versions


class PipeDream(tw.StageSchedule):
    """1F1B without flush and with weight stashing: experimental, to study what asynchronous pipelines gain and cost.

    A step makes several updates, each from as many micro-batches as `update_every` says. With 1, the gradients of stage
    s of p are p - 1 - s updates behind, and it keeps p - s versions of its weights.
    """

    update_every: int = Field(default=1, ge=1)
    """Micro-batches of an update. The last update of a step may have fewer."""

    def build(self, stage: tw.RunningStage) -> tw.Passes:
        return Unflushed(stage, update_every=self.update_every)


class PipeDream2BW(tw.StageSchedule):
    """1F1B without flush and with double-buffered weights (https://arxiv.org/abs/2006.09503): experimental.

    A step makes one update. All its micro-batches have, on all stages, the weights of before the previous update, so
    that gradients are one update behind and each stage keeps two versions.
    """

    def build(self, stage: tw.RunningStage) -> tw.Passes:
        return Unflushed(stage, update_every=None)


@dataclass
class _Forwarded:
    """A micro-batch whose backward pass is to come."""

    step: int
    ends_update: bool
    ends_step: bool
    terms: float
    rate: float
    version: int
    stream: torch.Tensor | None
    output: torch.Tensor
    gradient: torch.Tensor | None
    """Of the output, being received; None on the last stage."""
    arrives: Any


@dataclass
class Figures:
    """What a stage has measured."""

    delays: list[int] = field(default_factory=list)
    """Of each micro-batch: updates between the weights of its passes and those that its gradient updated."""
    waited: float = 0.0
    """Seconds of waiting for other stages."""
    forward: list[float] = field(default_factory=list)
    """CPU seconds of each forward pass."""
    backward: list[float] = field(default_factory=list)
    """CPU seconds of each backward pass."""
    update: list[float] = field(default_factory=list)
    """CPU seconds of each update, with what moves weights to new memory."""


class Unflushed(tw.Passes):
    """The passes of one stage.

    Args:
        stage: this rank's.
        update_every: micro-batches of an update; None: all of a step, with double-buffered weights.
    """

    def __init__(self, stage: tw.RunningStage, update_every: int | None) -> None:
        self._stage, self._every = stage, update_every
        self._ahead = stage.count - 1 - stage.index
        # activations and gradients travel in groups of their own, so that neither waits for the other
        self._back = dist.new_group(dist.get_process_group_ranks(stage.group))
        self.versions = Versions(stage.part)
        self._waiting: deque[_Forwarded] = deque()
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._began = 0  # updates before the last drain
        self._begun = 0  # updates that the steps so far lead to, with one for each step
        self._kept: int | None = None
        self._terms = 0.0
        self._squares: list[torch.Tensor] = []
        self._losses: list[torch.Tensor] = []
        self.figures = Figures()

    def start(self, step: int, micro_batches: Sequence[tw.MicroBatch], rate: float) -> None:
        stage, count = self._stage, len(micro_batches)
        every = self._every or count
        if not self._waiting and self._kept is None:
            self.versions.refresh()  # a checkpoint may have been loaded
        shown = max(self._begun - 1, self._began)  # the version of before the previous step's update
        self._begun += 1
        arriving: Any = None
        for number, micro in enumerate(micro_batches):
            stream, arrives = arriving or self._receive(micro)
            arriving = self._receive(micro_batches[number + 1]) if number + 1 < count else None
            self._wait(arrives)
            if stream is not None:
                stream.requires_grad_(True)
            version = shown if self._every is None else self.versions.newest
            self.versions.take(version)
            began = time.thread_time()
            with self.versions.of(version):
                output = stage.forward(micro, stream)
            self.figures.forward.append(time.thread_time() - began)
            gradient, arrives = None, None
            if not stage.last:
                self._send(output.detach(), stage.group, stage.index + 1)
                gradient = torch.empty_like(output)
                arrives = dist.irecv(gradient, group=self._back, group_src=stage.index + 1)
            ends_step = number == count - 1
            self._waiting.append(_Forwarded(step, ends_step or (number + 1) % every == 0, ends_step,
                                            float(stage.objective.count(micro)), rate, version, stream, output,
                                            gradient, arrives))
            if len(self._waiting) > self._ahead:
                self._backward()

    def drain(self) -> None:
        while self._waiting:
            self._backward()
        while self._sent:
            self._sent.popleft()[0].wait()
        self._keep(None)  # the next step begins with the newest weights
        self._began = self._begun = self.versions.newest

    def _keep(self, version: int | None) -> None:
        """Keep a version for micro-batches to come, in the place of the one that was kept."""
        if version is not None:
            self.versions.take(version)
        if self._kept is not None:
            self.versions.give_back(self._kept)
        self._kept = version

    def _receive(self, micro: tw.MicroBatch) -> tuple[torch.Tensor | None, Any]:
        """Begin to receive the output of the stage before."""
        stage = self._stage
        if stage.first:
            return None, None
        stream = stage.stream(micro)
        return stream, dist.irecv(stream, group=stage.group, group_src=stage.index - 1)

    def _send(self, values: torch.Tensor, group: Any, to: int) -> None:
        values = values.contiguous()
        self._sent.append((dist.isend(values, group=group, group_dst=to), values))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def _wait(self, work: Any) -> None:
        if work is not None:
            began = time.perf_counter()
            work.wait()
            self.figures.waited += time.perf_counter() - began

    def _backward(self) -> None:
        """Take the oldest micro-batch back through the stage, and update the weights if its gradient was the last."""
        stage, micro = self._stage, self._waiting.popleft()
        self._wait(micro.arrives)
        output = micro.output
        if stage.last:
            self._losses.append(output.detach())
        began = time.thread_time()
        with self.versions.of(micro.version):  # also for what recomputes activations
            torch.autograd.backward(output, micro.gradient)
        self.figures.backward.append(time.thread_time() - began)
        if micro.stream is not None:
            assert micro.stream.grad is not None
            self._send(micro.stream.grad, self._back, stage.index - 1)
        self.versions.add_gradients(micro.version)
        self.figures.delays.append(self.versions.newest - micro.version)
        self._terms += micro.terms
        self.versions.give_back(micro.version)
        if micro.ends_update:
            self._update(micro)

    def _update(self, last: _Forwarded) -> None:
        stage, terms, began = self._stage, max(self._terms, 1.0), time.thread_time()
        gradients = [parameter.grad for parameter in stage.part.parameters() if parameter.grad is not None]
        norms = torch._foreach_norm(gradients)
        self._squares.append(torch.stack(norms).double().square().sum() / terms**2)
        if self._every is None:
            self._keep(self.versions.newest)
        self.versions.before_update()
        stage.optimizer.set_learning_rate(last.rate)
        stage.optimizer.step(factor=torch.tensor(1 / terms, dtype=torch.float64, device=stage.device))
        for parameter in stage.part.parameters():
            parameter.grad = None
        self.versions.after_update()
        self._terms = 0.0
        self.figures.update.append(time.thread_time() - began)
        if last.ends_step:
            losses, squares, self._losses, self._squares = self._losses, self._squares, [], []
            stage.done(last.step, losses, torch.stack(squares).mean())
