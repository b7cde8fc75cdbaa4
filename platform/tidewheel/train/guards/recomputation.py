"""Find silent corruption: compute a sampled step twice, on different workers, and compare the bits.

In reproducible mode a micro-batch's gradient has the same bits on every worker. In a sampled step each worker first
computes the micro-batches of another one, which it reads itself, and then its own. While a gradient is still that of
one micro-batch, a digest of it is taken. The parameters change only after the digests of all workers agree.

1. All ranks add up the digests of the first pass and subtract those of the second: a single small sum, which is zero
   if they agree. So nothing grows with the number of workers while nothing is wrong.
2. The same sum says whether the reduced gradients of the two passes agree, and whether the copies of weights and
   optimizer state that ranks hold do.
3. On a difference, the workers tell each other all digests. For a gradient they compute twice more: each its own
   micro-batches, then those of a third worker. `verdict` names the rank.

The step after one whose update was withheld is checked too: a number that is not finite may be a wrong bit.

A state is known good if it is that before a step whose check has passed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tidewheel.train.guards import digest, sampling
from tidewheel.train.guards.digest import GradientDigests
from tidewheel.train.guards.policy import Guard
from tidewheel.train.guards.replicas import Replicas
from tidewheel.train.guards.verdict import Finding, SilentCorruptionError, of_computations
from tidewheel.train.parallel import local
from tidewheel.train.step import MicroBatch, find_gradients
from tidewheel.train.training import Training

logger = logging.getLogger(__name__)
NODE_BYTES = 64
"""Length of a node's name, as ranks tell it each other."""


@dataclass(frozen=True)
class Computed:
    """What one pass over micro-batches came to on this rank."""

    data: dict[int, int]
    """Digest of each micro-batch."""
    gradients: dict[int, int]
    """Digest of each micro-batch's gradient, before it was added to others."""
    reduced: int
    """Digest of this rank's part of the sum over all micro-batches."""


class Recomputation:
    """Checks the sampled steps of one worker. All ranks make the same calls.

    Args:
        training: this worker's share of the run.
        guard: judges the steps. Its counts are the same on all ranks.
    """

    def __init__(self, training: Training, guard: Guard) -> None:
        self._training, self._config, self._guard = training, training.config.guards.recomputation, guard
        self._names: list[str] = []
        self._nodes: list[int] = []
        if self._config is not None:
            self._replicas = Replicas.of(training.config, training.model, training.optimizer)
            self._meet()

    def is_due(self, step: int) -> bool:
        """Return whether a step is checked.

        Args:
            step: counts from 1.
        """
        if self._config is None:
            return False
        return self._guard.in_a_row > 0 or sampling.is_sampled(self._training.config.seed, step, self._config.share)

    def before(self, step: int, micro_batches: Sequence[MicroBatch], settle: Callable[[], None]) -> Callable[[], None]:
        """Compute a checked step's gradient for the first time, before `start_step` does; return its `before_update`.

        Args:
            step: counts from 1.
            micro_batches: of this rank.
            settle: what has to come before an update as well.
        """
        training = self._training
        if not self.is_due(step):
            return settle
        order = training.model.order
        assert order is not None, "the configuration is refused outside reproducible mode"
        moved = sampling.shift(training.config.seed, step, self._nodes)
        again = self._computed(step, moved)
        own = order.tap = GradientDigests()

        def check() -> None:
            order.tap = None
            self._check(step, moved, self._result(micro_batches, own), again)
            settle()

        return check

    # -- computing -----------------------------------------------------------------------------------
    def _computed(self, step: int, moved: int) -> Computed:
        """Compute the micro-batches of the data rank `moved` ranks further, read anew from the shard set."""
        training, config = self._training, self._training.config
        order = training.model.order
        assert order is not None
        with training.model.standing_in(moved) as share:
            micro_batches = training.reader.read_for(step, share)
            order.tap = taken = GradientDigests()
            try:
                find_gradients(training.model, micro_batches, training.device, config.precision, training.loss_scale)
            finally:
                order.tap = None
            return self._result(micro_batches, taken)

    def _result(self, micro_batches: Sequence[MicroBatch], taken: GradientDigests) -> Computed:
        model = self._training.model
        numbers = model.share.of(len(micro_batches) * model.mesh.data_size)
        parts = [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
        held = [part for part in parts if part.numel()]
        return Computed({number: digest.of_batch(micro) for number, micro in zip(numbers, micro_batches)}, taken.read(),
                        int(digest.digest(held)) if held else 0)

    # -- comparing -----------------------------------------------------------------------------------
    def _check(self, step: int, moved: int, own: Computed, again: Computed) -> None:
        """Compare the passes of all ranks.

        Raises:
            SilentCorruptionError: they differ.
        """
        training = self._training
        place = self._place
        sums = [mine - other for of_pass in ("data", "gradients")
                for mine, other in zip(digest.halves(getattr(own, of_pass), place),
                                       digest.halves(getattr(again, of_pass), place))]
        sums.append(float(own.reduced != again.reduced))
        collectives = training.collectives
        report = torch.cat((collectives.to_device(torch.tensor(sums, dtype=torch.float64)),
                            self._replicas.differ(collectives.device)))
        *passes, reduced, copies = collectives.to_host(collectives.sum(report)).tolist()
        if not any((*passes, reduced, copies)):
            training.progress.verified = step - 1
            return
        findings = self._wrong_copies() if copies else []
        if any(passes) and not findings:
            findings = self._wrong_passes(step, moved, own, again)
        if reduced and not findings:
            findings = self._wrong_sums(own.reduced, again.reduced)
        self._end(step, findings)

    @property
    def _place(self) -> int:
        """Return a number for this rank's part of a micro-batch's gradient: stage, positions and tensor shard."""
        return self._training.model.mesh.coordinate("pipeline", "context", "tensor")

    def _wrong_copies(self) -> list[Finding]:
        keys = [int(key) for key in self._gathered(torch.tensor([self._replicas.key]))]
        return self._replicas.findings(keys, self._gathered(self._replicas.digests()))

    def _wrong_passes(self, step: int, moved: int, own: Computed, again: Computed) -> list[Finding]:
        """Compute each micro-batch on its own worker again and on a third one, and compare all passes of all ranks."""
        third = sampling.shift(self._training.config.seed, step, self._nodes, avoided=(moved,))
        passes = [own, again, self._computed(step, 0)]
        if third:
            passes.append(self._computed(step, third))
        findings = []
        for place, name in (("data", "data"), ("gradient", "gradients")):
            values = [[self._place, *pair] for of_pass in passes for pair in getattr(of_pass, name).items()]
            found: dict[tuple[int, int], list[tuple[int, int]]] = {}
            for rank, rows in enumerate(self._gathered(torch.tensor(values, dtype=torch.int64)).tolist()):
                for part, micro, value in rows:
                    found.setdefault((part, micro), []).append((rank, value))
            findings.append(of_computations(place, found))
        return [finding for finding in findings if finding is not None][:1]  # other data have another gradient

    def _wrong_sums(self, own: int, again: int) -> list[Finding]:
        """Return the ranks on which only the sum over micro-batches differs, if they are fewer than half."""
        pairs = self._gathered(torch.tensor([own, again])).tolist()
        wrong = [rank for rank, (first, second) in enumerate(pairs) if first != second]
        certain = 2 * len(wrong) < len(pairs)
        return [Finding("reduction", tuple(wrong), certain, {str(rank): pairs[rank] for rank in wrong})]

    # -- telling -------------------------------------------------------------------------------------
    def _end(self, step: int, findings: Sequence[Finding]) -> None:
        """Record what was found, and end this generation on all ranks.

        Raises:
            SilentCorruptionError: always.
        """
        training = self._training
        good = training.progress.verified
        ranks = sorted({rank for finding in findings for rank in finding.ranks})
        text = "; ".join(f"{finding.place} of {finding.text}" for finding in findings)
        detail = {"step": step, "since": good + 1, "back_to": good, "what": text, "ranks": ranks,
                  "nodes": sorted({self._names[rank] for rank in ranks}),
                  "found": [{"place": finding.place, "ranks": list(finding.ranks), "certain": finding.certain,
                             "evidence": dict(finding.evidence)} for finding in findings]}
        if training.leads:
            training.retry(lambda: training.runtime.checkpoints.distrust(good, detail))
            training.event("corruption", **detail)
        training.collectives.from_first(1)  # nobody leaves before the later checkpoints are known to be suspect
        raise SilentCorruptionError(
            f"silent corruption at step {step}, since step {good + 1} at the earliest: {text}",
            where=training.config.run_uri, ranks=ranks,
            fix="test the hardware of the nodes in its event `corruption`; start the run again to go on from the "
            f"newest checkpoint up to step {good}")

    def _meet(self) -> None:
        """Learn the node of each rank."""
        mesh, name = self._training.model.mesh, self._training.runtime.node.encode()[:NODE_BYTES]
        padded = torch.frombuffer(bytearray(name.ljust(NODE_BYTES, b"\0")), dtype=torch.uint8).long()
        rows = self._gathered(torch.cat((torch.tensor([mesh.data_rank]), padded))).tolist()
        self._names = [bytes(row[1:]).rstrip(b"\0").decode(errors="replace") for row in rows]
        numbers = {node: number for number, node in enumerate(sorted(set(self._names)))}
        of_data_rank = {row[0]: numbers[node] for row, node in zip(rows, self._names)}
        self._nodes = [of_data_rank[rank] for rank in range(mesh.data_size)]

    def _gathered(self, values: torch.Tensor) -> torch.Tensor:
        """Return the int64 tensors of all ranks, which have one shape, in rank order: [ranks, ...] on the host."""
        collectives = self._training.collectives
        own: Any = collectives.to_device(values.cpu())
        if collectives.world_size == 1:
            return collectives.to_host(own[None])
        parts = [torch.empty_like(own) for _ in range(collectives.world_size)]
        dist.all_gather(parts, own)
        return collectives.to_host(torch.stack(parts))
