"""Bytes on the fullest GPU of a layout, by part, from shapes and from the tensors that the training code keeps.

The arithmetic of parameters, gradients and optimizer state is ZeRO's (arXiv:1910.02054, section 3.1), with fp32
gradients; of activations, a count of the tensors that a block saves for its backward pass (as in arXiv:2205.05198,
section 4, but of our block: no dropout, flash attention, SwiGLU), see `plan/activations.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from tidewheel.plan.activations import average_kept, kept_per_token, share_recomputed
from tidewheel.plan.adapters import with_adapter
from tidewheel.plan.compressed import kept
from tidewheel.plan.held import held
from tidewheel.plan.layout import GRADIENT_BYTES, Job, Layout, Share, shares
from tidewheel.plan.offload import inputs_on_gpu, offloads
from tidewheel.plan.teachers import teacher_bytes

WHOLE_LOGITS_BYTES, CHUNK_TOKENS = 1 << 28, 8192
"""Above this many bytes, logits are computed for `CHUNK_TOKENS` tokens at a time; as in `models.loss` on a GPU, which
needs torch."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU. The parts are not all at their largest at the same moment: their sum is an upper bound."""

    parameters: float
    """Parameters that the optimizer updates (zero3: this rank's rows), or unsharded ones where ranks compute with their
    own."""
    copies: float
    """Copies that stay between passes: rows beside gathered parameters (zero2), the gathered output matrix (zero3),
    16-bit casts that autocast keeps (ddp, zero1)."""
    gradients: float
    """Gradients between micro-batches."""
    optimizer: float
    activations: float
    """Tensors kept for the backward pass: those of all micro-batches in flight, and of one recomputed block."""
    logits: float
    """Logits, their gradient, and the output matrix's gradient where it is made with the loss."""
    communication: float
    """Gathered blocks, and gradients that are being reduced."""
    teacher: float = 0.0
    """A live teacher, see `plan.teachers`."""

    @property
    def state(self) -> float:
        """Parameters, gradients and optimizer state, which published tables count."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All bytes of the GPU."""
        return self.state + self.copies + self.activations + self.logits + self.communication + self.teacher

    def parts(self) -> dict[str, float]:
        """Return the bytes of each part by name; of a teacher, if there is one."""
        parts = {field.name: float(getattr(self, field.name)) for field in fields(self)}
        return parts if self.teacher else {name: size for name, size in parts.items() if name != "teacher"}


def memory(job: Job, layout: Layout) -> Memory:
    """Return the memory of the fullest GPU."""
    return max((of_share(job, layout, share) for share in shares(job, layout)), key=lambda part: part.total)


def of_share(job: Job, layout: Layout, share: Share) -> Memory:
    """Return the memory of a GPU of one pipeline rank.

    Args:
        job: the run.
        layout: its layout.
        share: the pipeline rank's part of the model.
    """
    parallel, weight = layout.parallel, job.weight_bytes
    parts = held(job, layout, share)
    block, whole, shards = parts.block_here, parts.whole, layout.shards
    host = offloads(layout)
    gathered = job.gathered_here(shards)
    loss_gradient = _output_gradient(job, layout, share)
    if layout.sharded:
        rows = whole / shards
        keeps = parallel.data == "zero2"
        parameters = parts.whole_here * gathered if keeps else rows * weight
        copies = rows * weight if keeps else parts.output * gathered
        if host:
            parameters, copies = (parameters, 0.0) if keeps else (0.0, copies)
        if shards == 1:
            copies += _casts(job, layout, share, block)
        # gradients are accumulated in fp32 until they are reduced
        waiting = layout.reduces_once and layout.micro_batches > 1
        gradients = GRADIENT_BYTES * (parts.whole_here if waiting else 0.0 if host else rows)
        # the unit in use and those being prefetched: blocks, or the embedding and the first blocks
        moving = 0.0 if keeps else (parallel.prefetch * block + max(block, parts.embedding)) * gathered
        if not waiting:
            block_gradient = GRADIENT_BYTES if weight == 2 else gathered
            moving += block * (block_gradient + layout.reduced_bytes)  # its gradient, and the previous one's in transit
            # the output matrix's, then the embedding's
            loss_gradient += max(parts.output, parts.embedding) * GRADIENT_BYTES
        optimizer = 0.0 if host else rows * (job.optimizer_bytes - job.paged_bytes)
    else:
        ranks = layout.data * parallel.context
        rows = whole / ranks if parallel.data == "zero1" else whole
        parameters, gradients = whole * weight, whole * GRADIENT_BYTES + kept(job, layout, parts)
        optimizer = rows * (job.optimizer_bytes - job.paged_bytes)
        copies = _casts(job, layout, share, block)
        # buckets of the all-reduce, all kept until the last one returns
        moving = layout.reduced_bytes * whole if ranks > 1 else 0.0
    again = max(0.0, kept_per_token(job, layout, "none") - kept_per_token(job, layout))
    tokens = layout.micro_sequences * job.row_tokens / parallel.context
    activations = tokens * (share.in_flight * share.blocks * average_kept(job, layout) + again)
    activations += _stage_ends(job, layout, share, tokens) + inputs_on_gpu(job, layout)
    logits = (_logits(job, layout, tokens) if share.last else 0.0) + loss_gradient
    frozen = teacher_bytes(job, layout, share, tokens, logit_rows(job, layout, tokens))
    result = Memory(parameters, copies, gradients, optimizer, activations, logits, moving, frozen)
    return result if job.config.adapter is None else with_adapter(job, layout, share, parts, result)


def _casts(job: Job, layout: Layout, share: Share, block: float) -> float:
    """Return the bytes of 16-bit copies of fp32 weights.

    Autocast makes them in each forward pass, and the graph keeps them until the backward pass. Recomputed blocks have
    one at a time. `fused_products` joins matrices, and the joined ones are copies too: on an H100 2.0 GiB more for a 1B
    model, whose blocks have 1.8 GiB in 16 bits.
    """
    joined = 1 if job.model.fused_products else 0
    if job.weight_bytes == job.compute_bytes and not joined:
        return 0.0
    copies = joined + (job.weight_bytes != job.compute_bytes)
    kept = (1 - share_recomputed(job, layout)) * share.blocks * share.in_flight
    return job.compute_bytes * copies * block * max(1.0, kept)


def _stage_ends(job: Job, layout: Layout, share: Share, tokens: float) -> float:
    """Return the bytes at the ends of a stage.

    A pipeline rank has a receive buffer and its gradient for every micro-batch, since torch keeps the buffers. The last
    rank has the input of the final norm.
    """
    size = tokens * job.model.dim * job.residual_bytes / layout.parallel.tensor
    buffers = 2 * layout.micro_batches * size if layout.parallel.pipeline > 1 else 0.0
    return buffers + (2 * size if share.last else 0.0)


def logit_rows(job: Job, layout: Layout, tokens: float) -> float:
    """Return the number of tokens whose logits exist at once.

    Args:
        job: the run.
        layout: its layout.
        tokens: tokens of a rank's micro-batch.
    """
    chunk = job.config.objective.logit_tokens
    vocabulary = job.vocabulary_size / layout.parallel.tensor
    if chunk is None:
        chunk = 0 if tokens * vocabulary * 4 <= WHOLE_LOGITS_BYTES else CHUNK_TOKENS
    return min(tokens, chunk) if chunk else tokens


def _logits(job: Job, layout: Layout, tokens: float) -> float:
    """Return the bytes of the logits and of what is computed from them.

    At once: logits, their fp32 copy, log-softmax and its gradient, a + 12 bytes each. In chunks: logits and gradient of
    a chunk, both in the dtype of the products, and the gradient of the hidden states.
    """
    a, vocabulary = job.compute_bytes, job.vocabulary_size / layout.parallel.tensor
    rows = logit_rows(job, layout, tokens)
    if rows == tokens:
        return (a + 12) * rows * vocabulary
    return 2 * a * rows * vocabulary + tokens * job.model.dim * job.residual_bytes


def _output_gradient(job: Job, layout: Layout, share: Share) -> float:
    """Return the bytes of the output matrix's gradient, if logits are computed in chunks.

    They are an fp32 gradient from the forward pass on, and the matrix in the dtype of the products.
    """
    tokens = layout.micro_sequences * job.row_tokens / layout.parallel.context
    if not share.last or logit_rows(job, layout, tokens) == tokens:
        return 0.0
    return (4 + job.compute_bytes) * job.vocabulary_matrix / layout.parallel.tensor
