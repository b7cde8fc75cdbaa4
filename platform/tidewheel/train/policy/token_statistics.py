"""Log-probabilities and entropies of tokens, with the logits of a few tokens in memory at a time."""

from __future__ import annotations

import torch

from tidewheel.models.loss import IGNORED
from tidewheel.train.objective import Outputs
from tidewheel.train.preferences.log_probabilities import in_chunks
from tidewheel.train.step import MicroBatch


def token_statistics(outputs: Outputs, batch: MicroBatch, *, temperature: float, chunk_tokens: int,
                     entropy_gradient: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p of each target and the entropy of the distribution it was drawn from, each fp32 [B, L] in nats.

    Both are 0 where there is no target.

    Args:
        outputs: the model's.
        batch: the rows.
        temperature: logits are divided by it, as they were when the tokens were sampled.
        chunk_tokens: tokens of a chunk; 0: all at once.
        entropy_gradient: whether the entropy has a gradient, which takes memory for one more [tokens, V].
    """
    def of_logits(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = logits.float()  # before the division, as when they were sampled
        if temperature != 1:
            logits = logits / temperature
        every = logits.log_softmax(-1)
        has_target = targets != IGNORED
        values = every.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        if entropy_gradient:
            entropy = -(every.exp() * every).sum(-1)
        else:
            with torch.no_grad():
                entropy = -(every.exp() * every).sum(-1)
        return torch.stack([values, entropy], dim=-1).masked_fill(~has_target[..., None], 0.0)

    found = in_chunks(of_logits, outputs, batch.targets, chunk_tokens, known=batch.num_targets, trailing=(2,))
    return found[..., 0], found[..., 1]
