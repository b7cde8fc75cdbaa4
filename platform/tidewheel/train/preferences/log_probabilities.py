"""Log-probabilities of tokens and answers, with the logits of a few tokens in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tidewheel.models.decoder import next_tokens
from tidewheel.models.loss import IGNORED
from tidewheel.train.chunks import chunked, with_target
from tidewheel.train.objective import Outputs

if TYPE_CHECKING:
    from tidewheel.train.step import MicroBatch


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of the answers of P pairs of M parts.

    Args:
        sums: fp32 [P, M], in nats, of whole answers.
        tokens: fp32 [P, M], number of tokens of each answer.
    """

    sums: torch.Tensor
    tokens: torch.Tensor

    @property
    def means(self) -> torch.Tensor:
        """Return the log-probabilities per token, fp32 [P, M]."""
        return self.sums / self.tokens


def answers(outputs: Outputs, batch: MicroBatch, chunk_tokens: int) -> Answers:
    """Return the log-probabilities of a micro-batch's answers.

    Args:
        outputs: the model's.
        batch: rows of pairs, whose targets are the answers.
        chunk_tokens: tokens of a chunk; 0: all at once.
    """
    values = token_log_probabilities(outputs, batch.targets, chunk_tokens, known=batch.num_targets)
    tokens = (batch.targets != IGNORED).sum(dim=1).float()
    return Answers(values.sum(dim=1).view(-1, batch.parts), tokens.view(-1, batch.parts))


def whole_sequences(outputs: Outputs, batch: MicroBatch, chunk_tokens: int) -> tuple[Answers, torch.Tensor]:
    """Return the log-probabilities of answers, and the mean one of each chosen sequence with its prompt, fp32 [P].

    Args:
        outputs: the model's.
        batch: rows of pairs.
        chunk_tokens: tokens of a chunk; 0: all at once.
    """
    targets = next_tokens(batch.tokens, batch.segment_ids)
    values = token_log_probabilities(outputs, targets, chunk_tokens)
    in_answer = batch.targets != IGNORED
    sums = (values * in_answer).sum(dim=1).view(-1, batch.parts)
    found = Answers(sums, in_answer.sum(dim=1).float().view(-1, batch.parts))
    chosen = slice(None, None, batch.parts)
    return found, values[chosen].sum(dim=1) / (targets[chosen] != IGNORED).sum(dim=1)


def token_log_probabilities(outputs: Outputs, targets: torch.Tensor, chunk_tokens: int,
                            known: int | None = None) -> torch.Tensor:
    """Return log p of each target, fp32 [B, L]; 0 where there is none.

    Args:
        outputs: the model's.
        targets: int64 [B, L].
        chunk_tokens: tokens of a chunk; 0: all at once.
        known: number of targets that are not `IGNORED`; None: it is not known on the host.
    """
    return in_chunks(_log_probabilities, outputs, targets, chunk_tokens, known)


def in_chunks(of_logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], outputs: Outputs, targets: torch.Tensor,
              chunk_tokens: int, known: int | None = None, trailing: tuple[int, ...] = ()) -> torch.Tensor:
    """Return a function of each target and its logits, [B, L, *trailing]; 0 where there is no target.

    Without sequence parallelism only positions with a target need logits, and a chunk is of any tokens. With it, a rank
    has some positions of each row, so a chunk is of whole rows.

    Args:
        of_logits: from logits [..., V] and targets [...] to [..., *trailing], 0 where the target is `IGNORED`.
        outputs: the model's.
        targets: int64 [B, L].
        chunk_tokens: tokens of a chunk; 0: all at once.
        known: number of targets that are not `IGNORED`; None: it is not known on the host.
        trailing: shape of the function's result for one target.
    """
    rows, length = targets.shape
    if isinstance(outputs.hidden, DTensor) or outputs.hidden.shape[1] != length:
        size = max(1, chunk_tokens // length) if chunk_tokens else rows
        return torch.cat(chunked(lambda x, of: of_logits(outputs.make_logits(x), of), size, outputs.hidden, targets))
    flat = targets.flatten()
    hidden = outputs.hidden.flatten(0, 1)
    size = chunk_tokens or len(flat)

    def of_tokens(x: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return of_logits(outputs.make_logits(x[None])[0], of)

    if known is None:
        return torch.cat(chunked(of_tokens, size, hidden, flat)).view(rows, length, *trailing)
    index = with_target(flat, known)
    values = torch.cat(chunked(of_tokens, size, hidden[index], flat[index]))
    empty = torch.zeros(len(flat), *trailing, device=values.device)
    return empty.index_copy(0, index, values).view(rows, length, *trailing)


def _log_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return log p of the targets [...], fp32; 0 where there is none. The softmax is fp32."""
    losses = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return -losses.view(targets.shape)
