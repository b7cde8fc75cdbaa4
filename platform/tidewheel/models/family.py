"""The base of model families: a part that builds the blocks of a decoder and declares its layout and costs.

    class Gelu(tw.Model):
        "A decoder with biases and GELU."
        FEED_FORWARD = tw.FeedForwardShape(inputs=1, kept=2, kept_compiled=1)

        def block(self, layer):
            from tidewheel.models.blocks import Attention, Block
            return Block(self, Attention(self), Mlp(self.dim, self.ffn_width))

        def tensor_parallel(self, layer):
            return {**super().tensor_parallel(layer), "ffn.up": "columns", "ffn.down": "rows"}

The decoder (`models/decoder.py`) has the embedding, attention masks, the final norm, the output and the loss. Pipeline
and context parallelism, FSDP2, checkpoints and resharding work for every family. Nothing here imports torch before a
block is built.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from tidewheel.config import Setting
from tidewheel.models.config import Rope
from tidewheel.models.costs import FeedForwardShape, LayerCosts
from tidewheel.models.huggingface_form import HuggingFaceForm
from tidewheel.models.rope_scaling import RopeScaling
from tidewheel.parts import name_of
from tidewheel.versions import Version

if TYPE_CHECKING:
    from torch import nn

Cut = Literal["gathered", "columns", "rows", "positions", "added", "heads", "width", "per_head", "whole", "experts"]
"""How tensor parallelism treats a module of a block.

gathered: the module takes the residual stream of all positions. columns: a linear layer, sharded by its outputs. rows:
a linear layer, sharded by its inputs; its result is summed and sharded by positions. positions, heads: a norm of the
residual stream, or of heads, that every rank holds whole. added: a norm of what a part adds to the residual stream,
that every rank holds whole. width: a norm over all heads together, sharded like the heads. per_head: parameters with a
value for each query head, sharded like the heads. experts: a mixture of experts, whose experts are sharded by their
inner width. whole: a module that every rank holds whole, and that reads parameters by itself: each rank has the part
of its gradient through the rank's heads.
"""


KERNELS = ("attention", "flash_attention", "fused_products")
"""Settings of a model that change only speed and rounding."""


class Model(HuggingFaceForm):
    """Base of every model family: the shape of a pre-norm decoder with RoPE and grouped-query attention."""

    VERSION: ClassVar[Version] = Version("decoder")
    """Version of what all families share: initial weights, embedding, RoPE, attention, norms and output."""
    PRESETS: ClassVar[Mapping[str, Mapping[str, Setting]]] = {}
    """Named shapes of this family, for `preset`."""
    FEED_FORWARD: ClassVar[FeedForwardShape]
    """Costs of its feed-forward."""
    RESIDUAL_OUTPUTS: ClassVar[tuple[str, ...]] = ("attention.wo.weight",)
    """Suffixes of the names of matrices that write to the residual stream. Their initial values are smaller."""
    NORM_WEIGHT: ClassVar[float] = 1.0
    """Initial value of the weights of norms."""

    preset: str = Field(default="", exclude=True)
    """Start from a named shape of the family (`PRESETS`); other keys change it."""
    vocabulary_size: int | None = Field(default=None, ge=2)
    """Rows of the embedding; default: the padded vocabulary of the shard set."""
    dim: int = Field(default=256, ge=8)
    """Width of the residual stream."""
    num_layers: int = Field(default=4, ge=1)
    """Number of blocks."""
    num_heads: int = Field(default=4, ge=1)
    """Query heads."""
    num_kv_heads: int | None = Field(default=None, ge=1)
    """Key and value heads, each shared by num_heads / num_kv_heads query heads; default: num_heads."""
    head_dim: int | None = Field(default=None, ge=2)
    """Width of a head, even; default: dim / num_heads."""
    ffn_dim: int | None = Field(default=None, ge=8)
    """Inner width of the feed-forward; default: the family's `ffn_width`."""
    max_sequence_length: int = Field(default=8192, ge=2)
    """Longest sequence; sequences may be shorter."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the RoPE frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scale RoPE for longer sequences: kind linear, dynamic, yarn or (the default) llama3."""
    norm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Share one matrix between the embedding and the output."""
    init_std: float | None = Field(default=None, gt=0)
    """Standard deviation of initial weights; default: 1 / sqrt(dim). That of projections into the residual stream is
    divided by sqrt(2 num_layers)."""
    init_from: str = ""
    """Start with the weights of a checkpoint: the URI of a run (its newest checkpoint is taken), of
    RUN/checkpoints/step_00000100, or of an imported model (`tidewheel checkpoint import`)."""
    attention: Literal["auto", "masked", "flex", "varlen", "blockwise", "exact"] = "auto"
    """Attention kernel: a dense mask, FlexAttention with a block mask, flash attention over documents of varying
    length (16-bit, CUDA), or plain torch block by block (CPU, long rows). auto: the best one for the device. It changes
    only speed and rounding."""
    flash_attention: Literal["auto", "FA2", "FA3", "FA4"] = "auto"
    """Implementation of flash attention: torch's own (FA2), or one that is installed beside torch. auto: the fastest
    one for the GPU that is installed (`models/attention_kernels.py`). It changes only speed and rounding."""
    fused_products: bool = False
    """Compute queries, keys and values as one matrix product, and both input products of a gated feed-forward as
    another. Checkpoints are the same. It changes only speed and rounding. Not with fp8, which scales each matrix by
    itself."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _from_preset(cls, values: Any) -> Any:
        name = values.get("preset") if isinstance(values, dict) else None
        if not name:
            return values
        if name not in cls.PRESETS:
            near = difflib.get_close_matches(str(name), cls.PRESETS, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no preset {name!r}{hint}; presets: {', '.join(cls.PRESETS) or 'none'}")
        return {**cls.PRESETS[name], **values}

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Model:
        if not hasattr(type(self), "FEED_FORWARD") or type(self).block is Model.block:
            raise ValueError("a model family has FEED_FORWARD = tw.FeedForwardShape(...) and a method block(layer)")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.kv_heads}")
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(f"dim {self.dim} is not a multiple of num_heads {self.num_heads}; set head_dim")
        if self.head_width % 2:
            raise ValueError(f"the head width {self.head_width} is odd; RoPE rotates pairs")
        return self

    # -- what a family defines -----------------------------------------------------------------
    def block(self, layer: int) -> nn.Module:
        """Return one block with uninitialised parameters: forward(x [B, L, D], rope, mask) -> [B, L, D].

        A mixture of experts returns (x, its routing). It is called for each layer, perhaps on the meta device.

        Args:
            layer: index of the block, from 0.
        """
        raise NotImplementedError

    def norm(self, width: int | None = None) -> nn.Module:
        """Return a norm with uninitialised parameters; default: RMSNorm.

        Args:
            width: of the input; default: `dim`.
        """
        from tidewheel.models.blocks.norms import RMSNorm

        return RMSNorm(width or self.dim, self.norm_epsilon)

    def window(self, layer: int) -> int | None:
        """Return the tokens that a token of a layer sees, itself included; None: all earlier ones of its document."""
        return None

    def rope(self, layer: int) -> Rope | None:
        """Return the rotary position embedding of a layer; None: it has none."""
        return Rope(self.head_width, self.rope_theta, self.rope_scaling, self.max_sequence_length)

    def tensor_parallel(self, layer: int) -> Mapping[str, Cut]:
        """Return how tensor parallelism treats the modules of a layer's block, by name. Other modules stay whole."""
        return {"attention_norm": "positions", "attention": "gathered", "attention.wq": "columns",
                "attention.wk": "columns", "attention.wv": "columns", "attention.wo": "rows",
                "ffn_norm": "positions", "ffn": "gathered"}

    def extra_parameters(self) -> tuple[int, int]:
        """Return the number of parameters of a block besides its matrices and its two norms.

        Returns:
            The number that tensor parallelism shards (biases of layers sharded by columns), and the number that each
            rank holds whole (biases of layers sharded by rows, additional norms).
        """
        return 0, 0

    def layer_costs(self, layer: int) -> LayerCosts:
        """Return the parameters of a layer's block, without building it. A mixture of experts overrides it."""
        attention = 2 * self.dim * self.head_width * (self.num_heads + self.kv_heads)
        matrices = attention + (self.FEED_FORWARD.inputs + 1) * self.dim * self.ffn_width
        cut, whole = self.extra_parameters()
        return LayerCosts(matrices, matrices, cut=cut, whole=2 * self.dim + whole, inner=self.ffn_width)

    @property
    def ffn_width(self) -> int:
        """Return the inner width of the feed-forward."""
        return self.ffn_dim or 4 * self.dim

    @property
    def stream_norms(self) -> int:
        """Return the number of norms of a block that take tensors of width `dim`."""
        return 2

    @property
    def normed_heads(self) -> int:
        """Return the number of query and key heads that a block normalises."""
        return 0

    @property
    def learned_positions(self) -> int:
        """Return the number of learned positions, which the embedding adds; 0: none."""
        return 0

    @property
    def embedding_scale(self) -> float:
        """Return the factor of the embedding's rows."""
        return 1.0

    @property
    def logit_soft_cap(self) -> float | None:
        """Return c, if the logits are c tanh(logits / c)."""
        return None

    @property
    def plain_attention(self) -> bool:
        """Return whether attention weights are softmax(scale q k) in every layer, without soft-capping and sinks."""
        return True

    # -- what follows from the settings --------------------------------------------------------
    @property
    def kv_heads(self) -> int:
        """Return the number of key and value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """Return the width of a head."""
        return self.head_dim or self.dim // self.num_heads

    @property
    def weight_std(self) -> float:
        """Return the standard deviation of initial weights."""
        return self.init_std or self.dim**-0.5

    def costs(self, layers: Iterable[int] | None = None) -> LayerCosts:
        """Return the parameters of several blocks together; default: of all.

        Args:
            layers: their indices.
        """
        chosen = range(self.num_layers) if layers is None else layers
        return sum((self.layer_costs(layer) for layer in chosen), LayerCosts(0, 0))

    def parameters(self, vocabulary_size: int) -> int:
        """Return the number of parameters of the whole model, without building it.

        Args:
            vocabulary_size: rows of the embedding.
        """
        ends = vocabulary_size * self.dim * (1 if self.tie_embeddings else 2) + self.learned_positions * self.dim
        return self.costs().parameters + ends + self.norm_parameters

    @property
    def norm_parameters(self) -> int:
        """Return the number of parameters of the final norm."""
        return self.dim

    def shape(self) -> dict[str, Setting]:
        """Return the settings that decide what the model computes.

        `KERNELS` and the source of the initial weights do not. The family's name is under `kind` unless it
        is the default.
        """
        from tidewheel.models.families import DEFAULT

        name = name_of(type(self))
        kind = {} if name == DEFAULT else {"kind": name}
        return {**kind, **self.model_dump(mode="json", exclude={*KERNELS, "init_from"})}

    def matmul_parameters(self, vocabulary_size: int) -> int:
        """Return the number of parameters that multiply a token: blocks and output matrix, not the embedding.

        Of a mixture of experts, those of the experts that a token passes.
        """
        return self.costs().active + vocabulary_size * self.dim

    def flops_per_token(self, vocabulary_size: int, sequence_length: int) -> int:
        """Return training FLOPs per token: 6 N + 12 layers x heads x head width x L.

        N is `matmul_parameters`. Attention counts as full and recomputation does not count (the PaLM convention,
        https://arxiv.org/abs/2204.02311 appendix B). In a layer with a window, L is at most the window.

        Args:
            vocabulary_size: rows of the output matrix.
            sequence_length: L.
        """
        seen = sum(min(self.window(layer) or sequence_length, sequence_length) for layer in range(self.num_layers))
        attention = 12 * self.num_heads * self.head_width * seen
        return 6 * self.matmul_parameters(vocabulary_size) + attention
