"""Objectives and an optimizer as a user writes them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import tidewheel as tw


class Momentum(tw.Optimizer):
    """Gradient descent with momentum."""

    STATE = ("momentum_buffer",)
    NOT_REPRODUCIBLE = ""
    learning_rate: float = 0.1

    def build(self, groups):
        return torch.optim.SGD(groups, lr=self.learning_rate, momentum=0.9, foreach=True)


class LabelSmoothing(tw.Objective):
    """Cross-entropy with a share of the target spread over the vocabulary."""

    WORKS_WITH = ("tensor", "pipeline", "context")
    METRICS = ("accuracy", "cross_entropy")
    smoothing: float = 0.1

    def sums(self, outputs, batch):
        known = batch.targets >= 0
        logits, targets = outputs.logits()[known].float(), batch.targets[known]
        loss = F.cross_entropy(logits, targets, label_smoothing=self.smoothing, reduction="sum")
        correct = (logits.argmax(-1) == targets).sum()
        return tw.Sums(loss, {"cross_entropy": F.cross_entropy(logits, targets, reduction="sum"), "accuracy": correct})


class ByRow(tw.Objective):
    """The mean loss of each row, so that each row is one term."""

    WORKS_WITH = ("pipeline",)

    def sums(self, outputs, batch):
        losses = F.cross_entropy(outputs.logits().float().transpose(1, 2), batch.targets, reduction="none")
        return tw.Sums((losses.sum(dim=1) / (batch.targets >= 0).sum(dim=1)).sum())

    def count(self, batch):
        return len(batch.tokens)
