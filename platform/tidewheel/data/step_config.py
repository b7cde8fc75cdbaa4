"""`Step`: one step of a recipe, with its settings from `filter_step`, `dedup_steps` or `output_steps`."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from tidewheel.config import Config
from tidewheel.data.dedup_steps import DecontaminateStep, DedupExactStep, DedupLinesStep, DedupNearStep, DedupUrlStep
from tidewheel.data.filter_step import FilterStep, expand_bare_names
from tidewheel.data.output_steps import PackStep, TokenizeStep, WriteStep
from tidewheel.parts import name_of


class Step(Config):
    """One step of the recipe: exactly one of these keys."""

    filter: FilterStep | None = None
    """Filters of single documents."""
    dedup_url: DedupUrlStep | None = None
    """Deduplication by URL."""
    dedup_exact: DedupExactStep | None = None
    """Exact deduplication of normalised text."""
    dedup_near: DedupNearStep | None = None
    """MinHash near-deduplication."""
    dedup_lines: DedupLinesStep | None = None
    """Removal of lines or paragraphs that repeat across documents."""
    decontaminate: DecontaminateStep | None = None
    """Removal of evaluation items."""
    tokenize: TokenizeStep | None = None
    """Text to tokens."""
    pack: PackStep | None = None
    """Tokens to shards."""
    write: WriteStep | None = None
    """Documents to files for other tools."""

    @model_validator(mode="before")
    @classmethod
    def _bare_names(cls, values: Any) -> Any:
        return expand_bare_names(values)

    @model_validator(mode="after")
    def _one_key(self) -> Step:
        names = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(names) != 1:
            problem = f"{len(names)} given: {', '.join(names)}" if names else "none given"
            raise ValueError(f"a step is exactly one of {', '.join(type(self).model_fields)} ({problem})")
        return self

    @property
    def kind(self) -> str:
        """The key that is set."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def settings(self) -> Config:
        """The settings under that key."""
        return getattr(self, self.kind)


def editing_parts(step: Step) -> list[str]:
    """Return the names of the step's parts that may change the text of a document that stays."""
    if step.filter is not None:
        if step.filter.annotate:
            return []
        return [name_of(type(filter)) for filter in step.filter.filters if filter.EDITS]
    return [step.kind] if step.kind == "dedup_lines" or getattr(step.settings, "action", None) == "cut" else []
