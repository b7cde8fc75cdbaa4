"""Bytes on the fullest GPU of a layout, part by part, from the shapes and from what the training code keeps.

The arithmetic of parameters, gradients and optimizer state is ZeRO's (arXiv:1910.02054, section 3.1); of activations,
a count of the tensors that a block saves for its backward pass (as in arXiv:2205.05198, section 4, but of our block:
no dropout, flash attention, SwiGLU). Letters: D width, H and K query and key heads of E, F inner width, T tensor
ranks, r, a bytes of the residual stream and of operands.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from tidewheel.plan.layout import Job, Layout, Share, shares

WHOLE_LOGITS_BYTES, CHUNK_TOKENS = 1 << 28, 4096
"""As in `models.loss`, which needs torch: larger logits are made for so many tokens at a time."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU. The parts are not all at their largest at the same moment: their sum is an upper bound."""

    parameters: float
    """Those the optimizer updates (zero3: this rank's rows), or whole ones where every rank computes with its own."""
    copies: float
    """What is there beside them between passes: rows beside gathered parameters (zero2), the gathered embedding and
    output (zero3), 16-bit casts that autocast keeps (ddp, zero1)."""
    gradients: float
    """Between micro-batches."""
    optimizer: float
    activations: float
    """Kept for the backward pass, of all micro-batches in flight, and of one block that is computed again."""
    logits: float
    """Logits, their gradient, and the output matrix's gradient where it is made with the loss."""
    communication: float
    """Gathered blocks, and gradients on their way."""
    update: float
    """What the optimizer's step needs besides; not at the time of activations, logits and communication."""

    @property
    def state(self) -> float:
        """Parameters, gradients and optimizer state: what the published tables count."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """At the fuller of two moments: in a backward pass, and in the optimizer's step."""
        return self.state + self.copies + max(self.activations + self.logits + self.communication, self.update)

    def parts(self) -> dict[str, float]:
        """By name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def memory(job: Job, layout: Layout) -> Memory:
    """Of the GPU that has most."""
    return max((of_share(job, layout, share) for share in shares(job, layout)), key=lambda found: found.total)


def of_share(job: Job, layout: Layout, share: Share) -> Memory:
    """Of the GPUs of one pipeline rank."""
    parallel, weight = layout.parallel, job.weight_bytes
    block = job.block_matrices / parallel.tensor + job.block_norms
    ends = _ends(job, layout, share)
    blocks = share.blocks * block
    whole, shards = blocks + ends, layout.shards
    host = layout.sharded and parallel.offload
    gathered = 2 if job.config.precision != "fp32" else weight  # FSDP2 gathers blocks in the type of the products
    loss_gradient = _output_gradient(job, layout, share)
    if layout.sharded:
        rows = whole / shards
        keeps = parallel.data == "zero2"
        parameters = (blocks * gathered + ends * weight) if keeps else rows * weight
        copies = rows * weight if keeps else ends * weight
        if host:
            parameters, copies = (parameters, 0.0) if keeps else (0.0, copies)
        # gradients that wait to be reduced are summed in fp32
        waiting = layout.reduces_once and layout.micro_batches > 1
        gradients = 4.0 * whole if waiting else 0.0 if host else rows * weight
        moving = 0.0 if keeps else 2 * block * gathered  # the block in use and the one that is fetched meanwhile
        if not waiting:
            moving += block * (gathered + 4)  # its gradient, and that of the one before, in fp32, being reduced
            loss_gradient += ends * weight  # of embedding and output, until the backward pass ends
        optimizer = 0.0 if host else rows * job.optimizer_bytes
        update = 0.0 if host or weight == 4 else 4.0 * rows
    else:
        ranks = layout.data * parallel.context
        rows = whole / ranks if parallel.data == "zero1" else whole
        parameters, gradients, optimizer = whole * weight, whole * weight, rows * job.optimizer_bytes
        copies = _casts(job, layout, share, block)
        flat = 4.0 * whole if ranks > 1 else 0.0  # the buckets of the all-reduce, in fp32, all until the last is back
        moving, update = flat, 4.0 * rows if weight == 2 else 0.0
    again = max(0.0, kept_per_token(job, layout, "none") - kept_per_token(job, layout))
    tokens = layout.micro_sequences * job.sequence_length / parallel.context
    activations = tokens * (share.in_flight * share.blocks * _average_kept(job, layout) + again)
    activations += _stage_ends(job, layout, share, tokens)
    logits = (_logits(job, layout, tokens) if share.last else 0.0) + loss_gradient
    return Memory(parameters, copies, gradients, optimizer, activations, logits, moving, update)


def _ends(job: Job, layout: Layout, share: Share) -> float:
    """Parameters of this rank's embedding, final norm and output."""
    matrix = job.vocabulary_matrix / layout.parallel.tensor
    tied = job.model.tie_embeddings and share.first
    return share.first * matrix + share.last * (job.model.dim + (0.0 if tied else matrix))


def _casts(job: Job, layout: Layout, share: Share, block: float) -> float:
    """16-bit copies of fp32 weights: autocast makes them in each forward pass, and the graph keeps them until the
    backward pass; of blocks that are computed again, only one at a time."""
    if job.weight_bytes == job.compute_bytes:
        return 0.0
    kept = _share_kept(layout) * share.blocks * share.in_flight
    return job.compute_bytes * block * max(1.0, kept)


def _share_kept(layout: Layout) -> float:
    """Share of the blocks that keep everything."""
    kind = layout.memory.activation_checkpointing
    return 1.0 if kind == "none" else 1 - 1 / layout.memory.every if kind == "every_nth" else 0.0


def _average_kept(job: Job, layout: Layout) -> float:
    """Bytes per token and block, over a rank's blocks."""
    if layout.memory.activation_checkpointing != "every_nth":
        return kept_per_token(job, layout)
    share = _share_kept(layout)
    return share * kept_per_token(job, layout, "none") + (1 - share) * kept_per_token(job, layout, "full")


def kept_per_token(job: Job, layout: Layout, kind: str | None = None) -> float:
    """Bytes that one block keeps of one token of this rank's micro-batch.

    none, eager: two norms' fp32 inputs 2 x 4 D/T; the products' inputs, which autocast casts once for each of those
    that read them, of llama five, 5 a D (2 a D where nothing is cast); queries, keys, values a (H + 2 K) E/T;
    attention's result a H E/T and 4 H/T of normalisers; the inner tensors of the feed-forward, of SwiGLU four, 4 a F/T.
    none, compiled (what torch's min-cut partitioner saves): r D/T + a D/T of the two residuals, two normed inputs 2 a
    D, attention as above, of SwiGLU 3 a F/T.
    full, offload: r D/T, the block's input (offload: in host memory).
    selective: that and attention's result, and products: all but every `recompute_products`-th of wq, wk, wv, wo, w1,
    w3, w2; with tensor parallelism also what the collectives returned, two gathered inputs and two outputs.
    With context parallelism the keys and values of the whole row are kept.
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
    """Between stages: what a pipeline rank receives, and its gradient, for every micro-batch (torch keeps the buffers);
    at the end, the input of the final norm."""
    size = tokens * job.model.dim * job.residual_bytes / layout.parallel.tensor
    buffers = 2 * layout.micro_batches * size if layout.parallel.pipeline > 1 else 0.0
    return buffers + (2 * size if share.last else 0.0)


def logit_rows(job: Job, layout: Layout, tokens: float) -> float:
    """Tokens whose logits exist at a time."""
    wanted, vocabulary = job.config.objective.logit_tokens, job.vocabulary_size / layout.parallel.tensor
    if wanted is None:
        wanted = 0 if tokens * vocabulary * 4 <= WHOLE_LOGITS_BYTES else CHUNK_TOKENS
    return tokens if not wanted else min(tokens, wanted)


def _logits(job: Job, layout: Layout, tokens: float) -> float:
    """Whole: logits, their fp32 copy, log-softmax and its gradient, a + 12 bytes each. In chunks: logits and gradient
    of a chunk, fp32 where tensor parallelism computes them uncompiled, and the gradient of the hidden states."""
    a, vocabulary = job.compute_bytes, job.vocabulary_size / layout.parallel.tensor
    rows = logit_rows(job, layout, tokens)
    if rows == tokens:
        return (a + 12) * rows * vocabulary
    each = 2 * a if layout.parallel.tensor == 1 else 2 * a + 8
    return each * rows * vocabulary + tokens * job.model.dim * job.residual_bytes


def _output_gradient(job: Job, layout: Layout, share: Share) -> float:
    """In chunks: fp32 gradient of the output matrix, from the forward pass on, its 16-bit copy and a product's."""
    tokens = layout.micro_sequences * job.sequence_length / layout.parallel.context
    if not share.last or logit_rows(job, layout, tokens) == tokens:
        return 0.0
    return (4 + 2 * job.compute_bytes) * job.vocabulary_matrix / layout.parallel.tensor
