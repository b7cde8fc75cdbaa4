"""Low-rank updates of linear layers, of the stacked matrices of experts and of the embedding: LoRA and DoRA.

R is the rank, I and O are the widths of a layer's input and output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from tidewheel.models.adapting.experts import StackedLinear
from tidewheel.models.adapting.shards import cut_of, like, own
from tidewheel.models.blocks.embedding import Embedding

Product = Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]
"""From x [..., N], a matrix [M, N] and the name of the parameter to [..., M]."""


def _linear(x: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
    return F.linear(x, weight)


class LowRank(nn.Module):
    """scale B A x beside a layer's own output. For an embedding, x is the token's unit vector.

    Args:
        inputs: I.
        outputs: O.
        rank: R.
        scale: factor of the update.
        pissa: begin with the largest singular values of the layer's matrix, and subtract their product.
        of_embedding: the matrix of the module is [I, O].
        stack: dimensions of all parameters before their own: (E,) for E experts.
        device: of the parameters.
    """

    LINEAR_CUTS: ClassVar[dict[int, dict[str, int]]] = {0: {"b": 0, "b0": 0}, 1: {"a": 1, "a0": 1}}
    """Dimension of each parameter that is cut, by that of the layer's matrix."""
    EMBEDDING_CUTS: ClassVar[dict[int, dict[str, int]]] = {0: {"a": 1, "a0": 1}}
    CAN_UNMERGE: ClassVar[bool] = True
    """Whether the layer's matrix follows from the merged one."""
    CHANGES_BIAS: ClassVar[bool] = False
    """Whether `merged` and `unmerged` also take the layer's bias [O]."""

    def __init__(self, inputs: int, outputs: int, rank: int, scale: float, *, pissa: bool = False,
                 of_embedding: bool = False, stack: tuple[int, ...] = (), device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.rank, self.scale, self.pissa, self.of_embedding = rank, scale, pissa, of_embedding
        self.CUTS = self.EMBEDDING_CUTS if of_embedding else self.LINEAR_CUTS
        self.a = nn.Parameter(torch.empty(*stack, rank, inputs, device=device))
        self.b = nn.Parameter(torch.empty(*stack, outputs, rank, device=device))
        if pissa:
            self.a0 = nn.Parameter(torch.empty_like(self.a), requires_grad=False)
            self.b0 = nn.Parameter(torch.empty_like(self.b), requires_grad=False)

    @classmethod
    def of(cls, module: nn.Module, rank: int, scale: float, **options: Any) -> Self:
        """Return the update of a linear layer, an embedding or a stack of experts' matrices; see the class."""
        if isinstance(module, StackedLinear):
            *stack, outputs, inputs = module.weight.shape
            return cls(inputs, outputs, rank, scale, stack=tuple(stack), device=module.weight.device, **options)
        device = next(module.parameters()).device
        if isinstance(module, Embedding):
            return cls(module.num_embeddings, module.embedding_dim, rank, scale, of_embedding=True, device=device,
                       **options)
        assert isinstance(module, nn.Linear)
        return cls(module.in_features, module.out_features, rank, scale, device=device, **options)

    def forward(self, layer: nn.Module, base: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
        """Return the layer's output with the update.

        Args:
            layer: that is adapted.
            base: its own forward pass.
            x: its input, [..., I], or tokens.
            others: further arguments of its forward pass.
        """
        y = base(x, *others)
        if self.of_embedding:
            return y + self._looked_up(layer, x).to(y.dtype) * layer.scale  # type: ignore[operator]
        return y + like(self.update(own(x)), y)

    def update(self, x: torch.Tensor, product: Product = _linear) -> torch.Tensor:
        """Return this rank's part of the update: [..., I] to [..., O].

        Args:
            x: input of the layer.
            product: computes products with this rank's parts of the parameters.
        """
        x = x.to(self.a.dtype) if not torch.is_autocast_enabled(x.device.type) else x
        out = product(product(x, own(self.a), "a"), own(self.b), "b")
        if self.pissa:
            out = out - product(product(x, own(self.a0), "a0"), own(self.b0), "b0")
        return out * self.scale

    def _looked_up(self, layer: Any, tokens: torch.Tensor) -> torch.Tensor:
        out = F.linear(layer.look_up(tokens, self.a.T), own(self.b))
        if self.pissa:
            out = out - F.linear(layer.look_up(tokens, self.a0.T), own(self.b0))
        return out * self.scale

    def start(self, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the initial values that follow from the layer's whole matrix, by parameter.

        PiSSA: with W = U S V', scale B A is the sum of the R largest terms, and A and B have the root of S each.
        """
        if not self.pissa:
            return {}
        matrix = weight_OI.T if self.of_embedding else weight_OI
        u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
        root = s[..., :self.rank].sqrt()
        a = (root[..., None] * v[..., :self.rank, :]).float()
        b = (u[..., :self.rank] * root[..., None, :] / self.scale).float()
        return {"a": a, "b": b, "a0": a, "b0": b}

    def difference(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what is added to the matrix of a layer, [O, I], or of an embedding, [I, O]."""
        product = self.b @ self.a
        if self.pissa:
            product = product - self.b0 @ self.a0
        return self.scale * (product.T if self.of_embedding else product)

    def merged(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return the matrix [O, I] of a layer that needs no adapter, in fp32."""
        return weight_OI.float() + self.difference(weight_OI)

    def unmerged(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return the matrix from which `merged` makes this one, in fp32."""
        return weight_OI.float() - self.difference(weight_OI)


class Directed(LowRank):
    """DoRA: rows of W + scale B A, each scaled to the length m.

    Args:
        inputs: I.
        outputs: O.
        rank: R.
        scale: factor of the update.
        device: of the parameters.
    """

    LINEAR_CUTS: ClassVar[dict[int, dict[str, int]]] = {0: {"b": 0, "m": 0}, 1: {"a": 1}}
    CAN_UNMERGE: ClassVar[bool] = False  # the lengths of the rows of W are lost

    def __init__(self, inputs: int, outputs: int, rank: int, scale: float, *,
                 device: torch.device | str = "cpu") -> None:
        super().__init__(inputs, outputs, rank, scale, device=device)
        self.m = nn.Parameter(torch.empty(outputs, device=device))

    def forward(self, layer: nn.Module, base: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
        y = base(x, *others)
        factor_O = own(self.m) / self._lengths(layer.weight)  # type: ignore[arg-type]
        whole = own(y)
        product = whole if layer.bias is None else whole - own(layer.bias)  # type: ignore[arg-type]
        update = self.update(own(x))
        return like(whole + ((factor_O - 1) * product + factor_O * update).to(whole.dtype), y)

    @torch.no_grad()
    def _lengths(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the lengths of this rank's rows of W + scale B A, [O]."""
        part = own(weight).float() + self.scale * (own(self.b) @ own(self.a)).float()
        if cut_of(weight) != 1:
            return part.norm(dim=1)
        assert isinstance(weight, DTensor)
        squares = part.square().sum(dim=1)
        dist.all_reduce(squares, group=weight.device_mesh.get_group())
        return squares.sqrt()

    def start(self, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"m": weight_OI.float().norm(dim=1)}

    def merged(self, weight_OI: torch.Tensor) -> torch.Tensor:
        whole = super().merged(weight_OI)
        return whole * (self.m / whole.norm(dim=1))[:, None]
