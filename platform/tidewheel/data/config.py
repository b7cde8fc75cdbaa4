"""The recipe of a data pipeline: what `tidewheel data run` reads, and what the SDK builds.

Imports nothing heavy, so that a wrong key is reported at once.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from tidewheel.config import Config, recipe_hash
from tidewheel.data.filters.c4 import C4
from tidewheel.data.filters.classifier import Classifier
from tidewheel.data.filters.fineweb import FineWeb
from tidewheel.data.filters.language import Language
from tidewheel.data.filters.pii import Pii
from tidewheel.data.filters.quality import GopherQuality
from tidewheel.data.filters.refinedweb import RefinedWeb
from tidewheel.data.filters.repetition import GopherRepetition
from tidewheel.data.filters.urls import UrlFilter
from tidewheel.data.filters.words import WordFilter
from tidewheel.placement import PlacementConfig


class ReadConfig(Config):
    """Which files hold the documents, and which fields of a record mean what."""

    paths: tuple[str, ...] = Field(min_length=1)
    """Glob patterns; relative ones are below the pipeline's input, full URIs and absolute paths stand alone."""
    text: str = "text"
    """Field with the document's text. Here and below `data.text` means the field `text` of the object `data`, unless a
    field has that very name."""
    id: str | None = "id"
    """Field with the document's unique, stable id. Records without it are named by content; so are all, with `null`."""
    source: str | None = "source"
    """Field that says where a document came from. Records without it take the name of their file."""
    url: str | None = "url"
    """Field with the address the text was found at; `meta` holds it as `url`."""
    language: str | None = "language"
    """Field with the language; `meta` holds it as `language`."""
    license: str | None = "license"
    """Field with the licence; `meta` holds it as `license`."""
    format: Literal["auto", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "text", "warc"] = "auto"
    """What the files are. `auto` goes by their first bytes, also of gzip, zstd and UTF-16, and by their ending where
    that decides (.txt and .md are text, whatever is in them). `json` is an array of records, or records over several
    lines; the first row of `csv` and `tsv` names the fields. A text file is one document: its path is its id, its
    folder its source. A page of a web archive has the fields id, url, host and date: with `source: host` each host is a
    source."""
    max_record_bytes: int = Field(default=64 << 20, ge=1, le=1 << 30)
    """A longer record is put in quarantine; it bounds the memory that reading takes."""
    unit_bytes: int = Field(default=256 << 20, ge=1)
    """A larger file is read in ranges of about this size, each a unit that a restart need not do again: plain JSONL by
    bytes, Parquet by row groups. What is read does not depend on it."""
    kind: Literal["documents", "chat", "preferences"] = "documents"
    """What a record is: a document with a text; a conversation, of which a model learns what the assistant says; or a
    pair of answers, a better and a worse one. Messages are {role, content}; the roles are system, developer, user,
    assistant and tool."""
    messages: str = "messages"
    """Chat: field with the list of messages."""
    prompt: str = "prompt"
    """Chat without messages: field with what the user says. Preferences: field with the prompt. Text or messages."""
    completion: str = "completion"
    """Chat without messages: field with what the assistant says. Text or messages."""
    chosen: str = "chosen"
    """Preferences: field with the better answer. Text or messages."""
    rejected: str = "rejected"
    """Preferences: field with the worse answer. Text or messages."""
    priority: dict[str, int] = Field(default_factory=dict)
    """Of two duplicates the one whose source has the higher priority stays. Sources not named here have 0."""
    sample: float | None = Field(default=None, gt=0, le=1)
    """Read this share of the documents, chosen by the hash of their id: the same ones each time, whatever files they
    are in, and all of them are in any larger sample."""
    limit: int | None = Field(default=None, ge=1)
    """Read at most so many documents: of each file the first ones, in proportion to its size, and no further. A file
    may have fewer than its part."""

    @model_serializer(mode="wrap")
    def _without_no_sample(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """So that a recipe without them has the hash that it had before there were any."""
        values: dict[str, Any] = serialize(self)
        return {name: value for name, value in values.items() if name not in ("sample", "limit") or value is not None}


EDITING_FILTERS = ("c4", "refinedweb", "pii")
"""Filters that may keep a document with another text."""


class FilterStep(Config):
    """Rules that look at one document alone. Several in one step apply in the order of the fields here (FineWeb's)."""

    urls: UrlFilter | None = None
    """Lists of domains, pages and words in URLs."""
    language: Language | None = None
    """Language identification with a fastText model."""
    gopher_repetition: GopherRepetition | None = None
    """The repetition rules of Gopher: duplicate lines and paragraphs, frequent and repeated n-grams."""
    gopher_quality: GopherQuality | None = None
    """The quality rules of Gopher (Rae et al. 2021, table A1)."""
    c4: C4 | None = None
    """C4's line rules: lines that end no sentence, of too few words, about cookies and JavaScript are removed."""
    fineweb: FineWeb | None = None
    """FineWeb's own rules: ends of lines, short and repeated lines, lists."""
    refinedweb: RefinedWeb | None = None
    """RefinedWeb's line rules, as DCLM has them: lines in upper case, of digits, counters and menus are removed."""
    words: WordFilter | None = None
    """Lists of words in the text."""
    classifier: Classifier | None = None
    """A quality classifier in fastText's format."""
    pii: Pii | None = None
    """E-mail and public IPv4 addresses are replaced by placeholders."""
    annotate: bool = False
    """Drop and edit nothing: write each document's statistics, and the reason for which it would have been dropped,
    to `annotations/<stage>/*.parquet`, so that thresholds can be chosen."""

    @model_validator(mode="before")
    @classmethod
    def _bare_names(cls, values: Any) -> Any:
        return _bare(values)

    @model_validator(mode="after")
    def _some(self) -> FilterStep:
        if not self.rules():
            raise ValueError(f"name at least one filter: {', '.join(self.names())}")
        return self

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The filters there are, in the order they apply."""
        return tuple(name for name in cls.model_fields if name != "annotate")

    def rules(self) -> tuple[tuple[str, Config], ...]:
        """(name, settings) of the filters asked for, in the order they apply."""
        found = ((name, getattr(self, name)) for name in self.names())
        return tuple((name, settings) for name, settings in found if settings is not None)


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
    """Of chat and preference data: a Jinja file, instead of the chat_template in the tokenizer_config.json beside the
    tokenizer. The template says which tokens a conversation begins and ends with; `bos` and `eos` do not count."""

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

    @model_serializer(mode="wrap")
    def _without_no_waves(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """So that a recipe without waves has the hash that it had before there were any."""
        values: dict[str, Any] = serialize(self)
        if not values.get("waves"):  # left out already when only what is set is wanted
            values.pop("waves", None)
        return values


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

    @model_serializer(mode="wrap")
    def _without_no_write(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """So that a recipe that writes nothing has the hash that it had before there was such a step."""
        values: dict[str, Any] = serialize(self)
        if values.get("write") is None:
            values.pop("write", None)
        return values

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


def _editing(step: Step) -> list[str]:
    """What of a step may change the text of a document that it keeps."""
    if step.filter is not None:
        return [] if step.filter.annotate else [name for name, _ in step.filter.rules() if name in EDITING_FILTERS]
    return [step.kind] if step.kind == "dedup_lines" or getattr(step.settings, "action", None) == "cut" else []


#: Steps that come last, in this order.
LAST = ("tokenize", "pack", "write")
#: Settings that say where a pipeline is computed, not what.
UNDECISIVE = ("placement",)


class PipelineConfig(Config):
    """A recipe: documents in; token shards, or documents for other tools, out."""

    name: str = Field("pipeline", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Shown in reports."""
    seed: int = Field(0, ge=0, lt=1 << 32)
    """Chooses the validation split."""
    read: ReadConfig
    """Where the documents are."""
    max_bad_fraction: float = Field(0.05, ge=0, le=1)
    """The run fails when a larger share of the records cannot be used; the others are put in quarantine."""
    partitions: Literal["auto"] | int = "auto"
    """Partitions of the documents by id: the unit of work after reading. `auto` takes one per 64 MiB of input
    (compressed files count three times), rounded up to a power of two, at least 4; it never depends on the cluster. A
    worker's memory follows the size of a partition, so more of them need less."""
    placement: PlacementConfig = PlacementConfig()
    """Nodes that its tasks run on."""
    steps: tuple[Step, ...]
    """What is done, in this order. `tokenize`, `pack` and `write` come last, in this order, and each may be left out; a
    recipe without pack and write ends as if `write` stood there."""

    @field_validator("partitions")
    @classmethod
    def _positive(cls, value: Literal["auto"] | int) -> Literal["auto"] | int:
        if value != "auto" and not 1 <= value <= 1 << 20:
            raise ValueError("write auto, or a number from 1 to 1048576")
        return value

    @model_validator(mode="after")
    def _order(self) -> PipelineConfig:
        kinds = [step.kind for step in self.steps]
        last = [kind for kind in kinds if kind in LAST]
        if kinds[len(kinds) - len(last) :] != sorted(last, key=LAST.index):
            raise ValueError(f"the last steps are {', '.join(LAST)}, in this order, found {', '.join(kinds)}")
        if "pack" in kinds and "tokenize" not in kinds:
            raise ValueError("pack needs tokenize before it")
        for kind in sorted(set(kinds) - {"filter"}):
            if kinds.count(kind) > 1:
                raise ValueError(f"{kind} is given {kinds.count(kind)} times; once is enough")
        self._check_product()
        tokenize = self.step("tokenize")
        if self.read.kind != "documents" and tokenize and tokenize.train and not tokenize.chat_template:
            raise ValueError("a tokenizer trained here has no chat template: name one with tokenize.chat_template, and "
                             "its special tokens with tokenize.train.special_tokens")
        if self.read.kind != "documents" and (editing := [name for step in self.steps for name in _editing(step)]):
            raise ValueError(f"{', '.join(editing)} would change the text of conversations, whose messages are what is "
                             "tokenized: leave out what edits, or give filters annotate: true")
        if self.read.kind == "preferences" and self.step("pack") and self.step("pack").waves:
            raise ValueError("pack.waves is for packed sequences, which training reads in order; leave it out")
        return self

    def _check_product(self) -> None:
        product = self.product
        if product is None or "megatron" not in product.formats:
            if self.step("tokenize") and not self.step("pack"):
                raise ValueError("nothing takes the tokens: add pack, or write with formats: [megatron]")
            return
        if not self.step("tokenize"):
            raise ValueError("write.formats: megatron holds tokens, so tokenize must come before it")
        if self.read.kind != "documents":
            raise ValueError("write.formats: megatron has no loss mask, so it holds documents, not conversations")

    @property
    def product(self) -> WriteStep | None:
        """The step `write` with its formats; None in a recipe that packs and writes nothing else."""
        step = self.step("write")
        if step is None and self.step("pack"):
            return None
        step = step or WriteStep.model_validate({})
        default = "megatron" if self.step("tokenize") and not self.step("pack") else "parquet"
        return step if step.formats else step.model_copy(update={"formats": (default,)})

    def recipe_hash(self) -> str:
        """Hash of what decides the result: not where it is computed."""
        return recipe_hash({name: value for name, value in self.canonical().items() if name not in UNDECISIVE})

    def step(self, kind: str) -> Any:
        """Settings of the step of this kind, or None."""
        return next((step.settings for step in self.steps if step.kind == kind), None)
