"""The exchange of expert parallelism: the rows that travel to experts and back, and the time that the links take.

Loads are counted as balanced: each rank computes as many rows as it sends.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidewheel.plan.hardware import HOP_SECONDS, LINK_SHARE, ClusterConfig
from tidewheel.plan.layout import Job, Layout


@dataclass(frozen=True)
class ExpertLinks:
    """The links between the ranks that share the experts."""

    ranks: int
    inside: float
    """Share of a rank's rows that go to other ranks of its node."""
    across: float
    """Share that goes to other nodes."""
    node_link: float
    """Bytes/s to ranks of the node."""
    network: float
    """Bytes/s to ranks of other nodes, over the rank's own adapter."""

    def seconds(self, size: float) -> float:
        """Return the seconds of one exchange in which each rank has rows of `size` bytes.

        Both links work at the same time. Every pair of ranks sends a message of its own, so latency grows with their
        number.
        """
        if self.ranks == 1:
            return 0.0
        return (self.ranks - 1) * HOP_SECONDS + max(self.inside * size / self.node_link,
                                                    self.across * size / self.network)


def expert_links(cluster: ClusterConfig, layout: Layout) -> ExpertLinks:
    """Return the links of a layout. Its ranks are neighbours, `tensor` apart.

    Args:
        cluster: the cluster.
        layout: the layout.
    """
    ranks = layout.parallel.expert
    here = min(ranks, max(1, cluster.nodes_of // layout.parallel.tensor))
    gpu = cluster.kind
    return ExpertLinks(ranks, (here - 1) / ranks, (ranks - here) / ranks, gpu.node_link * LINK_SHARE,
                    gpu.network * LINK_SHARE)


def rows_bytes(job: Job, layout: Layout) -> float:
    """Return the bytes of the rows that a rank sends to experts in one block and micro-batch.

    Tensor-parallel ranks all have the gathered input, and each sends it to its slice of the experts.

    Args:
        job: the run.
        layout: its layout.
    """
    tokens = layout.micro_sequences * job.sequence_length / layout.parallel.context
    return tokens * job.routed_rows.copies * job.model.dim * job.compute_bytes
