"""The order of a step's gradients: which rank computes which leaf of the canonical sum.

The gradient of virtual rank v is the sum over its micro-batches in order, as in ordinary accumulation. These V
gradients are the leaves of one tree (`tree.py`). With context parallelism each of C ranks has a part of every gradient;
context rank c's part of v is leaf c V + v.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from tidewheel.train.micro_batch_share import MicroBatchShare
from tidewheel.train.parallel.mesh import Mesh
from tidewheel.train.reproducible.tree import Node, cover

if TYPE_CHECKING:
    import torch

Member = tuple[int, int]
"""(data rank, context rank) of a process."""


class Tap(Protocol):
    """Sees each gradient of a micro-batch before it is added to others."""

    def add(self, micro: int, flat: torch.Tensor) -> None:
        """Look at a gradient, which is overwritten later.

        Args:
            micro: index of the micro-batch in the step, see `GradientOrder.micro`.
            flat: [n], a part of the micro-batch's gradient. The parts of one micro-batch come in a fixed order.
        """


@dataclass
class GradientOrder:
    """The order of a run's gradients, and the current micro-batch. All parts of a model share one object.

    There are two modes with the same bits. By default a data rank has neighbouring virtual ranks, adds whole gradients
    and sends the sums once a step; it keeps at most log2(V / N) + 1 of them. If it streams, gradients are exchanged
    after every micro-batch, and ranks that shard the same parameters compute neighbouring micro-batches at the same
    time. Then gradients arrive in the order of the leaves, and at most log2(V) + 2 shards are kept.

    Args:
        virtual_ranks: of the run, V.
        share: the micro-batches of this data rank; if it streams, its stride is the number of ranks that shard the
            same parameters.
        streams: exchange gradients after every micro-batch.
        contexts: number of context ranks, C.
        context: this context rank.
        number: index of the current micro-batch on this rank.
        count: number of micro-batches of this step on this data rank.
        shift: each data rank computes the micro-batches of the one `shift` ranks after it, see
            `ParallelModel.standing_in`.
        tap: sees this rank's gradients of each micro-batch; None: nothing does.
    """

    virtual_ranks: int
    share: MicroBatchShare
    streams: bool = False
    contexts: int = 1
    context: int = 0
    number: int = 0
    count: int = 1
    shift: int = 0
    tap: Tap | None = None

    @classmethod
    def of(cls, mesh: Mesh, virtual_ranks: int, *, streams: bool = False) -> GradientOrder:
        """Return the order for this rank.

        Args:
            mesh: the ranks.
            virtual_ranks: of the run.
            streams: see the class.
        """
        stride = mesh.size("shard") if streams else 1
        return cls(
            virtual_ranks, MicroBatchShare(mesh.data_rank, mesh.data_size, stride), streams, mesh.size("context"),
                   mesh.coordinate("context"))

    def begin(self, number: int, count: int) -> None:
        """Begin micro-batch `number` of `count`; all ranks begin the same number, unless they have other shares."""
        self.number, self.count = number, count

    @property
    def last(self) -> bool:
        """Return whether the step's gradients are complete after this micro-batch."""
        return self.number == self.count - 1

    @property
    def member(self) -> Member:
        """Return (data rank, context rank) of this process."""
        return self.share.rank, self.context

    @property
    def parts(self) -> int:
        """Return the number of micro-batches of each virtual rank in this step."""
        return self._total // self.virtual_ranks

    @property
    def _total(self) -> int:
        """Return the number of micro-batches of this step."""
        return self.share_of(self.share.rank).total(self.count)

    def share_of(self, rank: int) -> MicroBatchShare:
        """Return the micro-batches that a data rank computes now."""
        return replace(self.share, rank=(rank + self.shift) % self.share.size)

    def micro(self, member: Member) -> int:
        """Return the index of the current micro-batch of `member` among those of the step."""
        return self.share_of(member[0]).of(self._total)[self.number]

    def leaf(self, member: Member) -> int:
        """Return the leaf of the current micro-batch of `member`."""
        return member[1] * self.virtual_ranks + self.micro(member) // self.parts

    def entry(self, number: int, count: int) -> int:
        """Return the index of this rank's micro-batch `number` of `count` among `entries`."""
        total = self.share.total(count)
        return self.context * total + self.share.of(total)[number]

    def entries(self, count: int) -> int:
        """Return the number of micro-batches of all data and context ranks, `count` on this one."""
        return self.share.total(count) * self.contexts

    def cover(self, members: Iterable[Member]) -> list[Node]:
        """Return the nodes that remain at the end of a step when `members` have added their leaves."""
        return cover(context * self.virtual_ranks + leaf for rank, context in members
                     for leaf in self.share_of(rank).of(self.virtual_ranks))
