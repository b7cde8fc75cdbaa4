"""Parameters of a pipeline rank before data parallelism, by the unit that FSDP2 gathers."""

from __future__ import annotations

from dataclasses import dataclass

from tidewheel.plan.layout import Job, Layout, Share


@dataclass(frozen=True)
class Held:
    """Parameters of a pipeline rank before data parallelism, by the unit that FSDP2 gathers."""

    block: float
    """Of one block."""
    blocks: float
    """Of all blocks."""
    embedding: float
    """Of the embedding; 0 if it is tied to an output matrix on the same rank."""
    output: float
    """Of the final norm and the output matrix, tied or not."""
    is_tied: bool
    """Whether the output matrix is the embedding of the same rank."""
    experts: float
    """Of the routed experts of one block, part of `block`."""
    expert_ranks: int
    """Ranks that share the experts (`parallel.expert`)."""

    @property
    def ends(self) -> float:
        """Parameters outside the blocks."""
        return self.embedding + self.output

    @property
    def whole(self) -> float:
        """All parameters."""
        return self.blocks + self.ends

    @property
    def block_here(self) -> float:
        """Parameters of a block that a rank computes with: of the routed experts, those of this rank."""
        return self.block - self.experts * (1 - 1 / self.expert_ranks)

    @property
    def experts_here(self) -> float:
        """Parameters of the routed experts of all blocks that a rank computes with."""
        return self.experts / self.expert_ranks * (self.blocks / self.block)

    @property
    def blocks_here(self) -> float:
        """Parameters of all blocks that a rank computes with."""
        return self.block_here * (self.blocks / self.block)

    @property
    def whole_here(self) -> float:
        """All parameters that a rank computes with."""
        return self.blocks_here + self.ends

    @property
    def first(self) -> float:
        """Parameters of the unit that the forward pass gathers first, and the backward pass reduces last."""
        if self.is_tied or not self.blocks:
            return self.embedding or self.output
        return self.embedding or self.block


def held(job: Job, layout: Layout, share: Share) -> Held:
    """Return the parameters of a pipeline rank, before data parallelism.

    Args:
        job: the run.
        layout: its layout.
        share: the pipeline rank's part of the model.
    """
    tensor = layout.parallel.tensor
    block = job.block_matrices / tensor + job.block_norms
    matrix = job.vocabulary_matrix / tensor
    # a last stage of its own has a copy of a tied embedding
    is_tied = job.model.tie_embeddings and share.first and share.last and layout.parallel.pipeline == 1
    output = share.last * (job.model.dim + matrix)
    experts = job.costs.experts / job.model.num_layers / tensor
    return Held(block, share.blocks * block, 0.0 if is_tied else share.first * matrix, output, is_tied, experts,
                layout.parallel.expert)
