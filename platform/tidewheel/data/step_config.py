"""Settings of a recipe's steps: one class a step, and `Step`, which is one of them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import pydantic
from pydantic import Field, field_validator, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from tidewheel.config import Config, below, problems_of, unknown_key
from tidewheel.data.filter import FILTERS, Filter
from tidewheel.errors import ConfigError
from tidewheel.parts import KIND, is_own, name_of

_PYTHON, _ANNOTATE = "python", "annotate"


class FilterStep(Config):
    """Filters, which look at one document alone: settings by name, in the order in which they apply (`Filter.ORDER`).

    A name is that of a built-in filter or of an installed package's, or `module:Class` of your own. `python:
    module:function` names a plain function.
    """

    filters: tuple[pydantic.InstanceOf[Filter], ...]
    """The filters. In a recipe each stands in the step itself, `gopher_quality: {min_words: 60}`."""
    annotate: bool = False
    """Drop and edit nothing: write each document's statistics, and the reason for which it would have been dropped,
    to `annotations/<stage>/*.parquet`, so that thresholds can be chosen."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, values: Any) -> Any:
        values = _bare(values)
        if not isinstance(values, dict):
            return values
        named = {str(name): {} if given is None else given for name, given in values.items()
                 if name not in (_PYTHON, _ANNOTATE)}
        if _PYTHON in values:
            if not isinstance(values[_PYTHON], str):
                raise ValueError("python: name one function, as in `python: my_filters:short`; give others as "
                                 "`my_filters:other: {}` beside it")
            named[values[_PYTHON]] = {}
        if not named:
            raise ValueError(f"name at least one filter: {', '.join(FILTERS.names())}")
        found = [_filter(name, given) for name, given in named.items()]
        found.sort(key=lambda filter: (filter.ORDER, name_of(type(filter))))
        return {"filters": tuple(found), **{name: values[name] for name in values if name == _ANNOTATE}}

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        return {**{name_of(type(filter)): filter.canonical() for filter in self.filters}, _ANNOTATE: self.annotate}

    def decisive(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, with the source of filters of the user's own."""
        values: dict[str, Any] = {_ANNOTATE: True} if self.annotate else {}
        for filter in self.filters:
            settings = filter.decisive()
            values[settings.pop(KIND)] = settings
        return values


def _filter(name: str, settings: Any) -> Filter:
    """Return one filter of a step.

    Raises:
        pydantic.ValidationError: there is none of this name, or a setting is wrong; with the place.
    """
    if not is_own(name) and name not in FILTERS.names():
        raise unknown_key(name, (*FILTERS.names(), _ANNOTATE, _PYTHON), settings)
    if not isinstance(settings, dict):
        raise below(name, [{"type": "dict_type", "loc": (), "input": settings}])
    try:
        return FILTERS.build(name, settings)
    except ConfigError as error:  # its module is not there, or is no filter
        problem = PydanticCustomError("no_filter", "{told}", {"told": f"{error.what}; {error.mend}"})
        raise below(name, [{"type": problem, "loc": (), "input": {}}]) from None
    except pydantic.ValidationError as error:
        raise below(name, problems_of(FILTERS.find(name), error)) from None


class DedupUrlStep(Config):
    """Of documents whose URLs have one normal form (scheme, www, tracking parameters and the like aside) keep one."""


class DedupExactStep(Config):
    """Of documents with the same normalised text (case, accents, punctuation and spacing aside) keep one."""


class DedupNearStep(Config):
    """MinHash near-deduplication; each removal has a verified edge to a better document. Documents too short for a
    shingle are compared exactly."""

    unit: Literal["words", "characters"] = "words"
    """What a shingle is made of: words, or characters, of the normalised text."""
    ngram: int = Field(5, ge=1, le=64)
    """Words or characters in a shingle."""
    bands: int = Field(14, ge=1, le=1024)
    """Bands of the signature: two documents are compared when one band is equal in both."""
    rows: int = Field(8, ge=1, le=256)
    """Hash values in a band. 14 x 8 finds a pair of Jaccard similarity 0.75 with probability 0.77, 0.85 with 0.99."""
    target_jaccard: float | None = Field(None, gt=0, lt=1)
    """Instead of bands and rows: the threshold they shall fit best, as datasketch chooses them."""
    permutations: int | None = Field(None, ge=1, le=4096)
    """Hash values in a signature, at least bands x rows, which is the default (128 with target_jaccard). More make the
    estimate better: its standard error is sqrt(s (1 - s) / permutations)."""
    verify: Literal["estimated", "exact"] = "estimated"
    """How a candidate pair is verified: by the share of equal values in the two signatures, or by the shingle sets."""
    doubt: float = Field(2.5, ge=0, le=10)
    """Estimates within so many standard errors of min_jaccard decide nothing: such pairs are compared by their shingle
    sets. With 0 the estimate decides alone, and no text is read again but for the report's sample."""
    min_jaccard: float = Field(0.72, gt=0, le=1)
    """A pair counts as duplicate when its similarity, as verified, reaches this. The default is the threshold of the
    default bands, (1 / bands)^(1 / rows)."""
    seed: int = Field(1, ge=0, lt=1 << 32)
    """Seed of the permutations."""
    against: tuple[str, ...] = ()
    """Indexes of earlier dumps (folders `near_index` of their outputs, oldest first). Their documents are better than
    any document here. Relative paths are below the pipeline's input."""
    write_index: bool = False
    """Write `near_index` below the output, for later dumps."""

    @model_validator(mode="before")
    @classmethod
    def _banding(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("target_jaccard") is None:
            return values
        from tidewheel.data.dedup.banding import optimal_banding

        target, count = values["target_jaccard"], values.get("permutations") or 128
        if not (isinstance(target, float) and 0 < target < 1 and isinstance(count, int) and 1 <= count <= 4096):
            return values  # the fields' own checks tell
        bands, rows = optimal_banding(target, count)
        if values.get("bands", bands) != bands or values.get("rows", rows) != rows:
            raise ValueError(f"target_jaccard {target:g} with {count} permutations means {bands} bands of {rows} rows: "
                             "leave out bands and rows, or target_jaccard")
        return {**values, "bands": bands, "rows": rows, "permutations": count}

    @model_validator(mode="after")
    def _enough(self) -> DedupNearStep:
        if self.num_permutations < self.bands * self.rows:
            raise ValueError(f"{self.bands} bands of {self.rows} rows need {self.bands * self.rows} permutations, not "
                             f"{self.permutations}")
        return self

    @property
    def num_permutations(self) -> int:
        """Length of a signature."""
        return self.permutations or self.bands * self.rows


class DedupLinesStep(Config):
    """Cut out of documents the lines or paragraphs that other documents have too."""

    unit: Literal["line", "paragraph"] = "paragraph"
    """What is compared: lines, or paragraphs (lines up to a blank one). Case, accents and punctuation do not count."""
    min_characters: int = Field(20, ge=1)
    """Shorter ones are left alone, and so are those without a letter or digit."""
    max_repeats: int = Field(1, ge=1)
    """Documents in which one may stand."""
    keep: Literal["first", "none"] = "first"
    """Of those in more documents: `first` leaves them in the best `max_repeats` documents (source priority, quality,
    length, id), `none` in no document, as one does with boilerplate."""


class DecontaminateStep(Config):
    """Find documents that contain items of evaluation sets, also edited and in part."""

    evals: tuple[str, ...] = Field(min_length=1)
    """JSONL files of evaluation items, folders of them or patterns; relative ones are below the pipeline's input."""
    action: Literal["drop", "cut", "annotate"] = "drop"
    """What happens to such a document. `drop`: it goes. `cut`: the match goes, with 200 characters on each side; pieces
    of at least 200 characters stay, a blank line between them, and a document in more than 10 pieces goes (GPT-3).
    `annotate`: it stays, and the verdicts tell of it."""
    ngram: int = Field(13, ge=5, le=1000)
    """Matching words that make a part of an item a match (GPT-3's 13), if they are 40 % of it. Of an item with fewer
    than 29 words 45 % are enough, and of short items the whole but for a few words is needed."""
    fail_above: float | None = Field(None, ge=0, le=1)
    """The run fails when a larger share of the documents contains evaluation items; nothing is published then."""
    check_packed: bool = True
    """Search the packed rows again, as text, and tell in the summary what is found there."""


class TrainTokenizer(Config):
    """Train a byte-level BPE tokenizer on a sample of the documents that are left."""

    vocabulary_size: int = Field(32_000, ge=258, le=1 << 20)
    """Tokens, the 256 bytes and the special tokens included."""
    sample_bytes: int = Field(100_000_000, ge=1)
    """Documents are taken in order of the hash of their id until their text reaches this many bytes."""
    special_tokens: tuple[str, ...] = ()
    """Names of further special tokens, for a chat template."""


class TokenizeStep(Config):
    """Text to tokens, with a tokenizer trained here or one that exists."""

    train: TrainTokenizer | None = None
    """Train one."""
    file: str | None = None
    """Or take this file: a Hugging Face tokenizer.json, a SentencePiece .model, a tiktoken rank file, or GPT-2's
    vocab.bpe with encoder.json beside it. A relative path is below the pipeline's input."""
    bos: Literal["none", "document"] = "none"
    """`document` puts the begin-of-text token before each document."""
    eos: Literal["none", "document"] = "document"
    """`document` puts the end-of-text token behind each document."""
    bos_token: str | None = None
    """Name of the begin-of-text token, where it is not one of the usual names."""
    eos_token: str | None = None
    """Name of the end-of-text token, likewise."""
    pad_token: str | None = None
    """Name of the padding token, likewise; the end-of-text token where there is none."""
    vocabulary_multiple: int = Field(128, ge=1, le=1 << 16)
    """The vocabulary is padded to a multiple of this (times the tensor-parallel size, for tensor cores)."""
    encoding: str | None = None
    """Of a tiktoken file: gpt2, r50k_base, p50k_base, cl100k_base or o200k_base. Known by its size if left out."""
    pattern: str | None = None
    """Of a tiktoken file of another maker: the regular expression that cuts text."""
    special_tokens: dict[str, int] = Field(default_factory=dict)
    """Of a tiktoken file: names and ids of further special tokens."""
    chat_template: str | None = None
    """Of chat and preference data: a Jinja file, instead of the chat_template.jinja beside the tokenizer, or the
    chat_template in the tokenizer_config.json there. The template says which tokens a conversation begins and ends
    with; `bos` and `eos` do not count."""
    template_date: datetime | None = None
    """Of chat and preference data: the date, or date and time, that a template is given which asks for today's with
    `strftime_now`. Without it such a template is an error: the day of the run must not decide the tokens."""

    @field_validator("template_date")
    @classmethod
    def _without_zone(cls, value: datetime | None) -> datetime | None:
        if value is not None and value.tzinfo is not None:
            raise ValueError("write a date, or a date and time without a time zone")
        return value

    @model_validator(mode="after")
    def _one(self) -> TokenizeStep:
        if (self.train is None) == (self.file is None):
            raise ValueError("give either train or file")
        return self


class PackStep(Config):
    """Pack documents into rows of fixed length and write the training and validation sets."""

    sequence_length: int = Field(2048, ge=8, le=1 << 20)
    """Tokens in a row."""
    method: Literal["best_fit", "concatenate"] = "best_fit"
    """`best_fit` (decreasing) cuts only documents longer than a row; `concatenate` writes one document behind the
    other and cuts where a row ends."""
    window: int = Field(1 << 20, ge=1)
    """Documents that `best_fit` sorts by length at a time."""
    validation_fraction: float = Field(0.01, ge=0, lt=1)
    """Share of the documents, chosen by the hash of their id, that goes to the validation set."""
    rows_per_shard: int = Field(1024, ge=1)
    """Rows in a shard file."""
    waves: int = Field(0, ge=0, le=1 << 16)
    """Training may begin before the set is whole: its partitions are so many groups, at most one each, and the set is
    read group by group, each shuffled by itself. Partitions are by the hash of a document's id, so each group is a
    random sample of the corpus; but a sequence never leaves its group's stretch of an epoch. The validation set is
    packed first. 0: one order over the whole set, which is read when all of it is there."""


class WriteStep(Config):
    """Write the documents that are left, below `dataset/`: files that other tools read, with a card, Croissant metadata
    and a manifest."""

    formats: tuple[Literal["parquet", "jsonl", "arrow", "mds", "megatron"], ...] = ()
    """`parquet` (what `datasets.load_dataset` reads), `jsonl` (with zstd), `arrow`, `mds` (MosaicML streaming), and
    behind `tokenize` `megatron` (.bin and .idx of Megatron-LM). If left out: parquet; megatron where the recipe
    tokenizes and does not pack."""
    validation_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the documents, chosen by the hash of their id as `pack` does, that goes to the split `validation`."""
    shard_bytes: int = Field(256 << 20, ge=1, le=1 << 30)
    """Text in a file; a partition begins a new one when it is reached."""

    @field_validator("formats")
    @classmethod
    def _once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if repeated := sorted({name for name in value if value.count(name) > 1}):
            raise ValueError(f"{', '.join(repeated)} is given twice")
        return value


class Step(Config):
    """One step of the recipe: exactly one of these keys."""

    filter: FilterStep | None = None
    """Row-local rules."""
    dedup_url: DedupUrlStep | None = None
    """Deduplication by URL."""
    dedup_exact: DedupExactStep | None = None
    """Exact deduplication of normalised text."""
    dedup_near: DedupNearStep | None = None
    """MinHash near-deduplication."""
    dedup_lines: DedupLinesStep | None = None
    """Removal of lines or paragraphs that are repeated across documents."""
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
        return _bare(values)

    @model_validator(mode="after")
    def _one(self) -> Step:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            told = f"{len(given)} given: {', '.join(given)}" if given else "none given"
            raise ValueError(f"a step is exactly one of {', '.join(type(self).model_fields)} ({told})")
        return self

    @property
    def kind(self) -> str:
        """The key that is set."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def settings(self) -> Config:
        """The settings under that key."""
        return getattr(self, self.kind)


def _bare(values: Any) -> Any:
    """`- dedup_exact` and `- dedup_exact:` mean `- dedup_exact: {}`."""
    if isinstance(values, str):
        return {values: {}}
    if isinstance(values, dict) and len(values) == 1:
        return {name: {} if value is None else value for name, value in values.items()}
    return values


def editing_parts(step: Step) -> list[str]:
    """What of a step may change the text of a document that it keeps."""
    if step.filter is not None:
        if step.filter.annotate:
            return []
        return [name_of(type(filter)) for filter in step.filter.filters if filter.EDITS]
    return [step.kind] if step.kind == "dedup_lines" or getattr(step.settings, "action", None) == "cut" else []
