"""A module of the user's own in the place of a decoder: from tokens to logits or to a loss."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from tidewheel.errors import ConfigError
from tidewheel.models.config import LossConfig
from tidewheel.models.decoder import HeadObjective
from tidewheel.models.documents import Documents
from tidewheel.models.loss import TokenLoss, cross_entropy
from tidewheel.models.noise import EmbeddingNoise
from tidewheel.models.own_module import OwnModule
from tidewheel.parts import calling, name_of

PROBE_TOKENS = 8
"""Tokens of the row with which a new module is tried out."""


class Wrapped(nn.Module):
    """A module of the user's own with the interface of a `Decoder`. Its parameters have their initial values.

    Dropout is off, as in a decoder: its draws would depend on the number of workers. `blocks` are the modules of the
    longest `nn.ModuleList`, which FSDP2 gathers one by one.

    Args:
        config: settings of the model.
        vocabulary_size: number of logits.
        loss: settings of the cross-entropy.
        seed: of the run.

    Raises:
        ConfigError: the module is none, has dropout, returns something else than logits, looks ahead, or lets tokens
            see other documents of their row.
    """

    def __init__(self, config: OwnModule, vocabulary_size: int, loss: LossConfig | None, seed: int) -> None:
        super().__init__()
        self.config, self.vocabulary_size = config, vocabulary_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with calling(config):
                module = config.module(vocabulary_size)
        if not isinstance(module, nn.Module):
            raise _wrong(config, f"module() returned {type(module).__name__}", "return an nn.Module")
        dropout = [name for name, child in module.named_modules() if isinstance(child, nn.Dropout) and child.p > 0]
        if dropout:
            raise _wrong(config, f"{dropout[0]} drops out with p = {module.get_submodule(dropout[0]).p}, so the result "
                         "would depend on the number of workers", "set the dropout of the module to 0")
        self.module = module.float().eval()
        accepted = inspect.signature(module.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._without_cache = {"use_cache": False} if "use_cache" in accepted else {}
        self.embedding = self.norm = self.output = self.value_head = None
        self.token_loss = TokenLoss(loss or LossConfig())
        self.routings: dict[int, Any] = {}
        self._probe()

    @property
    def blocks(self) -> list[nn.Module]:
        """Return the modules of the longest list of modules."""
        lists = [list(child) for child in self.module.modules() if isinstance(child, nn.ModuleList)]
        return max(lists, key=len, default=[])

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, segment_ids: torch.Tensor,
                targets: torch.Tensor | None = None, objective: HeadObjective | None = None,
                documents: Documents | None = None, noise: EmbeddingNoise | None = None) -> torch.Tensor:
        """Return logits, or the loss; see `Decoder.forward`."""
        with calling(self.config):
            logits = self.logits_of(tokens, positions)
        if objective is not None:
            return objective(logits, _same)
        if targets is None:
            return logits
        return cross_entropy(logits.flatten(0, -2), targets.flatten(), self.token_loss.config.z_loss)

    def logits_of(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the module's logits [B, L, V].

        Args:
            tokens: int64 [B, L].
            positions: [B, L], from 0 in each document.
        """
        given = {"position_ids": positions.long()} if self._takes_positions else {}
        output = self.module(input_ids=tokens, **given, **self._without_cache)
        logits = getattr(output, "logits", output[0] if isinstance(output, tuple) else output)
        expected = (*tokens.shape, self.vocabulary_size)
        if not isinstance(logits, torch.Tensor) or logits.shape != expected:
            shape = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
            raise _wrong(self.config, f"forward returned {shape}, but logits are {list(expected)}",
                         "return logits, or an object with .logits, for vocabulary_size tokens")
        return logits

    @torch.no_grad()
    def _probe(self) -> None:
        """Compare two rows of two documents that differ in the first token and in the last."""
        half = PROBE_TOKENS // 2
        tokens = torch.arange(PROBE_TOKENS)[None] % self.vocabulary_size
        first, last = tokens.clone(), tokens.clone()
        first[0, 0] = last[0, -1] = (PROBE_TOKENS + 1) % self.vocabulary_size
        positions = torch.arange(PROBE_TOKENS)[None] % half
        with calling(self.config):
            plain, changed_first, changed_last = (self.logits_of(row, positions) for row in (tokens, first, last))
        if not torch.equal(plain[:, :-1], changed_last[:, :-1]):
            raise _wrong(self.config, "a token sees those after it", "use causal attention")
        if not self.config.attend_across_documents and not torch.equal(plain[:, half:], changed_first[:, half:]):
            what = "although it takes" if self._takes_positions else "and takes no"
            raise _wrong(self.config, f"a token sees earlier documents of its row, {what} position_ids",
                         "set model.attend_across_documents to train so, or read sets with one document in each row")


def _same(logits: torch.Tensor) -> torch.Tensor:
    return logits


def _wrong(config: OwnModule, what: str, fix: str) -> ConfigError:
    return ConfigError(f"{name_of(type(config))}: {what}", where="model.kind", fix=fix)
