"""Odds ratio preference optimisation: fine-tuning and preferences in one stage, without a reference model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from tidewheel.train.objective import Outputs, Sums
from tidewheel.train.preferences.objective import LOG_PROBABILITIES, REWARDS, PairObjective
from tidewheel.versions import Version

if TYPE_CHECKING:
    from tidewheel.train.step import MicroBatch


class ORPO(PairObjective):
    """Cross-entropy of the chosen sequence, and the log of the odds ratio (https://arxiv.org/abs/2403.07691).

    The cross-entropy covers prompt and answer, as in the authors' code and in TRL. It is a mean over the tokens of a
    pair, then over pairs; TRL's is a mean over all tokens of the micro-batch.
    """

    VERSION = Version("objective_orpo", uses=(LOG_PROBABILITIES,))
    METRICS = (*REWARDS, "nll", "log_odds_ratio")

    beta: float = Field(default=0.1, gt=0)
    """Weight of the odds ratio, lambda in the paper."""

    def sums(self, outputs: Outputs, batch: MicroBatch) -> Sums:
        import torch.nn.functional as F

        from tidewheel.train.preferences.log_probabilities import whole_sequences
        from tidewheel.train.preferences.losses import log_odds_ratio

        policy, sequences = whole_sequences(outputs, batch, self.chunk_tokens)
        chosen, rejected = policy.means.unbind(dim=1)
        odds = log_odds_ratio(chosen, rejected)
        nll = -sequences.sum()
        return self.pair_sums(nll - self.beta * F.logsigmoid(odds).sum(), chosen, rejected, self.beta, nll=nll,
                              log_odds_ratio=odds.sum())
