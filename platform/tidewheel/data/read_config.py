"""Settings of `read`: the input files, and the meaning of the fields of a record."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

import pydantic
from pydantic import (
    Discriminator,
    Field,
    Tag,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tidewheel.config import Config
from tidewheel.data.reader import AUTO, Reader, chosen
from tidewheel.data.text_template import TextTemplate
from tidewheel.errors import ConfigError
from tidewheel.parts import Code, as_json, name_of


class CodeConfig(Config):
    """Files of a source tree that are documents (`format: code`)."""

    max_bytes: int = Field(default=1 << 20, ge=1, le=1 << 30)
    """Maximum size of a file; larger ones are skipped."""
    languages: tuple[str, ...] = ()
    """Languages to read, by their names in `data/languages.py`; the default is all known ones."""
    keep: tuple[Literal["hidden", "vendored", "generated", "unknown_language"], ...] = ()
    """Reasons to skip files that are ignored."""

    @field_validator("languages")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        from tidewheel.data.languages import LANGUAGES

        for name in value:
            if name not in LANGUAGES:
                near = difflib.get_close_matches(name.lower(), [known.lower() for known in LANGUAGES], n=1)
                hint = [known for known in LANGUAGES if near and known.lower() == near[0]]
                raise ValueError(f"unknown language {name!r}" + (f", did you mean {hint[0]!r}?" if hint else ""))
        return value


class ReadConfig(Config):
    """Input files, and the meaning of the fields of a record."""

    paths: tuple[str, ...] = Field(min_length=1)
    """Glob patterns. Relative ones are below the pipeline's input; URIs and absolute paths are used as they are. A path
    without *, ? and [ that names a folder ("." for the input itself) is a data set in the layout of `datasets` or of
    the Hugging Face hub. `hf://datasets/owner/name` is a data set on the hub."""
    split: str = "train"
    """Split to read from a data set in a folder or on the hub; several as `train+validation`, or `all`."""
    subset: str | None = None
    """Subset to read from such a data set (`config_name` in its README.md). The default is its default subset, or its
    only one."""
    text: Annotated[Annotated[str, Tag("field")] | Annotated[TextTemplate, Tag("fields")],
                    Discriminator(lambda given: "fields" if isinstance(given, dict | TextTemplate) else "field")
                    ] = "text"
    """Field with the document's text, or a template of several fields: `{template: "{title}\\n\\n{body}"}`. Here and
    below, `data.text` is the field `text` of the object `data`, unless a field has exactly that name. In a template,
    `{text}` is the text of a file with a single text: source code, a text file, a web page."""
    id: str | None = "id"
    """Field with the document's unique, stable id. The id of a record without it is the hash of its text; `null` means
    that no record has one."""
    source: str | None = "source"
    """Field with the source of a document. The default is the name of its file."""
    url: str | None = "url"
    """Field with the address of the text; `meta` holds it as `url`."""
    language: str | None = "language"
    """Field with the language; `meta` holds it as `language`."""
    license: str | None = "license"
    """Field with the licence; `meta` holds it as `license`."""
    format: str | pydantic.InstanceOf[Reader] = AUTO
    """Format of the files: auto, jsonl, json, csv, tsv, parquet, arrow, text, warc, code, or a reader of your own,
    `my_readers:Games`, with settings `{kind: "my_readers:Games", moves: 40}`. `auto` recognises files by their first
    bytes, also inside gzip, zstd and UTF-16, and some by their ending (.txt and .md are always text). `json` is an
    array of records, or records over several lines. The first row of `csv` and `tsv` names the fields. A text file is
    one document: its path is its id, its folder its source. A page of a web archive has the fields id, url, host and
    date; with `source: host` each host is a source. `code` is a tree of source files, each a document with the fields
    path, language, id (its path) and source (the first folder of its path)."""
    code: CodeConfig = CodeConfig()
    """Files of a source tree that are documents."""
    max_record_bytes: int = Field(default=64 << 20, ge=1, le=1 << 30)
    """Maximum size of a record, which bounds the memory for reading. Longer records go to quarantine."""
    unit_bytes: int = Field(default=256 << 20, ge=1)
    """Approximate size of the ranges in which larger files are read, plain JSONL by bytes and Parquet by row groups. A
    restart repeats only unfinished ranges. The documents do not depend on it."""
    kind: Literal["documents", "chat", "preferences"] = "documents"
    """Kind of the records: documents with a text; conversations, from which a model learns what the assistant says; or
    preference pairs of a better and a worse answer. Messages are {role, content}, or ShareGPT's {from, value}; the
    roles are system, developer, user, assistant and tool. A conversation is read in the first layout that its record
    has: messages, conversations, prompt and completion, instruction and output."""
    messages: str = "messages"
    """Chat: field with the list of messages."""
    conversations: str = "conversations"
    """Chat without messages: field with the list of messages, by ShareGPT's name."""
    prompt: str = "prompt"
    """Chat without messages: field with the user's part. Preferences: field with the prompt. Text or messages."""
    completion: str = "completion"
    """Chat without messages: field with the assistant's part. Text or messages."""
    instruction: str = "instruction"
    """Chat without messages: field with the instruction of an Alpaca record."""
    input: str = "input"
    """Alpaca: field with the input of the instruction; it may be empty or missing."""
    output: str = "output"
    """Alpaca: field with the assistant's answer."""
    alpaca_prompt: Literal["alpaca", "plain"] = "alpaca"
    """The user's message in an Alpaca record: `alpaca` is the prompt that Alpaca was trained with ("Below is an
    instruction ..."), with and without an input; `plain` is the instruction, a blank line and the input."""
    system: str = "system"
    """ShareGPT and Alpaca: field with a system prompt, which comes first unless the messages begin with one."""
    tools: str = "tools"
    """Chat and preferences: field with the tools that the assistant may call: a list of JSON schemas, or the list as
    JSON text. The chat template gets them."""
    chosen: str = "chosen"
    """Preferences: field with the better answer. Text or messages."""
    rejected: str = "rejected"
    """Preferences: field with the worse answer. Text or messages."""
    margin: str = ""
    """Preferences: field with a number that says by how much the better answer is better, for reward models. Empty:
    the pairs have no margins."""
    label: str = ""
    """Preferences: field that says whether the single answer of a record, its `completion`, is desirable: true or
    false. Empty: records have two answers."""
    step_labels: str = ""
    """Preferences: field with a list that says of each step of the single answer of a record whether it is right: true
    or false. The answer, `completion`, is then the list of the steps' texts. Empty: no labels of steps."""
    step_separator: str = "\n"
    """With step_labels: text between two steps."""
    priority: dict[str, int] = Field(default_factory=dict)
    """Priority of sources; others have 0. Of duplicates, the document whose source has the highest priority stays."""
    sample: float | None = Field(default=None, gt=0, le=1)
    """Share of the documents to read, chosen by the hash of their id. The sample does not depend on the files, and a
    larger sample contains all smaller ones."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum number of documents to read: the first ones of each file, in proportion to its size. A file may have
    fewer documents than its part."""

    @field_validator("format", mode="before")
    @classmethod
    def _reader(cls, value: Any) -> Any:
        try:
            return chosen(value)
        except ConfigError as error:
            message = f"{error.what}; {error.fix}"
            raise PydanticCustomError("no_reader", "{message}", {"message": message}) from None

    @field_serializer("format")
    def _format_as_json(self, value: str | Reader) -> Any:
        return as_json(value) if isinstance(value, Reader) else value

    @property
    def format_name(self) -> str:
        """Name of the configured format; "auto" to recognise it."""
        return name_of(type(self.format)) if isinstance(self.format, Reader) else self.format

    @model_validator(mode="after")
    def _one_text(self) -> ReadConfig:
        if self.label and (self.kind != "preferences" or self.margin):
            raise ValueError("label: only records of kind preferences have one answer with a label, and those have no "
                             "margin; leave it out, or set kind: preferences without margin")
        if self.step_labels and (self.kind != "preferences" or self.margin or self.label or not self.step_separator):
            raise ValueError("step_labels: only records of kind preferences have steps with labels, and those have "
                             "neither label nor margin, and a separator; leave it out, or set kind: preferences alone")
        if self.margin and self.kind != "preferences":
            raise ValueError(f"margin: records of kind {self.kind} have none; leave it out, or set kind: preferences")
        if self.kind != "documents" and isinstance(self.text, TextTemplate):
            raise ValueError(f"text: kind {self.kind} takes its text from messages; a template is only for documents")
        return self

    @property
    def text_name(self) -> str:
        """Field for the text of a file with a single text."""
        return self.text if isinstance(self.text, str) else "text"

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Fields that make up a document's text."""
        return (self.text,) if isinstance(self.text, str) else self.text.fields


_CODE = "reader_code"


def bound(config: ReadConfig, settings: Mapping[str, Any], reader: Reader) -> dict[str, Any]:
    """Return settings of `read` for workers, with the place of the reader's code if it is outside this package.

    Args:
        config: the settings of `read`.
        settings: the same in their form for keys.
        reader: the reader of the file that a worker will read.
    """
    values = dict(settings)
    if isinstance(config.format, Reader):
        values["format"] = as_json(config.format)
        reader = config.format
    if (code := Code.of(type(reader))) is not None:
        values[_CODE] = asdict(code)
    return values


def received(values: Mapping[str, Any]) -> ReadConfig:
    """Return the settings from the values that `bound` returned.

    Raises:
        ConfigError: the reader's module is missing on this node, or has a different source here.
    """
    settings = dict(values)
    if (code := settings.pop(_CODE, None)) is not None:
        Code(**code).load()
    return ReadConfig(paths=("-",), **settings)
