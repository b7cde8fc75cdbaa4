"""Embedding, logits and loss of a vocabulary that is sharded over a tensor-parallel group.

Rank t of T holds rows [t V/T, (t+1) V/T) of the embedding and of the output matrix (one matrix if they are tied). From
the other ranks' logits the loss needs three numbers per token: the maximum, the sum of exponentials and the target's
logit. So no rank ever holds whole logits (Megatron-LM, https://arxiv.org/abs/1909.08053, section 3).

Suffixes of names give shapes: B rows, L positions, N = B L, D model width, V vocabulary, S = V/T this rank's shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tidewheel.models.blocks.embedding import Embedding, look_up
from tidewheel.models.loss import IGNORED, TokenLoss, chunk_rows, linear_cross_entropy, minus_one, soft_capped
from tidewheel.models.noise import EmbeddingNoise
from tidewheel.models.row_losses import RowLosses


def shard_rows(weight: torch.Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """Return [V, D] as a DTensor parameter; each rank holds [V/T, D]."""
    return nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None))


class VocabularyEmbedding(Embedding):
    """An embedding with sharded rows and an output sharded by positions; replaces `Embedding`.

    With torch's `RowwiseParallel`, every rank computes the gradient of all V rows of an embedding. Here each rank
    computes that of its own rows.
    """

    def __init__(self, whole: Embedding, mesh: DeviceMesh) -> None:
        nn.Module.__init__(self)  # the parameters are those of `whole`
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.weight, self.mesh, self.scale = shard_rows(whole.weight, mesh), mesh, whole.scale
        self.positions = None if whole.positions is None else shard_rows(whole.positions, mesh)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None,
                noise: EmbeddingNoise | None = None) -> torch.Tensor:
        """Return the embeddings [B, L/T, D] of int64 [B, L]; L must be a multiple of T.

        Args:
            tokens: int64.
            positions: integers, needed if positions are learned; the number of these is a multiple of T.
            noise: of all L positions, is added to the result.
        """
        part_BLD = self._own(tokens, self.weight, self.output_dtype)
        if self.scale != 1.0:
            part_BLD = part_BLD * self.scale
        if self.positions is not None:
            assert positions is not None
            part_BLD = part_BLD + self._own(positions, self.positions, self.output_dtype)
        own_BLD = self._sum(part_BLD).clone()  # FSDP2 cannot guard a view
        return own_BLD if noise is None else noise.added(own_BLD, self.mesh.get_local_rank())

    def look_up(self, tokens: torch.Tensor, rows_VN: torch.Tensor) -> torch.Tensor:
        """Return the rows [B, L/T, N] of this rank's positions; see `Embedding.look_up`."""
        return self._sum(self._own(tokens, rows_VN))

    def _sum(self, part_BLD: torch.Tensor) -> torch.Tensor:
        """Return this rank's positions [B, L/T, D] of the sum over ranks."""
        part = DTensor.from_local(part_BLD, self.mesh, [Partial()], run_check=False)
        return part.redistribute(placements=[Shard(1)]).to_local()

    def _own(self, ids_BL: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the rows of a sharded matrix that this rank has, [B, L, D], and zeros for the others."""
        rows_SD = _local(rows)
        row_BL, here_BL = _own_rows(ids_BL, rows_SD.shape[0], self.mesh)
        return look_up(row_BL, rows_SD, dtype) * here_BL[..., None]


def whole_logits(x_BLD: torch.Tensor, weight_VD: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return whole logits [B, L, V] on every rank, for text generation.

    Args:
        x_BLD: hidden states, sharded by positions.
        weight_VD: output matrix, sharded by rows.
        mesh: the tensor-parallel group.
    """
    logits_BLS = F.linear(all_positions(x_BLD, mesh), _local(weight_VD))
    return DTensor.from_local(logits_BLS, mesh, [Shard(2)], run_check=False).full_tensor()


class VocabularyLoss(nn.Module):
    """The loss over sharded logits, equal on every rank of the group; replaces `models.loss.TokenLoss`."""

    def __init__(self, whole: TokenLoss, mesh: DeviceMesh) -> None:
        super().__init__()
        self.config, self.soft_cap, self.mesh = whole.config, whole.soft_cap, mesh
        self.rows: RowLosses | None = None

    def forward(self, x_BLD: torch.Tensor, output: Callable[[torch.Tensor], torch.Tensor], weight_VD: torch.Tensor,
                targets_BL: torch.Tensor) -> torch.Tensor:
        """Return the same sum as `TokenLoss.forward`.

        Args:
            x_BLD: normalised hidden states, sharded by positions.
            output: not used.
            weight_VD: output matrix, sharded by rows.
            targets_BL: int64, of all positions.
        """
        x_ND, weight_SD = all_positions(x_BLD, self.mesh).flatten(0, 1), _local(weight_VD)
        targets_N, z_loss = targets_BL.flatten(), self.config.z_loss
        rows = chunk_rows(len(targets_N), weight_SD.shape[0], self.config.chunk_tokens, x_ND.device)
        observe = None
        if self.rows is not None:
            self.rows.begin()
            observe = self._observe
        if rows == len(targets_N):
            logits_NS = soft_capped(F.linear(x_ND, weight_SD), self.soft_cap)
            if observe is not None:
                observe(logits_NS, targets_N)
            return self.cross_entropy(logits_NS, targets_N, z_loss)
        return linear_cross_entropy(x_ND, weight_SD, targets_N, rows=rows, z_loss=z_loss,
                                    cross_entropy=self.cross_entropy, gradients=self.token_gradients,
                                    soft_cap=self.soft_cap, observe=observe)

    @torch.no_grad()
    def _observe(self, logits_NS: torch.Tensor, targets_N: torch.Tensor) -> None:
        assert self.rows is not None
        row_N, here_N = _own_rows(targets_N, logits_NS.shape[1], self.mesh)
        _, (sum_N, target_N) = self._shard_sums(logits_NS.detach(), row_N, here_N)
        self.rows.add((sum_N.log() - target_N).masked_fill(targets_N == IGNORED, 0.0))

    def cross_entropy(self, logits_NS: torch.Tensor, targets_N: torch.Tensor, z_loss: float = 0.0) -> torch.Tensor:
        """Return `models.loss.cross_entropy` of all logits.

        Args:
            logits_NS: this rank's shard.
            targets_N: int64, ids in the whole vocabulary.
            z_loss: weight of the z-loss.
        """
        loss: torch.Tensor = _CrossEntropy.apply(logits_NS, targets_N, z_loss, self)
        return loss

    def token_gradients(self, logits_NS: torch.Tensor, targets_N: torch.Tensor,
                        z_loss: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `models.loss.token_gradients` of all logits; the gradient is that of this rank's shard.

        Args:
            logits_NS: this rank's shard.
            targets_N: int64, ids in the whole vocabulary.
            z_loss: weight of the z-loss.
        """
        return self._loss_and_gradient(logits_NS, targets_N, z_loss, logits_NS.dtype)

    def _loss_and_gradient(self, logits_NS: torch.Tensor, targets_N: torch.Tensor, z_loss: float,
                           dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and its gradient in `dtype`. Each pass over the logits reads them in their own dtype."""
        known_N = targets_N != IGNORED
        row_N, here_N = _own_rows(targets_N, logits_NS.shape[1], self.mesh)
        top_N, (sum_N, target_N) = self._shard_sums(logits_NS, row_N, here_N)
        loss = (sum_N.log() - target_N).masked_fill(~known_N, 0.0).sum()
        factor_N = (1 + 2 * z_loss * (sum_N.log() + top_N)) / sum_N
        gradient_NS = _fused(shard_gradient, logits_NS)(logits_NS, top_N, factor_N, row_N, here_N, known_N, dtype)
        return loss, gradient_NS

    def _shard_sums(self, logits_NS: torch.Tensor, row_N: torch.Tensor,
                    here_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest logit of each token, [N], and `shard_sums` of all ranks together, [2, N]."""
        top_N = logits_NS.amax(dim=1).float()
        dist.all_reduce(top_N, dist.ReduceOp.MAX, group=self.mesh.get_group())
        sums_2N = _fused(shard_sums, logits_NS)(logits_NS, top_N, row_N, here_N)
        dist.all_reduce(sums_2N, group=self.mesh.get_group())
        return top_N, sums_2N


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NS: torch.Tensor, targets_N: torch.Tensor, z_loss: float,
                loss: VocabularyLoss) -> torch.Tensor:
        value, gradient_NS = loss._loss_and_gradient(logits_NS, targets_N, z_loss, torch.float32)
        ctx.dtype = logits_NS.dtype
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(gradient_NS)
        return value

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (gradient_NS,) = ctx.saved_tensors
        return (gradient_NS * grad_outputs[0]).to(ctx.dtype), None, None, None


def shard_sums(logits_NS: torch.Tensor, top_N: torch.Tensor, row_N: torch.Tensor,
               here_N: torch.Tensor) -> torch.Tensor:
    """Return the sums of exponentials of a shard and the logits of its targets, both relative to `top`, fp32 [2, N].

    Args:
        logits_NS: this rank's shard.
        top_N: the largest logit of each token, fp32.
        row_N: int64, the target's column in the shard.
        here_N: bool, whether the target is in the shard; the other logits are 0.
    """
    below_NS = logits_NS.float() - top_N[:, None]
    target_N = below_NS.gather(1, row_N[:, None])[:, 0] * here_N
    return torch.stack((below_NS.exp().sum(dim=1), target_N))


def shard_gradient(logits_NS: torch.Tensor, top_N: torch.Tensor, factor_N: torch.Tensor, row_N: torch.Tensor,
                   here_N: torch.Tensor, known_N: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the gradient of a shard's logits, exp(logits - top) factor - onehot(target), [N, S].

    Args:
        logits_NS: this rank's shard.
        top_N: the largest logit of each token, fp32.
        factor_N: fp32.
        row_N: int64, the target's column in the shard.
        here_N: bool, whether the target is in the shard.
        known_N: bool, whether the token has a target; the other gradients are 0.
        dtype: of the result.
    """
    gradient_NS = (logits_NS.float() - top_N[:, None]).exp() * factor_N[:, None]
    return minus_one(gradient_NS, row_N, here_N).masked_fill_(~known_N[:, None], 0.0).to(dtype)


def _fused(function: Callable[..., torch.Tensor], logits: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return a function compiled on a GPU, so that no fp32 buffer of the size of the logits exists."""
    return _compiled(function) if logits.is_cuda else function


@functools.cache
def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function)


def all_positions(x_BLD: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Gather [B, L/T, D] to [B, L, D].

    Each rank computes the part of the gradient that comes from its shard of the vocabulary. The backward pass sums
    these parts.
    """
    sharded = x_BLD if isinstance(x_BLD, DTensor) else DTensor.from_local(x_BLD, mesh, [Shard(1)], run_check=False)
    return sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _own_rows(ids: torch.Tensor, share: int, mesh: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (row in this rank's shard, whether the id is in it). The row of any other id is 0."""
    row = ids - mesh.get_local_rank() * share
    is_own = (row >= 0) & (row < share)
    return torch.where(is_own, row, 0), is_own


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
