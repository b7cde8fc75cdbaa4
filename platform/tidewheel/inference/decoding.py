"""Decode one token for each row of a group: the arithmetic of a decoder's blocks without its modules.

For a small model on a CPU most of the time of a token is spent between the products: module calls, copies of keys and
weights, padding. `Weights` holds what one version of a model needs for all groups. `Rows` holds the keys and values of
the rows of one group, keys transposed, so that the products of a single query need no padding.

The numbers are those of the modules, and with exact attention their bits: each step of the arithmetic is the same, and
products are computed in a way that was found to have the bits of training (`inference.matrices`,
`inference.single_queries`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tidewheel.inference.matrices import Matrix
from tidewheel.inference.passes import counted
from tidewheel.inference.single_queries import Way, attention_for, filled, single
from tidewheel.models.attention import document_attention, document_mask
from tidewheel.models.blocks import Attention, Block, GatedFeedForward, Mlp, RMSNorm, ZeroCentredRMSNorm
from tidewheel.models.config import Rope
from tidewheel.models.decoder import Decoder
from tidewheel.models.loss import soft_capped
from tidewheel.models.rope import RopeTable
from tidewheel.train.precision import Precision

VECTORS = 64
"""Loops of torch take up to this many numbers at once (two vectors of 16-bit ones), and compute those that are left
with other code, whose exponentials have other bits. Training has none left over: its rows are padded."""
PRODUCTS: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Precisions that are decoded here, with the dtype of their products."""
Function = Callable[[torch.Tensor], torch.Tensor]
Turns = tuple[torch.Tensor, torch.Tensor]
"""(cos, cos) and (-sin, sin) of some positions, fp32 [positions, 1, E]."""
Multiply = Callable[[Matrix, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """A block, ready to decode; None stands for a norm that it does not have."""

    index: int
    before_attention: Function | None
    qkv: Matrix
    q_norm: Function | None
    k_norm: Function | None
    norms_width: bool
    wo: Matrix
    after_attention: Function | None
    before_ffn: Function | None
    up: Matrix
    activation: Function
    is_gated: bool
    down: Matrix
    after_ffn: Function | None
    scale: float
    rope: Rope | None


Attend = Callable[[Layer, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From a layer, its queries [n, H, E] and new keys and values [n, K, E] to [n, H, E]."""


class Weights:
    """The weights of one version of a model, ready to decode with; see `Weights.of`.

    Args:
        model: a whole decoder. When its weights change, new `Weights` are needed; see `prepared`.
        precision: of the products.
    """

    def __init__(self, model: Decoder, precision: Precision) -> None:
        config = model.config
        self.model, self.precision, self.dtype = model, precision, PRODUCTS[precision]
        self.exact = config.attention == "exact"
        self.heads, self.kv_heads, self.width = config.num_heads, config.kv_heads, config.head_width
        self.layers = [self._layer(*item) for item in model.layers()]
        assert model.norm is not None
        self.norm = _function(model.norm)
        self.output = Matrix([(model.weight, None)], self.dtype, exact=self.exact)
        self._threads = torch.get_num_threads()
        self._state = _state(model)
        self._turns: dict[int, dict[Rope | None, Turns | None]] = {}  # by capacity

    @classmethod
    def of(cls, model: Decoder, precision: Precision) -> Weights | None:
        """Return a model's weights; None if it has parts, a device or a precision that only its modules compute.

        Args:
            model: a whole decoder.
            precision: of the products.
        """
        if precision not in PRODUCTS or model.embedding is None or model.norm is None:
            return None
        if any(value.device.type != "cpu" or value.dtype != torch.float32 for value in model.parameters()):
            return None
        if not all(_is_plain(model, *item) for item in model.layers()):
            return None
        return cls(model, precision)

    @property
    def is_current(self) -> bool:
        """Return whether the model still has the weights that these were made of, and torch as many threads.

        Which products have the bits of training depends on the number of threads.
        """
        return self._threads == torch.get_num_threads() and self._state == _state(self.model)

    def turns(self, capacity: int) -> dict[Rope | None, Turns | None]:
        """Return the turns of all positions below `capacity`, for each RoPE of the layers; None for no RoPE."""
        if capacity not in self._turns:
            positions = torch.arange(capacity)[None]
            tables = {layer.rope: self.model.rope(positions, layer.index) for layer in self.layers}
            self._turns[capacity] = {rope: None if table is None else _turns(table) for rope, table in tables.items()}
        return self._turns[capacity]

    def _layer(self, index: int, block: nn.Module) -> Layer:
        assert isinstance(block, Block)
        attention, ffn = block.attention, block.ffn
        assert isinstance(attention, Attention)
        assert isinstance(ffn, GatedFeedForward | Mlp)
        is_gated = isinstance(ffn, GatedFeedForward)
        inputs = [ffn.w1, ffn.w3] if isinstance(ffn, GatedFeedForward) else [ffn.w1]
        return Layer(
            index, _function(block.attention_norm),
            self._matrix(attention.wq, attention.wk, attention.wv, fused=attention.products.fused),
            _function(attention.q_norm), _function(attention.k_norm), attention.norms_width,
            self._matrix(attention.wo), _function(block.attention_post_norm), _function(block.ffn_norm),
            self._matrix(*inputs, fused=ffn.products.fused), ffn.activation, is_gated, self._matrix(ffn.w2),
            _function(block.ffn_post_norm), self.width ** -0.5 if attention.scale is None else attention.scale,
            self.model.config.rope(index))

    def _matrix(self, *layers: nn.Linear, fused: bool = False) -> Matrix:
        return Matrix([(layer.weight, layer.bias) for layer in layers], self.dtype, exact=self.exact, fused=fused)


def prepared(model: Decoder, precision: Precision) -> Weights | None:
    """Return `Weights.of(model, precision)`, made anew only if those of the last call are not current.

    They stay in memory, on a CPU about as large as the model, until `released`.

    Args:
        model: a whole decoder.
        precision: of the products.
    """
    kept = vars(model).get(_KEPT)
    if isinstance(kept, Weights) and kept.precision == precision and kept.is_current:
        return kept
    released(model)
    weights = Weights.of(model, precision)
    if weights is not None:
        vars(model)[_KEPT] = weights
    return weights


def released(model: Decoder) -> None:
    """Forget what `prepared` has kept for a model."""
    vars(model).pop(_KEPT, None)


_KEPT = "_prepared_to_decode"


def _state(model: Decoder) -> list[tuple[int, int]]:
    """Return what changes whenever a parameter is replaced or written to."""
    return [(value.data_ptr(), value._version) for value in model.parameters()]


def _function(module: nn.Module) -> Function | None:
    """Return what a norm computes, with the bits of its `forward`; None for no norm."""
    if isinstance(module, nn.Identity):
        return None
    if not isinstance(module, RMSNorm) or type(module) not in (RMSNorm, ZeroCentredRMSNorm):
        return module.forward
    weight = module.weight.detach().float()
    if type(module) is ZeroCentredRMSNorm:
        weight = 1 + weight
    shape, epsilon = tuple(weight.shape), module.epsilon

    def normed(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:
            return torch.rms_norm(x, shape, weight, epsilon)
        return torch.rms_norm(x.float(), shape, weight, epsilon).to(x.dtype)

    return normed


def _is_plain(model: Decoder, index: int, block: nn.Module) -> bool:
    """Return whether a block has no part but those of `Layer`."""
    if type(block) is not Block or model.config.window(index) is not None:
        return False
    attention, ffn, rope = block.attention, block.ffn, model.config.rope(index)
    if type(attention) is not Attention or attention.sinks is not None or attention.soft_cap is not None:
        return False
    if not isinstance(ffn, GatedFeedForward | Mlp) or (rope is not None and rope.width != attention.head_dim):
        return False
    linear = (attention.wq, attention.wk, attention.wv, attention.wo, ffn.w1, ffn.w2)
    return all(type(layer) is nn.Linear for layer in linear)


class Rows:
    """The rows of groups, all at one position, and their keys and values.

    Args:
        weights: of the model.
        prompts: token ids of each prompt; all have the same number of them, at least one.
        rows: number of rows of each prompt.
        capacity: most tokens of a row, with the prompt.
    """

    def __init__(self, weights: Weights, prompts: Sequence[Sequence[int]], rows: int, capacity: int) -> None:
        self._weights, self._count, self._capacity = weights, rows, filled(capacity)
        self._tables = weights.turns(self._capacity)
        self._keys: list[torch.Tensor] = []  # [n, K, E, capacity] for each layer
        self._values: list[torch.Tensor] = []  # [n, K, capacity, E]
        self._way: Way = single  # how the newest tokens attend
        self._way_for = (0, 0)  # for this number of rows, and of keys
        self._length = len(prompts[0])
        # of the tokens that are being computed
        self._places = torch.arange(self._length).repeat(len(prompts))
        self.logits = self._prefilled(torch.tensor(prompts)).repeat_interleave(rows, dim=0)
        """Logits behind the newest token of each row, fp32 [n, V]; the rows of a prompt stand together."""

    def select(self, rows: torch.Tensor) -> None:
        """Continue with some of the rows, int64 indices."""
        self._keys = [keys[rows] for keys in self._keys]
        self._values = [values[rows] for values in self._values]

    def step(self, tokens: torch.Tensor) -> None:
        """Compute more tokens of each row, one after the other.

        Args:
            tokens: int64 [n, L].
        """
        for column in tokens.unbind(1):
            at = self._length
            self._length += 1
            self._places = torch.tensor([at])
            with counted(self._weights.model):
                x = self._blocks(self._embedded(column, torch.full_like(column, at)), Matrix.__call__, self._attend)
        self.logits = self._logits(x)

    def _prefilled(self, prompts: torch.Tensor) -> torch.Tensor:
        """Compute each prompt once, int64 [P, L]; return the logits behind them, fp32 [P, V]."""
        kernel, shape = "exact" if self._weights.exact else "masked", prompts.shape
        mask = document_mask(torch.zeros_like(prompts), kernel)

        def attend(layer: Layer, *parts: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in parts)
            self._keep(k, v)
            return document_attention(q, k, v, mask, scale=layer.scale).transpose(1, 2).flatten(0, 1)

        with counted(self._weights.model):
            x = self._blocks(self._embedded(prompts.flatten(), self._places), Matrix.many, attend)
        return self._logits(x.unflatten(0, shape)[:, -1])

    def _keep(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Give each row its prompt's keys and values [P, K, L, E] of a layer, and room behind them."""
        prompts, heads, length, width = k.shape
        keys = k.new_zeros(prompts, self._count, heads, width, self._capacity)
        values = v.new_zeros(prompts, self._count, heads, self._capacity, width)
        keys[..., :length] = k.transpose(2, 3)[:, None]
        values[:, :, :, :length] = v[:, None]
        self._keys.append(keys.flatten(0, 1))
        self._values.append(values.flatten(0, 1))

    def _attend(self, layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return what the newest token of each row sees."""
        every_key, every_value = self._keys[layer.index], self._values[layer.index]
        every_key.select(3, self._length - 1).copy_(k)
        every_value.select(2, self._length - 1).copy_(v)
        shown = filled(self._length)
        keys, values = every_key.narrow(3, 0, shown), every_value.narrow(2, 0, shown)
        if self._way_for != (len(q), shown):
            self._way = attention_for(q, keys, self._weights.exact)
            self._way_for = len(q), shown
        return self._way(q * layer.scale, keys, values, self._length)

    def _embedded(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        embedding = self._weights.model.embedding
        assert embedding is not None
        embedded: torch.Tensor = embedding.forward(tokens, positions)
        return embedded

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        x = x if weights.norm is None else weights.norm(x)
        return soft_capped(weights.output(x.to(weights.dtype)), weights.model.config.logit_soft_cap).float()

    def _blocks(self, x: torch.Tensor, multiply: Multiply, attend: Attend) -> torch.Tensor:
        """Return the residual stream [n, D] behind the blocks, from that before them."""
        dtype, count = self._weights.dtype, len(x)
        turns = {rope: None if table is None else (table[0][self._places], table[1][self._places])
                 for rope, table in self._tables.items()}
        for layer in self._weights.layers:
            inner = x if layer.before_attention is None else layer.before_attention(x)
            out = multiply(layer.qkv, inner if inner.dtype == dtype else inner.to(dtype))
            seen = attend(layer, *self._heads(layer, out, turns[layer.rope]))
            added = multiply(layer.wo, seen.reshape(count, -1))
            x = x + (added if layer.after_attention is None else layer.after_attention(added))
            inner = x if layer.before_ffn is None else layer.before_ffn(x)
            inner = multiply(layer.up, inner if inner.dtype == dtype else inner.to(dtype))
            if layer.is_gated:
                width = inner.shape[1] // 2
                inner = self._activated(layer, inner.narrow(1, 0, width)) * inner.narrow(1, width, width)
            else:
                inner = self._activated(layer, inner)
            added = multiply(layer.down, inner)
            x = x + (added if layer.after_ffn is None else layer.after_ffn(added))
        return x

    def _activated(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """Return the activation of [n, width], with the bits that it has among many rows."""
        rows, width = x.shape
        if not self._weights.exact or width % VECTORS == 0:
            return layer.activation(x)
        missing = -rows % (VECTORS // math.gcd(VECTORS, width))
        return layer.activation(F.pad(x, (0, 0, 0, missing)).contiguous())[:rows]

    def _heads(self, layer: Layer, out: torch.Tensor,
               turns: Turns | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [n, H, E], keys and values [n, K, E] from the first product of a layer."""
        heads, kv_heads, width = self._weights.heads, self._weights.kv_heads, self._weights.width
        parts = out.view(len(out), -1, width)
        both, v = parts.narrow(1, 0, heads + kv_heads), parts.narrow(1, heads + kv_heads, kv_heads)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = both.narrow(1, 0, heads), both.narrow(1, heads, kv_heads)
            if layer.norms_width:
                q, k = layer.q_norm(q.flatten(1)).view_as(q), layer.k_norm(k.flatten(1)).view_as(k)
            else:
                q, k = layer.q_norm(q), layer.k_norm(k)
            both = torch.cat((q, k), dim=1)
        if turns is not None:  # x cos + swapped x (-sin, sin), the sums of `rope.apply_rope`
            wide = both if both.dtype == torch.float32 else both.float()
            half = width // 2
            swapped = torch.cat((wide.narrow(2, half, half), wide.narrow(2, 0, half)), dim=2)
            both = (wide * turns[0]).add_(swapped.mul_(turns[1]))
            both = both if both.dtype == out.dtype else both.to(out.dtype)
        return both.narrow(1, 0, heads), both.narrow(1, heads, kv_heads), v


def _turns(table: RopeTable) -> Turns:
    cos, sin = table.cos[0, 0, :, None], table.sin[0, 0, :, None]
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
