"""`Job`: what the stages of one pipeline run work on. `resolve` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidewheel.data.stages import filters
from tidewheel.storage import Store, store

if TYPE_CHECKING:
    from tidewheel.data.config import PipelineConfig
    from tidewheel.data.decontaminate.evals import EvalItem
    from tidewheel.data.filter import Filter
    from tidewheel.data.stages.near_index import Index
    from tidewheel.data.stages.sources import SourceFile


@dataclass(frozen=True)
class Job:
    """A resolved recipe.

    Args:
        config: the recipe.
        input: URI that relative paths are resolved against.
        output: URI of everything the pipeline writes.
        files: input files, sorted by name.
        partitions: number of partitions of the documents.
        evals: evaluation items of the decontamination step; () without that step.
        tokenizer: bytes of the given tokenizer file; b"" if the pipeline trains one.
        chat_template: chat template of chat and preference data, as returned by `chat.read_template`.
        indexes: signatures of earlier dumps to deduplicate against, oldest first.
        references: references of the files that filters read, by path as in the recipe (see `resources`).
        commits: commits of the Hugging Face data sets it reads, by URI as in the recipe.
        skipped: number of files of source trees skipped for their name or length, by reason.
    """

    config: PipelineConfig
    input: str
    output: str
    files: tuple[SourceFile, ...]
    partitions: int
    evals: tuple[EvalItem, ...]
    tokenizer: bytes
    chat_template: str = ""
    indexes: tuple[Index, ...] = ()
    references: Mapping[str, str] = field(default_factory=dict)
    commits: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        """The output."""
        return store(self.output)

    def bound(self, filter: Filter) -> list[Any]:
        """Return a filter as JSON values for workers."""
        return filters.bound(filter, self.references)

    def identity(self, filter: Filter) -> list[Any]:
        """Return a filter as JSON values for unit keys."""
        return filters.identity(filter, self.references)
