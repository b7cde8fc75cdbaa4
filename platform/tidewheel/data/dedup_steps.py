"""Settings of the recipe's steps that compare documents: deduplication and decontamination."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from tidewheel.config import Config


class DedupUrlStep(Config):
    """Keep one of the documents whose URLs have the same normal form (without scheme, www, tracking parameters)."""


class DedupExactStep(Config):
    """Keep one of the documents with the same normalised text (case, accents, punctuation and spacing are ignored)."""


class DedupNearStep(Config):
    """MinHash near-deduplication. Each removed document has a verified edge to a better document. Documents too short
    for a shingle are compared exactly."""

    unit: Literal["words", "characters"] = "words"
    """Units of a shingle: words or characters of the normalised text."""
    ngram: int = Field(5, ge=1, le=64)
    """Words or characters in a shingle."""
    bands: int = Field(14, ge=1, le=1024)
    """Bands of the signature. Two documents are compared if one of their bands is equal."""
    rows: int = Field(8, ge=1, le=256)
    """Hash values in a band. 14 x 8 finds a pair of Jaccard similarity 0.75 with probability 0.77, 0.85 with 0.99."""
    target_jaccard: float | None = Field(None, gt=0, lt=1)
    """Similarity threshold, instead of bands and rows, which are then chosen as datasketch chooses them."""
    permutations: int | None = Field(None, ge=1, le=4096)
    """Hash values in a signature: at least bands x rows, which is the default (128 with target_jaccard). More values
    make the estimate more precise: its standard error is sqrt(s (1 - s) / permutations)."""
    verify: Literal["estimated", "exact"] = "estimated"
    """How a candidate pair is verified: by the share of equal values in the two signatures, or by the shingle sets."""
    doubt: float = Field(2.5, ge=0, le=10)
    """Number of standard errors around min_jaccard within which an estimate does not decide: such a pair is compared by
    its shingle sets. With 0 estimates always decide, and only the report's sample reads texts again."""
    min_jaccard: float = Field(0.72, gt=0, le=1)
    """Verified similarity from which a pair counts as duplicates. The default is the threshold of the default bands,
    (1 / bands)^(1 / rows)."""
    seed: int = Field(1, ge=0, lt=1 << 32)
    """Seed of the permutations."""
    against: tuple[str, ...] = ()
    """Indexes of earlier dumps (the folders `near_index` of their outputs, oldest first). Their documents win over the
    documents of this input. Relative paths are below the pipeline's input."""
    write_index: bool = False
    """Write `near_index` below the output, for later dumps."""

    @model_validator(mode="before")
    @classmethod
    def _banding(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("target_jaccard") is None:
            return values
        from tidewheel.data.dedup.banding import optimal_banding

        target = values["target_jaccard"]
        count = values.get("permutations") or 128
        if not (isinstance(target, float) and 0 < target < 1 and isinstance(count, int) and 1 <= count <= 4096):
            return values  # the checks of the fields report this
        bands, rows = optimal_banding(target, count)
        if values.get("bands", bands) != bands or values.get("rows", rows) != rows:
            raise ValueError(f"target_jaccard {target:g} with {count} permutations means {bands} bands of {rows} rows: "
                             "leave out bands and rows, or target_jaccard")
        return {**values, "bands": bands, "rows": rows, "permutations": count}

    @model_validator(mode="after")
    def _enough_permutations(self) -> DedupNearStep:
        if self.num_permutations < self.bands * self.rows:
            raise ValueError(f"{self.bands} bands of {self.rows} rows need {self.bands * self.rows} permutations, not "
                             f"{self.permutations}")
        return self

    @property
    def num_permutations(self) -> int:
        """Length of a signature."""
        return self.permutations or self.bands * self.rows


class DedupLinesStep(Config):
    """Cut lines or paragraphs that other documents contain too."""

    unit: Literal["line", "paragraph"] = "paragraph"
    """What is compared: lines, or paragraphs (lines up to a blank one). Case, accents and punctuation are ignored."""
    min_characters: int = Field(20, ge=1)
    """Minimum length of a line or paragraph. Shorter ones, and ones without a letter or digit, are never cut."""
    max_repeats: int = Field(1, ge=1)
    """Number of documents that may contain the same line or paragraph."""
    keep: Literal["first", "none"] = "first"
    """Which copies stay: `first` keeps those in the best `max_repeats` documents (by source priority, quality, length,
    id), `none` keeps none, as is usual for boilerplate."""


class DecontaminateStep(Config):
    """Find documents that contain items of evaluation sets, also edited and partial ones."""

    evals: tuple[str, ...] = Field(min_length=1)
    """JSONL files of evaluation items, folders of them or patterns. Relative paths are below the pipeline's input."""
    action: Literal["drop", "cut", "annotate"] = "drop"
    """What happens to a contaminated document. `drop` removes it. `cut` removes the match with 200 characters on each
    side; it keeps pieces of at least 200 characters, joined by a blank line, and drops a document in more than 10
    pieces (GPT-3). `annotate` keeps it and records a verdict."""
    ngram: int = Field(13, ge=5, le=1000)
    """Number of matching words (GPT-3's 13) that make a part of an item a match, if they are 40 % of the item. Items of
    fewer than 29 words need 45 %; short items need all but a few words."""
    fail_above: float | None = Field(None, ge=0, le=1)
    """Fail, and publish nothing, if a larger share of the documents contains evaluation items."""
    check_packed: bool = True
    """Decode the packed rows, search them again, and report matches in the summary."""
