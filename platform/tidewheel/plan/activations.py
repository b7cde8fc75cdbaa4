"""What a block keeps for its backward pass, and what it computes again, for each kind of activation checkpointing.

Letters: D width, H and K query and key heads of E, F inner width, T tensor ranks, r, a bytes of the residual stream and
of operands.
"""

from __future__ import annotations

from tidewheel.models.family import Model
from tidewheel.models.moe.family import MixtureFamily
from tidewheel.plan.layout import Job, Layout
from tidewheel.plan.routed_rows import routed_rows


def share_recomputed(job: Job, layout: Layout) -> float:
    """Return the share of the model's blocks that are recomputed as a whole."""
    kind = layout.memory.activation_checkpointing
    if kind in ("full", "offload"):
        return 1.0
    if kind != "every_nth":
        return 0.0
    layers = job.model.num_layers
    return sum(not layout.memory.keeps_block(index, layers) for index in range(layers)) / layers


def average_kept(job: Job, layout: Layout) -> float:
    """Return the bytes per token and block, averaged over the model's blocks."""
    if layout.memory.activation_checkpointing != "every_nth":
        return kept_per_token(job, layout)
    share = share_recomputed(job, layout)
    return (1 - share) * kept_per_token(job, layout, "none") + share * kept_per_token(job, layout, "full")


def kept_per_token(job: Job, layout: Layout, kind: str | None = None) -> float:
    """Return the bytes that one block keeps per token of this rank's micro-batch.

    - none, eager: fp32 inputs of n norms (2; Gemma 4), n 4 D/T, and of those of h query and key heads, 4 h E/T; inputs
      of the products, which autocast casts once per product (llama has five, 5 a D; 2 a D without casts); queries, keys
      and values, a (H + 2 K) E/T; attention's output, a H E/T, and normalisers, 4 H/T; inner tensors of the
      feed-forward (SwiGLU has four, 4 a F/T).
    - none, compiled (what torch's min-cut partitioner saves): two residuals, r D/T + a D/T; two normed inputs, 2 a D;
      inputs of further norms, (n - 2) a D/T + a h E/T;
      attention as above; SwiGLU 3 a F/T.
    - attention, feed_forward: as none, but of the recomputed part only its input, r D.
    - full, every_nth, offload: the block's input, r D/T (offload: in host memory or on disk).
    - selective: the block's input, attention's output, and the products of wq, wk, wv, wo, w1, w3 and w2 that are not
      recomputed. With tensor parallelism also the outputs of the collectives: two gathered inputs and two scattered
      outputs.

    In a mixture of experts F is the width of all experts of a token, and the rows that go to experts and come from them
    are kept, 2 a D for each expert of a token. Widths are averages over the blocks.

    With context parallelism by all_gather, keys and values of whole rows are kept; by ring, only this rank's.

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
    key, inner = model.kv_heads * model.head_width / tensor, inner_width(job) / tensor
    rows = job.routed_rows.copies * dim  # all ranks of tensor parallelism have whole rows
    result = a * query + 4 * model.num_heads / tensor
    if kind == "selective":
        widths = [query, key, key, dim / tensor, *[inner] * ffn.inputs, rows or dim / tensor]
        saved = sum(width for width, kept in zip(widths, _products_kept(model, layout)) if kept)
        gathered = job.residual_bytes if job.config.precision == "fp8" else a
        collectives = 2 * dim * (gathered + a / tensor) if tensor > 1 else 0.0
        return residual + result + a * saved + collectives
    attention = a * (query + 2 * key * _kept_keys(job, layout)) + result if kind != "attention" else 0.0
    heads = model.normed_heads * model.head_width / tensor if kind != "attention" else 0.0
    if job.config.compile:
        attention += a * (heads + (model.stream_norms - 2) * dim / tensor)
        inside = ffn.kept_compiled * a * inner + 2 * a * rows if kind != "feed_forward" else 0.0
        return residual + a * dim / tensor + 2 * a * dim + attention + inside
    cast = a < job.residual_bytes or job.weight_bytes > a
    of_attention = job.residual_bytes if kind == "attention" else (3 if cast else 1) * a
    of_ffn = job.residual_bytes if kind == "feed_forward" else (ffn.inputs if cast else 1) * a
    inside = ffn.kept * a * inner + 2 * a * rows if kind != "feed_forward" else 0.0
    norms = 4 * (model.stream_norms * dim / tensor + heads)
    return norms + (of_attention + of_ffn) * dim + attention + inside


def repeated_keys(job: Job, layout: Layout) -> float:
    """Return how often all_to_all repeats each key head, so that every context rank gets one."""
    return max(1.0, layout.parallel.context * layout.parallel.tensor / job.model.kv_heads)


def _kept_keys(job: Job, layout: Layout) -> float:
    """Return the keys that a block keeps, over those of the rank's positions."""
    method = layout.parallel.context_method
    if method == "ring":
        return 1.0
    return float(layout.parallel.context) if method == "all_gather" else repeated_keys(job, layout)


def computed_again(job: Job, layout: Layout) -> tuple[float, float, float]:
    """Return how many forward passes of (products, element-wise, attention) the backward pass repeats.

    The last product of a recomputed part is counted, though torch stops before it.

    Args:
        job: the run.
        layout: its layout.
    """
    model, memory = job.model, layout.memory
    kind = memory.activation_checkpointing
    if kind in ("full", "offload", "every_nth"):
        share = share_recomputed(job, layout)
        return share, share, share
    sizes, traffic = product_sizes(job), traffic_of_parts(job, layout.parallel.tensor)
    if kind == "selective":
        recomputed = sum(size for size, kept in zip(sizes, _products_kept(model, layout)) if not kept)
        return recomputed / sum(sizes), 1.0, 0.0
    of_attention = sum(sizes[:len(ATTENTION)]) / sum(sizes)
    if kind == "attention":
        return of_attention, traffic["attention"] / sum(traffic.values()), 1.0
    if kind == "feed_forward":
        return 1 - of_attention, traffic["feed_forward"] / sum(traffic.values()), 0.0
    return 0.0, 0.0, 0.0


ATTENTION = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
"""The products of attention, as every family's `Model.tensor_parallel` names them, in their order."""


def traffic_of_parts(job: Job, tensor: int) -> dict[str, float]:
    """Return the bytes per token and block that a forward pass moves outside matrix products and attention.

    With element-wise operations fused: a residual is read with the branch that is added, written and normed, (2 r + 2
    a) D/T, twice; RoPE, in attention, reads and writes 2 a (H + K) E/T; SwiGLU 3 a F/T. For each expert of a token a
    row is read and written on its way to the expert, and read on its way back, 3 a D.

    Args:
        job: the run.
        tensor: number of tensor-parallel ranks.
    """
    model, a, r = job.model, job.compute_bytes, job.residual_bytes
    turned = (model.num_heads + model.kv_heads) * model.head_width
    return {"norms": 2 * (2 * r + 2 * a) * model.dim / tensor, "attention": 2 * a * turned / tensor,
            "feed_forward": ((model.FEED_FORWARD.inputs + 1) * a * inner_width(job) / tensor
                             + 3 * a * job.routed_rows.copies * model.dim)}


def inner_width(job: Job) -> float:
    """Return the width of a feed-forward's inner tensors per token, averaged over the blocks."""
    return job.costs.inner / job.model.num_layers


def product_sizes(job: Job) -> list[float]:
    """Return the parameters of a block's matrices that multiply a token, in the order of `product_names`.

    Attention with other matrices than queries, keys, values and output has them in these four's proportions.
    """
    model, matrices = job.model, job.model.FEED_FORWARD.inputs + 1
    query, key = model.num_heads * model.head_width, model.kv_heads * model.head_width
    attention = [float(model.dim * width) for width in (query, key, key, query)]
    if isinstance(model, MixtureFamily):
        attention = [size * model.attention_matrices / sum(attention) for size in attention]
    of_ffn = job.costs.active / model.num_layers - sum(attention)
    return [*attention, *[of_ffn / matrices] * matrices]


def product_names(model: Model) -> list[str]:
    """Return the names of a block's matrices, in the order in which a block computes their products."""
    if routed_rows(model).copies:
        return [*ATTENTION, "ffn.experts.w1", "ffn.experts.w3", "ffn.experts.w2"]
    cuts = {name: cut for name, cut in model.tensor_parallel(0).items() if name not in ATTENTION}
    return [*ATTENTION, *(name for kind in ("columns", "rows") for name, cut in cuts.items() if cut == kind)]


def _products_kept(model: Model, layout: Layout) -> list[bool]:
    """Return which products selective checkpointing keeps: all that are one operator with a collective."""
    memory, every = layout.memory, layout.parallel.async_tensor
    return [every or memory.keeps_product(number, name) for number, name in enumerate(product_names(model), 1)]
