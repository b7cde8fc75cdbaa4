"""Bytes on the fullest GPU of a layout, by part, from shapes and from the tensors that the training code keeps.

The arithmetic of parameters, gradients and optimizer state is ZeRO's (arXiv:1910.02054, section 3.1), with fp32
gradients; of activations, a count of the tensors that a block saves for its backward pass (as in arXiv:2205.05198,
section 4, but of our block: no dropout, flash attention, SwiGLU). Letters: D width, H and K query and key heads of E, F
inner width, T tensor ranks, r, a bytes of the residual stream and of operands.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from tidewheel.plan.layout import GRADIENT_BYTES, Job, Layout, Share, held, shares

WHOLE_LOGITS_BYTES, CHUNK_TOKENS = 1 << 28, 4096
"""Above this many bytes, logits are computed for `CHUNK_TOKENS` tokens at a time; as in `models.loss`, which needs
torch."""


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

    @property
    def state(self) -> float:
        """Parameters, gradients and optimizer state, which published tables count."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All bytes of the GPU."""
        return self.state + self.copies + self.activations + self.logits + self.communication

    def parts(self) -> dict[str, float]:
        """Return the bytes of each part by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


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
    block, whole, shards = parts.block, parts.whole, layout.shards
    host = layout.sharded and parallel.offload
    gathered = job.gathered_bytes
    loss_gradient = _output_gradient(job, layout, share)
    if layout.sharded:
        rows = whole / shards
        keeps = parallel.data == "zero2"
        parameters = whole * gathered if keeps else rows * weight
        copies = rows * weight if keeps else parts.output * gathered
        if host:
            parameters, copies = (parameters, 0.0) if keeps else (0.0, copies)
        # gradients are accumulated in fp32 until they are reduced
        waiting = layout.reduces_once and layout.micro_batches > 1
        gradients = GRADIENT_BYTES * (whole if waiting else 0.0 if host else rows)
        # the unit in use and the one being prefetched: two blocks, or the embedding and the first block
        moving = 0.0 if keeps else (block + max(block, parts.embedding)) * gathered
        if not waiting:
            block_gradient = GRADIENT_BYTES if weight == 2 else gathered
            moving += block * (block_gradient + layout.reduced_bytes)  # its gradient, and the previous one's in transit
            # the output matrix's, then the embedding's
            loss_gradient += max(parts.output, parts.embedding) * GRADIENT_BYTES
        optimizer = 0.0 if host else rows * job.optimizer_bytes
    else:
        ranks = layout.data * parallel.context
        rows = whole / ranks if parallel.data == "zero1" else whole
        parameters, gradients, optimizer = whole * weight, whole * GRADIENT_BYTES, rows * job.optimizer_bytes
        copies = _casts(job, layout, share, block)
        # buckets of the all-reduce, all kept until the last one returns
        moving = layout.reduced_bytes * whole if ranks > 1 else 0.0
    again = max(0.0, kept_per_token(job, layout, "none") - kept_per_token(job, layout))
    tokens = layout.micro_sequences * job.sequence_length / parallel.context
    activations = tokens * (share.in_flight * share.blocks * _average_kept(job, layout) + again)
    activations += _stage_ends(job, layout, share, tokens)
    logits = (_logits(job, layout, tokens) if share.last else 0.0) + loss_gradient
    return Memory(parameters, copies, gradients, optimizer, activations, logits, moving)


def _casts(job: Job, layout: Layout, share: Share, block: float) -> float:
    """Return the bytes of 16-bit copies of fp32 weights.

    Autocast makes them in each forward pass, and the graph keeps them until the backward pass. Recomputed blocks have
    one at a time.
    """
    if job.weight_bytes == job.compute_bytes:
        return 0.0
    kept = _share_kept(layout) * share.blocks * share.in_flight
    return job.compute_bytes * block * max(1.0, kept)


def _share_kept(layout: Layout) -> float:
    """Return the share of the blocks that keep all activations."""
    kind = layout.memory.activation_checkpointing
    return 1.0 if kind == "none" else 1 - 1 / layout.memory.every if kind == "every_nth" else 0.0


def _average_kept(job: Job, layout: Layout) -> float:
    """Return the bytes per token and block, averaged over a rank's blocks."""
    if layout.memory.activation_checkpointing != "every_nth":
        return kept_per_token(job, layout)
    share = _share_kept(layout)
    return share * kept_per_token(job, layout, "none") + (1 - share) * kept_per_token(job, layout, "full")


def kept_per_token(job: Job, layout: Layout, kind: str | None = None) -> float:
    """Return the bytes that one block keeps per token of this rank's micro-batch.

    - none, eager: fp32 inputs of two norms, 2 x 4 D/T; inputs of the products, which autocast casts once per product
      (llama has five, 5 a D; 2 a D without casts); queries, keys and values, a (H + 2 K) E/T; attention's output,
      a H E/T, and normalisers, 4 H/T; inner tensors of the feed-forward (SwiGLU has four, 4 a F/T).
    - none, compiled (what torch's min-cut partitioner saves): two residuals, r D/T + a D/T; two normed inputs, 2 a D;
      attention as above; SwiGLU 3 a F/T.
    - full, offload: the block's input, r D/T (offload: in host memory).
    - selective: the block's input, attention's output, and all products of wq, wk, wv, wo, w1, w3 and w2 except every
      `recompute_products`-th. With tensor parallelism also the outputs of the collectives: two gathered inputs and two
      scattered outputs.

    With context parallelism, keys and values of whole rows are kept.

    Args:
        job: the run.
        layout: its layout.
        kind: activation checkpointing; default: the layout's.
    """
    model, ffn, parallel, memory = job.model, job.model.FEED_FORWARD, layout.parallel, layout.memory
    kind = kind or memory.activation_checkpointing
    a, tensor, dim = job.compute_bytes, parallel.tensor, job.model.dim
    residual = job.residual_bytes * dim / tensor
    if kind in ("full", "every_nth"):
        return residual
    if kind == "offload":
        return 0.0
    query = model.num_heads * model.head_width / tensor
    key, inner = model.kv_heads * model.head_width / tensor, model.ffn_width / tensor
    result = a * query + 4 * model.num_heads / tensor
    if kind == "selective":
        products = [query, key, key, dim / tensor, *[inner] * ffn.inputs, dim / tensor]
        nth = memory.recompute_products
        saved = sum(size for number, size in enumerate(products, 1) if not nth or number % nth)
        collectives = 2 * dim * (job.residual_bytes + a / tensor) if tensor > 1 else 0.0
        return residual + result + a * saved + collectives
    attention = a * (query + 2 * key * parallel.context) + result
    if job.config.compile:
        return residual + a * dim / tensor + 2 * a * dim + attention + ffn.kept_compiled * a * inner
    cast = a < job.residual_bytes or job.weight_bytes > a
    return 2 * 4 * dim / tensor + (3 + ffn.inputs if cast else 2) * a * dim + attention + ffn.kept * a * inner


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
    a chunk, in fp32 where tensor parallelism computes them uncompiled, and the gradient of the hidden states.
    """
    a, vocabulary = job.compute_bytes, job.vocabulary_size / layout.parallel.tensor
    rows = logit_rows(job, layout, tokens)
    if rows == tokens:
        return (a + 12) * rows * vocabulary
    element = 2 * a if layout.parallel.tensor == 1 else 2 * a + 8
    return element * rows * vocabulary + tokens * job.model.dim * job.residual_bytes


def _output_gradient(job: Job, layout: Layout, share: Share) -> float:
    """Return the bytes of the output matrix's gradient, if logits are computed in chunks.

    They are an fp32 gradient from the forward pass on, its 16-bit copy, and a product's.
    """
    tokens = layout.micro_sequences * job.sequence_length / layout.parallel.context
    if not share.last or logit_rows(job, layout, tokens) == tokens:
        return 0.0
    return (4 + 2 * job.compute_bytes) * job.vocabulary_matrix / layout.parallel.tensor
