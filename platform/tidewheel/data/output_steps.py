"""Settings of the recipe's last steps: `tokenize`, `pack` and `write`."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field, field_validator, model_validator

from tidewheel.config import Config


class TrainTokenizer(Config):
    """Train a byte-level BPE tokenizer on a sample of the remaining documents."""

    vocabulary_size: int = Field(32_000, ge=258, le=1 << 20)
    """Number of tokens, including the 256 bytes and the special tokens."""
    sample_bytes: int = Field(100_000_000, ge=1)
    """Size of the sample in bytes of text. Documents are taken in the order of the hash of their id."""
    special_tokens: tuple[str, ...] = ()
    """Names of additional special tokens, for a chat template."""


class TokenizeStep(Config):
    """Turn text into tokens, with a tokenizer that is trained here or an existing one."""

    train: TrainTokenizer | None = None
    """Train a tokenizer."""
    file: str | None = None
    """Use this tokenizer file instead: a Hugging Face tokenizer.json, a SentencePiece .model, a tiktoken rank file, or
    GPT-2's vocab.bpe with encoder.json beside it. A relative path is below the pipeline's input."""
    bos: Literal["none", "document"] = "none"
    """`document` puts the begin-of-text token before each document."""
    eos: Literal["none", "document"] = "document"
    """`document` puts the end-of-text token after each document."""
    bos_token: str | None = None
    """Name of the begin-of-text token, if it is not one of the usual names."""
    eos_token: str | None = None
    """Name of the end-of-text token, if it is not one of the usual names."""
    pad_token: str | None = None
    """Name of the padding token, if it is not one of the usual names. Without one, the end-of-text token pads."""
    vocabulary_multiple: int = Field(128, ge=1, le=1 << 16)
    """Pad the vocabulary to a multiple of this (times the tensor-parallel size), for tensor cores."""
    encoding: str | None = None
    """Encoding of a tiktoken file: gpt2, r50k_base, p50k_base, cl100k_base or o200k_base. By default it is recognised
    by its size."""
    pattern: str | None = None
    """Regular expression that splits text, for a tiktoken file with another encoding."""
    special_tokens: dict[str, int] = Field(default_factory=dict)
    """Names and ids of additional special tokens of a tiktoken file."""
    chat_template: str | None = None
    """Jinja file with the template of chat and preference data. The default is chat_template.jinja beside the
    tokenizer, or the chat_template in its tokenizer_config.json. The template decides which tokens begin and end a
    conversation; `bos` and `eos` have no effect."""
    loss: Literal["assistant", "all", "last_turn"] = "assistant"
    """Which tokens of conversations are learnt: what the `assistant` says; `all` tokens, also those of the system, the
    user, tools and the template; or in the `last_turn` what the assistant says after the user's last message. A message
    with weight 0 is never learnt. Ignored for documents and pairs."""
    template_date: datetime | None = None
    """Date, or date and time, for templates of chat and preference data that call `strftime_now`. Without it such a
    template is an error: the day of the run must not decide the tokens."""

    @field_validator("template_date")
    @classmethod
    def _without_zone(cls, value: datetime | None) -> datetime | None:
        if value is not None and value.tzinfo is not None:
            raise ValueError("write a date, or a date and time without a time zone")
        return value

    @model_validator(mode="after")
    def _one_tokenizer(self) -> TokenizeStep:
        if (self.train is None) == (self.file is None):
            raise ValueError("give either train or file")
        return self


class PackStep(Config):
    """Pack documents into rows of fixed length and write the training and validation sets."""

    sequence_length: int = Field(2048, ge=8, le=1 << 20)
    """Tokens in a row."""
    method: Literal["best_fit", "concatenate", "one_per_row"] = "best_fit"
    """`best_fit` (decreasing) cuts only documents longer than a row. `concatenate` writes documents one after another
    and cuts where a row ends. `one_per_row` gives each document, or piece of a longer one, a row of its own: train on
    such a set with `batch.group_by_length`."""
    window: int = Field(1 << 20, ge=1)
    """Number of documents that `best_fit` sorts by length at a time."""
    validation_fraction: float = Field(0.01, ge=0, lt=1)
    """Share of the documents in the validation set, chosen by the hash of their id."""
    rows_per_shard: int = Field(1024, ge=1)
    """Rows in a shard file."""
    waves: int = Field(0, ge=0, le=1 << 16)
    """Number of groups of partitions, so that training can start before the set is complete. The set is read group by
    group, each shuffled by itself. Partitions are by the hash of a document's id, so each group is a random sample of
    the corpus, but a sequence never leaves its group's part of an epoch. The validation set is packed first. There is
    at most one group for each partition. 0: one order over the whole set, which is read once it is complete."""


class WriteStep(Config):
    """Write the remaining documents below `dataset/`: files for other tools, with a card, Croissant metadata and a
    manifest."""

    formats: tuple[Literal["parquet", "jsonl", "arrow", "mds", "megatron"], ...] = ()
    """`parquet` (for `datasets.load_dataset`), `jsonl` (with zstd), `arrow`, `mds` (MosaicML streaming), and after
    `tokenize` also `megatron` (.bin and .idx of Megatron-LM). The default is parquet, or megatron in a recipe that
    tokenizes and does not pack."""
    validation_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the documents in the split `validation`, chosen by the hash of their id as in `pack`."""
    shard_bytes: int = Field(256 << 20, ge=1, le=1 << 30)
    """Bytes of text after which a partition starts a new file."""

    @field_validator("formats")
    @classmethod
    def _no_repeats(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if repeated := sorted({name for name in value if value.count(name) > 1}):
            raise ValueError(f"{', '.join(repeated)} is given twice")
        return value
