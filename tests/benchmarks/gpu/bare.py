"""A loop without any library around it: what plain torch reaches with the tricks that are known to pay.

- bf16 weights with fp32 copies and moments, which one compiled pass updates, with the clip factor folded in.
- One product for q, k and v, and one for the gate and the up projection. Blocks are compiled one by one.
- Documents go through variable-length flash attention with offsets made in advance, whole rows through causal SDPA.
- Logits exist for a part of the tokens only, and the loss makes its gradients in the forward pass.

Nothing is checked, saved, guarded or reported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.benchmarks.gpu.case import SHAPES, Case, Documents, batches
from tests.benchmarks.gpu.timing import measure
from tidewheel.config import build
from tidewheel.models.families import Llama

BETAS, EPSILON, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0
LOSS_TOKENS = 8192
"""Tokens whose logits exist at a time."""
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From q [B, L, H, E] and k, v [B, L, K, E] to [B, L, H, E]."""


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention within whole rows; see `Attend`.

    Args:
        q: queries.
        k: keys.
        v: values.
    """
    laid = [x.transpose(1, 2) for x in (q, k, v)]
    with sdpa_kernel(BACKENDS, set_priority=True):
        return F.scaled_dot_product_attention(*laid, is_causal=True, enable_gqa=True).transpose(1, 2)


def varlen_kernel(length: int) -> Callable[..., torch.Tensor]:
    """Return flash attention over documents laid end to end: from q, k, v [B, L, heads, E] and offsets to [B, L, H, E].

    Args:
        length: of a row, the longest possible document.
    """
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 takes fewer key heads without a word
        options["enable_gqa"] = True

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        laid = [x.flatten(0, 1) for x in (q, k, v)]
        out: Any = varlen_attn(*laid, offsets, offsets, length, length, **options)
        return out.view(q.shape)

    return attend


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return what `varlen_kernel` computes, by a mask over all tokens; for tiny shapes on a CPU.

    Args:
        q: queries.
        k: keys.
        v: values.
        offsets: starts of documents.
    """
    places = torch.arange(q.shape[0] * q.shape[1])
    document = torch.searchsorted(offsets, places, right=True)
    mask = (document[:, None] == document) & (places[:, None] >= places)
    laid = [x.flatten(0, 1).transpose(0, 1)[None] for x in (q, k, v)]
    return F.scaled_dot_product_attention(*laid, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1).view(q.shape)


class Norm(nn.Module):
    """RMSNorm in fp32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.epsilon).to(x.dtype)


class Block(nn.Module):
    """A block with fused projections."""

    def __init__(self, shape: Llama) -> None:
        super().__init__()
        width = shape.head_width
        self.heads = [shape.num_heads, shape.kv_heads, shape.kv_heads]
        self.width = width
        self.attention_norm, self.ffn_norm = Norm(shape.dim, shape.norm_epsilon), Norm(shape.dim, shape.norm_epsilon)
        self.qkv = nn.Linear(shape.dim, width * sum(self.heads), bias=False)
        self.out = nn.Linear(width * shape.num_heads, shape.dim, bias=False)
        self.gate_up = nn.Linear(shape.dim, 2 * shape.ffn_width, bias=False)
        self.down = nn.Linear(shape.ffn_width, shape.dim, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, attend: Any, *given: Any) -> Any:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.width))
        q, k, v = heads.split(self.heads, dim=-2)
        mixed = attend(_rotated(q, cosine, sine), _rotated(k, cosine, sine), v, *given)
        x = x + self.out(mixed.flatten(-2))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1).to(x.dtype)


class Model(nn.Module):
    """The decoder up to its last norm, and the output matrix."""

    def __init__(self, shape: Llama, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.dim, shape.norm_epsilon)
        self.output = nn.Linear(shape.dim, vocabulary, bias=False)
        residual = 0.02 / (2 * shape.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=residual if name.endswith(("out.weight", "down.weight")) else 0.02)

    def forward(self, tokens: torch.Tensor, *given: Any) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, *given)
        return self.norm(x)


def _token_gradients(logits: torch.Tensor, targets: torch.Tensor, count: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of token losses over `count`, and its gradient with respect to the logits."""
    wide = logits.float()
    logarithm = torch.logsumexp(wide, dim=-1, keepdim=True)
    at_target = torch.arange(wide.shape[-1], device=wide.device) == targets[:, None]
    loss = (logarithm - torch.where(at_target, wide, 0.0).sum(dim=-1, keepdim=True)).sum() / count
    return loss, (((wide - logarithm).exp() - at_target.float()) / count).to(logits.dtype)


class MeanLoss(torch.autograd.Function):
    """Mean cross-entropy of x @ weight.T, part by part, with both gradients made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, gradients: Any) -> torch.Tensor:
        x_gradient = torch.empty_like(x)
        sums, weight_gradient = torch.zeros((), device=x.device), None
        parts = (x.split(LOSS_TOKENS), targets.split(LOSS_TOKENS), x_gradient.split(LOSS_TOKENS))
        for rows, wanted, room in zip(*parts):
            loss, gradient = gradients(rows @ weight.T, wanted, float(len(x)))
            sums += loss
            torch.mm(gradient, weight, out=room)
            if x.is_cuda:
                share = torch.mm(gradient.T, rows, out_dtype=torch.float32)
            else:
                share = gradient.T.float() @ rows.float()
            weight_gradient = share if weight_gradient is None else weight_gradient.add_(share)
        assert weight_gradient is not None
        ctx.save_for_backward(x_gradient, weight_gradient.to(weight.dtype))
        return sums

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        x_gradient, weight_gradient = ctx.saved_tensors  # the loss is the last node, so `upstream` is 1
        return x_gradient, weight_gradient, None, None


def _update(weight: torch.Tensor, exact: torch.Tensor, first: torch.Tensor, second: torch.Tensor,
            gradient: torch.Tensor, scale: torch.Tensor, corrections: torch.Tensor, rate: float, decay: float) -> None:
    """Do AdamW on one flat parameter."""
    wide = gradient.float() * scale
    first.lerp_(wide, 1 - BETAS[0])
    second.lerp_(wide * wide, 1 - BETAS[1])
    step = (first / corrections[0]) / ((second / corrections[1]).sqrt() + EPSILON)
    exact.sub_(rate * (step + decay * exact))
    weight.copy_(exact)


class AdamW:
    """AdamW on fp32 copies of bf16 weights."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.rate, self.count = case.learning_rate, 0
        self.update = torch.compile(_update, dynamic=True) if case.compiled else _update
        self.parameters = list(model.parameters())
        self.exact = [parameter.detach().float().flatten() for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.data = parameter.data.to(torch.bfloat16)
        self.moments = [(torch.zeros_like(exact), torch.zeros_like(exact)) for exact in self.exact]

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        gradients = [parameter.grad for parameter in self.parameters]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True).float()
        scale = (CLIP / (norm + 1e-6)).clamp(max=1.0)
        corrections = torch.tensor([1 - beta**self.count for beta in BETAS]).to(scale.device, non_blocking=True)
        for parameter, exact, moments in zip(self.parameters, self.exact, self.moments):
            assert parameter.grad is not None
            decay = DECAY if parameter.ndim > 1 else 0.0
            self.update(parameter.data.view(-1), exact, *moments, parameter.grad.view(-1), scale, corrections,
                        self.rate, decay)
            parameter.grad = None


def train(case: Case) -> dict[str, Any]:
    """Measure the loop."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    shape = build(Llama, SHAPES[case.shape])
    with torch.device(case.device):
        model = Model(shape, case.vocabulary)
    optimizer = AdamW(model, case)
    for block in model.blocks if case.compiled else ():
        block.compile(fullgraph=True)
    gradients = torch.compile(_token_gradients) if case.compiled else _token_gradients
    data = [_prepared(documents, shape, case) for documents in batches(case)]

    def step(index: int) -> torch.Tensor:
        tokens, targets, given = data[index % len(data)]
        x = model(tokens, *given)
        loss = MeanLoss.apply(x.flatten(0, 1), model.output.weight, targets, gradients)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return measure(step, case)


def _prepared(documents: Documents, shape: Llama, case: Case) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Return tokens, flat targets and what each block is given, on the device."""
    tokens, following, positions = (torch.from_numpy(array).to(case.device, torch.int64) for array in (
        documents.tokens, documents.following, documents.positions))
    frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_width, 2, device=case.device) / shape.head_width)
    angles = (positions[..., None] * frequencies)[:, :, None]
    given: tuple[Any, ...] = (angles.cos(), angles.sin(), causal)
    if case.document:
        attend = varlen_kernel(case.length) if case.device == "cuda" else masked
        starts = torch.from_numpy(documents.starts())
        offsets = torch.full((2 * case.tokens // case.document + 2 * case.rows + 16,), case.tokens, dtype=torch.int32)
        offsets[:len(starts)] = starts  # padded with empty documents, so that every batch has the same shape
        given = (angles.cos(), angles.sin(), attend, offsets.to(case.device))
    return tokens, following.flatten(), given
