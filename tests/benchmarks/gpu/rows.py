"""The rows of the table, most valuable first. Nothing here imports torch, so that `--list` answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.benchmarks.gpu.case import Case

DOCUMENTS = 600
"""Mean length of a document in tokens."""
LARGE_GIB = 100.0
"""An H200 has more, an H100 less."""


@dataclass(frozen=True)
class Row:
    """One row, which a process of its own measures."""

    name: str
    function: str
    """"module:function" of this package. The function takes the case and returns figures."""
    case: Case = field(default_factory=Case)
    needs: float = 45.0
    """The row is skipped when fewer seconds of the budget are left."""
    limit: float = 110.0
    """Its process is ended after so many seconds."""
    rows_on_80_gb: int = 0
    """Packed rows of a step on a GPU with less than `LARGE_GIB`, if arithmetic says that the case's do not fit there: a
    try that fails takes a minute. 0: try the case's."""

    def case_on(self, memory_gib: float | None) -> Case:
        """Return the case for a device.

        Args:
            memory_gib: its memory; None: a CPU.
        """
        if memory_gib is None:
            return self.case.tiny()
        if self.rows_on_80_gb and memory_gib < LARGE_GIB:
            return replace(self.case, rows=self.rows_on_80_gb)
        return self.case


def _ours(**settings: Any) -> dict[str, Any]:
    return {"settings": settings}


def _checkpointed(kind: str, **options: Any) -> dict[str, Any]:
    return _ours(memory={"activation_checkpointing": kind, **options})


PACKED = Case(document=DOCUMENTS)
WIDE = {"shape": "8b_width", "rows": 4, "document": DOCUMENTS}
ACCUMULATED: dict[str, Any] = {"document": DOCUMENTS, "micro_batches": 4}

ROWS: Sequence[Row] = (
    Row("probe: ceilings", "probe:ceilings", needs=25, limit=60),
    Row("probe: attention", "probe:attention", PACKED, needs=25, limit=60),
    Row("ours, documents", "ours:train", PACKED),
    Row("torchtitan, documents", "titan:train", PACKED),
    Row("tests marked gpu", "gpu_tests:run", needs=40, limit=120),
    Row("ours, whole rows", "ours:train"),
    Row("bare loop, documents", "bare:train", PACKED),
    Row("ours, documents, fused products", "ours:train",
        Case(document=DOCUMENTS, **_ours(model={"fused_products": True}))),
    Row("ours, documents, experts", "ours:train", Case(document=DOCUMENTS, experts=4), rows_on_80_gb=4),
    Row("transformers, whole rows", "hugging_face:train", Case(rows=4), rows_on_80_gb=2),
    Row("ours, 8b width, bf16", "ours:train", Case(**WIDE)),
    Row("ours, 8b width, fp8", "ours:train", Case(**WIDE, **_ours(precision="fp8"))),
    Row("memory tier", "saving:memory_tier", PACKED, needs=60, limit=120),
    Row("asynchronous save", "saving:save", PACKED, needs=70, limit=150),
    Row("recovery in place", "recovery:in_place", needs=60, limit=180),
    Row("reproducible, two ranks", "pair:reproducible", Case("125m", 2048, 8, DOCUMENTS, compiled=False), limit=200),
    Row("ours, 4 micro-batches", "ours:train", Case(**ACCUMULATED)),
    Row("reproducible, 4 micro-batches", "ours:train", Case(**ACCUMULATED, **_ours(reproducible=True))),
    Row("torchtitan, whole rows", "titan:train", rows_on_80_gb=4),
    Row("bare loop, whole rows", "bare:train"),
    Row("async tensor parallelism, two ranks", "overlapped:train",
        Case("125m", 2048, 4, DOCUMENTS, compiled=False), limit=200),
    Row("ours, 8192, documents", "ours:train", Case(length=8192, rows=4, document=DOCUMENTS)),
    Row("ours, 8b width, fp8 tensorwise", "ours:train",
        Case(**WIDE, **_ours(precision="fp8", fp8={"recipe": "tensorwise"}))),
    Row("ours, checkpointing selective", "ours:train", Case(document=DOCUMENTS, **_checkpointed("selective"))),
    Row("ours, checkpointing every_nth", "ours:train", Case(document=DOCUMENTS, **_checkpointed("every_nth"))),
    Row("ours, checkpointing full", "ours:train", Case(document=DOCUMENTS, **_checkpointed("full"))),
)


def chosen(only: Sequence[str]) -> list[Row]:
    """Return the rows whose name contains one of the texts, or all rows without texts.

    The whole name of a row chooses that row alone.

    Raises:
        ValueError: a text is in no name.
    """
    for text in only:
        if not any(text in row.name for row in ROWS):
            raise ValueError(f"no row has {text!r} in its name; the rows are: {', '.join(row.name for row in ROWS)}")
    names = {row.name for row in ROWS}
    return [row for row in ROWS if not only or row.name in only
            or any(text in row.name for text in only if text not in names)]
