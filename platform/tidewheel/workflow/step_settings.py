"""Keyword arguments of `tw.Pipeline`'s methods, as type checkers and editors see them.

Each dictionary has the settings of one step of a recipe (`tidewheel.data.config`), where they are described and
validated. `tests/unit/workflow/test_typed_steps.py` compares names and types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Literal, TypedDict

from tidewheel.config import Setting

if TYPE_CHECKING:
    from tidewheel.data.config import TrainTokenizer
    from tidewheel.data.read_config import CodeConfig
    from tidewheel.data.reader import Reader
    from tidewheel.data.text_template import TextTemplate
    from tidewheel.placement import PlacementConfig

Settings = Mapping[str, Setting]


class PipelineOptions(TypedDict, total=False):
    """`Pipeline.set`: settings of the recipe itself."""

    seed: int
    max_bad_fraction: float
    partitions: Literal["auto"] | int
    placement: Settings | PlacementConfig


class ReadSettings(TypedDict, total=False):
    """`Pipeline.read`."""

    split: str
    subset: str | None
    text: str | Settings | TextTemplate
    id: str | None
    source: str | None
    url: str | None
    language: str | None
    license: str | None
    format: str | Settings | Reader
    code: Settings | CodeConfig
    max_record_bytes: int
    unit_bytes: int
    kind: Literal["documents", "chat", "preferences"]
    messages: str
    conversations: str
    prompt: str
    completion: str
    instruction: str
    input: str
    output: str
    alpaca_prompt: Literal["alpaca", "plain"]
    system: str
    tools: str
    chosen: str
    label: str
    margin: str
    step_labels: str
    step_separator: str
    rejected: str
    priority: Mapping[str, int]
    sample: float | None
    limit: int | None


class DedupNearSettings(TypedDict, total=False):
    """`Pipeline.dedup_near`."""

    unit: Literal["words", "characters"]
    ngram: int
    bands: int
    rows: int
    target_jaccard: float | None
    permutations: int | None
    verify: Literal["estimated", "exact"]
    doubt: float
    min_jaccard: float
    seed: int
    against: Sequence[str]
    write_index: bool


class DedupLinesSettings(TypedDict, total=False):
    """`Pipeline.dedup_lines`."""

    unit: Literal["line", "paragraph"]
    min_characters: int
    max_repeats: int
    keep: Literal["first", "none"]


class DecontaminateSettings(TypedDict, total=False):
    """`Pipeline.decontaminate`."""

    action: Literal["drop", "cut", "annotate"]
    ngram: int
    fail_above: float | None
    check_packed: bool


class TokenizeSettings(TypedDict, total=False):
    """`Pipeline.tokenize`."""

    train: Settings | TrainTokenizer | None
    bos: Literal["none", "document"]
    eos: Literal["none", "document"]
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    vocabulary_multiple: int
    encoding: str | None
    pattern: str | None
    special_tokens: Mapping[str, int]
    chat_template: str | None
    loss: Literal["assistant", "all", "last_turn"]
    template_date: datetime | str | None


class PackSettings(TypedDict, total=False):
    """`Pipeline.pack`."""

    sequence_length: int
    method: Literal["best_fit", "concatenate", "one_per_row"]
    window: int
    validation_fraction: float
    rows_per_shard: int
    waves: int


class WriteSettings(TypedDict, total=False):
    """`Pipeline.write`."""

    validation_fraction: float
    shard_bytes: int
