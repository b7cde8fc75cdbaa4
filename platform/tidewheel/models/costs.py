"""Costs of a model's layers, which a family declares: FLOPs, memory and time follow without building a block."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FeedForwardShape:
    """Costs of a feed-forward of inner width F, from which FLOPs, memory and time are estimated.

    Args:
        inputs: number of matrices [D, F] that read the residual stream. One matrix [F, D] writes to it.
        kept: number of tensors of width F per token that eager autograd keeps for the backward pass.
        kept_compiled: the same number for a compiled block.
    """

    inputs: int
    kept: int
    kept_compiled: int


@dataclass(frozen=True)
class LayerCosts:
    """Parameters of a block, or of several. They add up.

    Args:
        matrices: entries of all matrices, which tensor parallelism cuts; those of every expert count.
        active: entries of the matrices that multiply a token: FLOPs count these. Fewer than `matrices` in a mixture of
            experts.
        experts: entries of the matrices of routed experts, part of `matrices`, which expert parallelism shards.
        cut: other parameters that tensor parallelism cuts: biases of layers sharded by columns.
        whole: other parameters, which each rank of tensor parallelism holds whole: norms, biases of rows, routers.
        inner: width of the tensors inside the feed-forward, summed over the experts of a token.
    """

    matrices: int
    active: int
    experts: int = 0
    cut: int = 0
    whole: int = 0
    inner: int = 0

    def __add__(self, other: LayerCosts) -> LayerCosts:
        return LayerCosts(self.matrices + other.matrices, self.active + other.active, self.experts + other.experts,
                          self.cut + other.cut, self.whole + other.whole, self.inner + other.inner)

    @property
    def parameters(self) -> int:
        """Return the number of all parameters."""
        return self.matrices + self.cut + self.whole
