"""What every side trains: the shape, the documents, and the formula for MFU. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

END_OF_DOCUMENT = 0
"""Token that ends a document. torchtitan makes its document mask from it."""
ACTIVE_TOKENS = 4096
"""Tokens that occur. A model learns within a few steps that the others do not, so its loss falls."""
BATCHES = 4
"""Different batches, taken in turn."""
VOCABULARY = {"1b": 128_256, "8b_width": 32_768, "125m": 32_768, "tiny": 512}
"""Rows of the embedding for each shape. At full depth, an 8B model's output matrix takes 7 % of the products. With six
layers and this vocabulary it takes 9 %, so fp8, which leaves it out, gains about as much as at full depth."""
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"preset": "1b"},
    "8b_width": {"preset": "8b", "num_layers": 6},
    "125m": {"preset": "125m"},
    "tiny": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 256, "qk_norm": False,
             "rope_theta": 5e5}}
"""Settings of Tidewheel's `Llama` for each shape. "1b" is Llama-3.2-1B with an output matrix of its own."""


@dataclass(frozen=True)
class Case:
    """The model, batch and settings of one row of the table."""

    shape: str = "1b"
    """Name in `SHAPES`."""
    length: int = 4096
    """Tokens of a packed row."""
    rows: int = 8
    """Packed rows of a step. They are halved when the device's memory does not suffice."""
    document: int = 0
    """Mean length of a document in tokens; 0: a document fills its row."""
    warm: int = 5
    steps: int = 10
    """Measured steps, after `warm` others."""
    compiled: bool = True
    device: str = "cuda"
    learning_rate: float = 3e-4
    micro_batches: int = 1
    """Forward and backward passes of a step."""
    virtual_ranks: int = 1
    """At least the number of workers."""
    experts: int = 0
    """Experts of half the feed-forward's width, of which a token passes two, so the active FLOPs stay; 0: none."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of Tidewheel's `TrainConfig`."""

    def tiny(self) -> Case:
        """Return the same case at a shape that a CPU trains in a moment."""
        return replace(self, shape="tiny", length=64, rows=4, document=20 if self.document else 0, warm=2, steps=4,
                       compiled=False, device="cpu", learning_rate=3e-3)

    def halved(self) -> Case:
        """Return the case with half the rows."""
        return replace(self, rows=self.rows // 2)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values from which `Case(**values)` makes the case again."""
        return asdict(self)

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding."""
        return VOCABULARY[self.shape]

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.rows * self.length


@dataclass(frozen=True)
class Documents:
    """Packed rows; all arrays are [B, L]."""

    tokens: np.ndarray
    """int64."""
    following: np.ndarray
    """int64: the token after each, also across a document's end, for sides that predict it there."""
    documents: np.ndarray
    """int32: index of the document in its row."""
    positions: np.ndarray
    """int32: position in the document."""

    def starts(self) -> np.ndarray:
        """Return where documents begin among the B x L tokens, and B x L: int32 [documents + 1]."""
        begins = np.flatnonzero(self.positions.ravel() == 0)
        return np.append(begins, self.positions.size).astype(np.int32)


def batches(case: Case) -> list[Documents]:
    """Return the batches that every side trains on."""
    return [_batch(case, np.random.default_rng(seed)) for seed in range(BATCHES)]


def _batch(case: Case, random: np.random.Generator) -> Documents:
    """Return rows in which each token has four possible successors, with lengths of documents from an exponential
    distribution."""
    active = min(ACTIVE_TOKENS, case.vocabulary - 1)
    successors = np.random.default_rng(0).integers(1, active + 1, (active + 1, 4))  # one language for all batches
    choices = random.integers(0, 4, (case.length, case.rows))
    tokens = np.empty((case.rows, case.length + 1), np.int64)
    tokens[:, 0] = random.integers(1, active + 1, case.rows)
    for place in range(case.length):
        tokens[:, place + 1] = successors[tokens[:, place], choices[place]]
    documents = np.zeros((case.rows, case.length), np.int32)
    positions = np.tile(np.arange(case.length, dtype=np.int32), (case.rows, 1))
    for row in range(case.rows if case.document else 0):
        for start in _starts(case, random):
            tokens[row, start - 1] = END_OF_DOCUMENT
            documents[row, start:] += 1
            positions[row, start:] = np.arange(case.length - start)
    return Documents(tokens[:, :-1], tokens[:, 1:], documents, positions)


def _starts(case: Case, random: np.random.Generator) -> list[int]:
    """Return where the documents of a row begin, without the first."""
    starts = []
    start = 0
    while True:
        start += max(8, int(random.exponential(case.document)))
        if start >= case.length:
            return starts
        starts.append(start)
