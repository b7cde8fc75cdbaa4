"""Collectives on the links of a cluster: bytes that a rank sends, and the time that they take.

A collective over N ranks with b bytes on each (of the whole result, for gathers and scatters) takes, on a ring,

    steps x hop + factor x (N-1)/N x b / bandwidth

with factor 2 for an all-reduce and 1 for all-gather, reduce-scatter and all-to-all (NCCL tests, PERFORMANCE.md;
Patarasuk and Yuan, 2009). The bandwidth is that of the slowest link on the ring: within a node `node_link`; across
nodes `network` times the group's ranks on a node, each with its own adapter, at most `node_link`; times `LINK_SHARE`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidewheel.plan.hardware import HOP_SECONDS, LINK_SHARE, ClusterConfig

FACTORS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""Number of times that (N-1)/N of the bytes pass a rank's link."""


def sent(kind: str, size: float, ranks: int) -> float:
    """Return the bytes that each rank sends, and receives, for one collective on a ring.

    Args:
        kind: a key of `FACTORS`.
        size: bytes of the whole result.
        ranks: number of ranks.
    """
    return FACTORS[kind] * (ranks - 1) / ranks * size


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other."""

    ranks: int
    on_a_node: int
    """Ranks of the group on each node."""
    bandwidth: float
    """Bytes/s of each rank."""

    def seconds(self, kind: str, size: float) -> float:
        """Return the seconds of one collective of `size` bytes."""
        if self.ranks == 1 or not size:
            return 0.0
        steps = FACTORS[kind] * (self.ranks - 1)
        if self.on_a_node < self.ranks:  # across nodes NCCL uses trees for small messages, so latency grows with log N
            steps = FACTORS[kind] * (self.on_a_node - 1 + (self.ranks // self.on_a_node).bit_length())
        return steps * HOP_SECONDS + sent(kind, size, self.ranks) / self.bandwidth


def group(cluster: ClusterConfig, ranks: int, stride: int) -> Group:
    """Return a group of ranks, with the link between them. Rank / `nodes_of` is the node of a rank.

    Args:
        cluster: the cluster.
        ranks: number of ranks.
        stride: distance between two ranks of the group.
    """
    gpu = cluster.kind
    here = min(ranks, max(1, cluster.nodes_of // stride))
    link = gpu.node_link if here == ranks else min(gpu.node_link, gpu.network * here)
    return Group(ranks, here, link * LINK_SHARE)
