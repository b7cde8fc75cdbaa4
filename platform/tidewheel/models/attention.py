"""Document-masked causal attention: a token sees itself and earlier tokens of its own document, nothing else.

The one place that chooses a kernel. The boolean mask is built once per batch and shared by all layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

PLAIN_LENGTH = 1024
"""Up to this length bf16 attention on CPU is two matrix products and a softmax: its oneDNN products take a third of
the time of the fused CPU kernel (measured: B 8, L 256, 3 heads of 64, forward and backward, 7.5 against 20.8 ms)."""


def document_mask(segment_ids: torch.Tensor) -> torch.Tensor:
    """Who may see whom.

    Args:
        segment_ids: [B, L] integers, one value per document in a row; padding has its own (-1).

    Returns:
        [B, 1, L, L] bool, True where query i may see key j. Padding sees padding, so no row is empty (an empty
        softmax is not a number); its outputs are never used.
    """
    length = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).tril()
    return (same & causal)[:, None]


def document_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention under `mask`.

    Args:
        q: [B, H, L, D].
        k, v: [B, K, L, D]; head h of q uses head h // (H / K).
        mask: from `document_mask`.

    Returns:
        [B, H, L, D].
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] <= PLAIN_LENGTH:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        return scores.masked_fill(~mask, -torch.inf).softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
