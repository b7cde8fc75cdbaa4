"""Who computes which part of a step's gradient, and its place in the canonical sum.

The gradient of virtual rank v is the sum of its micro-batches, one after the other, as in ordinary accumulation; the V
of them are the leaves of one tree (`tree.py`). With context parallelism each of C ranks has a part of every gradient:
context rank c's part of v is leaf c V + v.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tidewheel.train.micro_batch_share import MicroBatchShare
from tidewheel.train.parallel.mesh import Mesh
from tidewheel.train.reproducible.tree import Node, cover

Member = tuple[int, int]
"""(data rank, context rank) of a process."""


@dataclass
class GradientOrder:
    """The order of a run's gradients, and which micro-batch is being computed; the same object for all of a model.

    Two ways give the same bits. Usually a data rank has virtual ranks that are neighbours, adds up whole gradients and
    sends what came of it once a step: at most log2(V / N) + 1 of them are kept. When it `streams`, gradients are
    exchanged after every micro-batch, and the ranks that share parameters go through the micro-batches side by side:
    then they arrive in the order of the leaves, and only shards are ever kept, at most log2(V) + 2.
    """

    virtual_ranks: int
    share: MicroBatchShare
    streams: bool = False
    """Gradients are exchanged after every micro-batch; the share's stride is the number of ranks that share
    parameters."""
    contexts: int = 1
    context: int = 0
    number: int = 0
    """Of the micro-batch under way, from 0, on this rank."""
    count: int = 1
    """Micro-batches of this step on each data rank."""

    @classmethod
    def of(cls, mesh: Mesh, virtual_ranks: int, *, streams: bool = False) -> GradientOrder:
        """That of this rank of `mesh`."""
        stride = mesh.size("shard") if streams else 1
        return cls(
            virtual_ranks, MicroBatchShare(mesh.data_rank, mesh.data_size, stride), streams, mesh.size("context"),
                   mesh.coordinate("context"))

    def begin(self, number: int, count: int) -> None:
        """Micro-batch `number` of `count` follows; every rank is at the same one."""
        self.number, self.count = number, count

    @property
    def last(self) -> bool:
        """Whether the step's gradients are complete after this micro-batch."""
        return self.number == self.count - 1

    @property
    def member(self) -> Member:
        """This rank."""
        return self.share.rank, self.context

    @property
    def parts(self) -> int:
        """Micro-batches of each virtual rank in this step."""
        return self.count * self.share.size // self.virtual_ranks

    def leaf(self, member: Member) -> int:
        """The leaf that the micro-batch under way on `member` belongs to."""
        rank, context = member
        micro = replace(self.share, rank=rank).of(self.count * self.share.size)[self.number]
        return context * self.virtual_ranks + micro // self.parts

    def entry(self, number: int, count: int) -> int:
        """The place of this rank's micro-batch `number` of `count` among `entries`."""
        total = count * self.share.size
        return self.context * total + self.share.of(total)[number]

    def entries(self, count: int) -> int:
        """Micro-batches of all data and context ranks, `count` on each."""
        return count * self.share.size * self.contexts

    def cover(self, members: Iterable[Member]) -> list[Node]:
        """What is left of the leaves of `members` at the end of a step, when these have added up theirs."""
        return cover(context * self.virtual_ranks + leaf for rank, context in members
                     for leaf in replace(self.share, rank=rank).of(self.virtual_ranks))
