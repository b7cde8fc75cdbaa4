"""Low-rank updates of linear layers, of the stacked matrices of experts and of the embedding: LoRA and DoRA.

R is the rank, I and O are the widths of a layer's input and output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from tidewheel.models.adapting.added import Added, Cuts
from tidewheel.models.adapting.shards import cut_of, like, own
from tidewheel.models.blocks.embedding import Embedding

if TYPE_CHECKING:
    from tidewheel.models.adapter import Adapter

Product = Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]
"""From x [..., N], a matrix [M, N] and the name of the parameter to [..., M]."""


def _linear(x: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
    return F.linear(x, weight)


class LowRank(Added):
    """scale B A x beside a layer's own output. For an embedding, whose matrix is [I, O], x is the token's unit vector.

    With the start pissa, B A begins with the largest singular values of the layer's matrix, and B0 A0, with which it
    began, is subtracted. Each of E experts has its own A and B: the parameters have E before their own dimensions.

    Args:
        adapter: see `Added`, also for the next two.
        name: of the module.
        module: to adapt.
        scale: factor of the update.
        pissa: whether the start is pissa.
    """

    a: nn.Parameter
    b: nn.Parameter
    a0: nn.Parameter
    b0: nn.Parameter
    CUTS: ClassVar[Cuts] = {0: {"b": 0, "b0": 0, "m": 0}, 1: {"a": 1, "a0": 1}}

    def __init__(self, adapter: Adapter, name: str, module: nn.Module, *, scale: float, pissa: bool) -> None:
        super().__init__(adapter, name, module)
        self.scale, self.pissa = scale, pissa
        self.of_embedding = isinstance(module, Embedding)
        if self.of_embedding:
            self.CUTS = {0: {"a": 1, "a0": 1}}  # type: ignore[misc]

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
        rank = self.a.shape[-2]
        root = s[..., :rank].sqrt()
        a = (root[..., None] * v[..., :rank, :]).float()
        b = (u[..., :rank] * root[..., None, :] / self.scale).float()
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
    """DoRA: rows of W + scale B A, each scaled to the length m. See `LowRank`."""

    m: nn.Parameter
    CAN_UNMERGE = False  # the lengths of the rows of W are lost

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
