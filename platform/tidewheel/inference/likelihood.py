"""Log-likelihoods of continuations, in rows in which the continuations of one context share its computation.

A row holds a context and then the continuations of it, each without its last token. Continuations see the context and
themselves, not one another, and have the positions that follow the context. So a question with four choices costs its
context once. Rows are sorted by length and cut into batches of about `BATCH_TOKENS` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tidewheel.inference.tasks.requests import Likelihood
from tidewheel.models.attention import DocumentMask
from tidewheel.models.decoder import Decoder
from tidewheel.models.documents import Documents

BATCH_TOKENS = 4096
LOGIT_TOKENS = 512
"""Positions whose logits are in memory at once."""


@dataclass(frozen=True)
class Pair:
    """A continuation to score.

    Args:
        context: tokens before it, at least one.
        continuation: its tokens, at least one.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass
class Row:
    """A context and some of its continuations.

    Args:
        context: tokens.
        members: (index of the pair, its continuation).
    """

    context: tuple[int, ...]
    members: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of tokens of the row."""
        return len(self.context) + sum(len(continuation) - 1 for _, continuation in self.members)


def rows_of(pairs: Sequence[Pair], most: int) -> list[Row]:
    """Return the rows of pairs, the longest first.

    Args:
        pairs: to score.
        most: tokens of a row, unless a single pair is longer.
    """
    open_rows: dict[tuple[int, ...], Row] = {}
    rows: list[Row] = []
    for index, pair in enumerate(pairs):
        row = open_rows.get(pair.context)
        if row is None or row.length + len(pair.continuation) - 1 > most:
            row = open_rows[pair.context] = Row(pair.context)
            rows.append(row)
        row.members.append((index, pair.continuation))
    return sorted(rows, key=lambda row: (-row.length, row.members[0][0]))


def batches_of(rows: Sequence[Row], tokens: int = BATCH_TOKENS) -> list[list[Row]]:
    """Return rows in batches; a batch padded to its longest row has at most `tokens` tokens, or one row.

    Args:
        rows: the longest first.
        tokens: of a batch.
    """
    batches: list[list[Row]] = []
    for row in rows:
        if batches and batches[-1][0].length * (len(batches[-1]) + 1) <= tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


@dataclass(frozen=True)
class Layout:
    """Tensors of a batch of rows.

    Args:
        tokens: int64 [B, L].
        positions: int64 [B, L].
        branches: int64 [B, L]: 0 for a context, 1, 2, ... for its continuations, -1 for padding.
        sources: for each predicted token, its index in the flattened [B * L] positions that predict it, [n].
        targets: the predicted tokens, [n].
        lengths: predicted tokens of each pair.
        pairs: index of each pair.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    branches: torch.Tensor
    sources: torch.Tensor
    targets: torch.Tensor
    lengths: list[int]
    pairs: list[int]


def layout(rows: Sequence[Row], device: torch.device, *, width: int = 0) -> Layout:
    """Return the tensors of a batch.

    Args:
        rows: the longest first.
        device: of the tensors.
        width: least length of the rows.
    """
    width = max(width, rows[0].length)
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    positions, branches = torch.zeros_like(tokens), torch.full_like(tokens, -1)
    sources: list[int] = []
    targets: list[int] = []
    lengths: list[int] = []
    pairs: list[int] = []
    for number, row in enumerate(rows):
        length = len(row.context)
        tokens[number, :length] = torch.tensor(row.context)
        positions[number, :length] = torch.arange(length)
        branches[number, :length] = 0
        begin = length
        for branch, (index, continuation) in enumerate(row.members, 1):
            end = begin + len(continuation) - 1
            tokens[number, begin:end] = torch.tensor(continuation[:-1], dtype=torch.int64)
            positions[number, begin:end] = torch.arange(length, length + end - begin)
            branches[number, begin:end] = branch
            sources += [number * width + place for place in (length - 1, *range(begin, end))]
            targets += continuation
            lengths.append(len(continuation))
            pairs.append(index)
            begin = end
    return Layout(tokens.to(device), positions.to(device), branches.to(device), torch.tensor(sources, device=device),
                  torch.tensor(targets, device=device), lengths, pairs)


def branch_mask(branches: torch.Tensor, positions: torch.Tensor, window: int | None = None) -> DocumentMask:
    """Return the mask of rows: a token sees earlier tokens of the context and of its own continuation.

    Args:
        branches: see `Layout`.
        positions: see `Layout`.
        window: of a sliding window; None: without one.
    """
    places = torch.arange(branches.shape[1], device=branches.device)
    earlier = places[:, None] >= places
    same = (branches[:, :, None] == branches[:, None, :]) | ((branches[:, :, None] > 0) & (branches[:, None, :] == 0))
    visible = same & earlier
    if window is not None:
        visible &= positions[:, :, None] - positions[:, None, :] < window
    return DocumentMask("masked", dense=visible[:, None])


@torch.no_grad()
def score(model: Decoder, batch: Layout) -> list[Likelihood]:
    """Return the likelihoods of the pairs of a batch, in the order of `Layout.pairs`.

    Args:
        model: a whole decoder.
        batch: the batch.

    Raises:
        ValueError: another cache or layout has replaced the model's mask.
    """
    if "mask" in vars(model):
        raise ValueError("the model's mask is replaced already")

    def mask(segment_ids: torch.Tensor, x: torch.Tensor, documents: Documents | None = None,
             window: int | None = None) -> DocumentMask:
        return branch_mask(segment_ids, batch.positions, window)

    def objective(hidden: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor],
                  *_: torch.Tensor) -> torch.Tensor:
        return of_hidden(hidden, logits, batch)

    model.mask = mask  # type: ignore[method-assign]
    try:
        values = model(batch.tokens, batch.positions, batch.branches, None, objective)
    finally:
        del model.mask  # restores the method of the class
    return likelihoods(values, batch)


def of_hidden(hidden: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor], batch: Layout) -> torch.Tensor:
    """Return the log-probability of each predicted token and whether it is the most likely, fp64 [2, n].

    Args:
        hidden: normalised hidden states [B, L, D].
        logits: the output layer, [1, n, D] to [1, n, V].
        batch: the batch.
    """
    states = hidden.flatten(0, 1)[batch.sources]
    found = []
    for part, targets in zip(states.split(LOGIT_TOKENS), batch.targets.split(LOGIT_TOKENS)):
        values = logits(part[None])[0].float()
        chosen = values.gather(1, targets[:, None])[:, 0]
        log_probability = chosen - values.logsumexp(dim=1)
        found.append(torch.stack((log_probability.double(), (values.argmax(dim=1) == targets).double())))
    return torch.cat(found, dim=1)


def likelihoods(values: torch.Tensor, batch: Layout) -> list[Likelihood]:
    """Return the likelihoods of a batch's pairs from those of their tokens; see `of_hidden`."""
    result = []
    for part in values.cpu().split(batch.lengths, dim=1):
        result.append(Likelihood(float(part[0].sum()), bool(part[1].all()), part.shape[1]))
    return result
