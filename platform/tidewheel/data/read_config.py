"""Settings of `read`: which files hold the documents, and which fields of a record mean what."""

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
    """Which files of a source tree are documents (`format: code`)."""

    max_bytes: int = Field(default=1 << 20, ge=1, le=1 << 30)
    """A larger file is left out."""
    languages: tuple[str, ...] = ()
    """Only these, as `data/languages.py` names them; every known one if left out."""
    keep: tuple[Literal["hidden", "vendored", "generated", "unknown_language"], ...] = ()
    """Reasons for which nothing is left out."""

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
    """Which files hold the documents, and which fields of a record mean what."""

    paths: tuple[str, ...] = Field(min_length=1)
    """Glob patterns; relative ones are below the pipeline's input, full URIs and absolute paths stand alone. A path
    without *, ? and [ that names a folder, "." for the input itself, is a data set in the layout of `datasets` or of
    the Hugging Face hub; `hf://datasets/owner/name` is one on the hub."""
    split: str = "train"
    """Of a data set in a folder or on the hub: the split to read, several as `train+validation`, or `all`."""
    subset: str | None = None
    """Likewise: its subset (`config_name` in its README.md). Without one the default, or the only one there is."""
    text: Annotated[Annotated[str, Tag("field")] | Annotated[TextTemplate, Tag("fields")],
                    Discriminator(lambda given: "fields" if isinstance(given, dict | TextTemplate) else "field")
                    ] = "text"
    """Field with the document's text, or several as one text: `{template: "{title}\\n\\n{body}"}`. Here and below
    `data.text` means the field `text` of the object `data`, unless a field has that very name. In a template `{text}`
    is the text of a file that is one text: source code, a text file, a web page."""
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
    format: str | pydantic.InstanceOf[Reader] = AUTO
    """What the files are: auto, jsonl, json, csv, tsv, parquet, arrow, text, warc, code, or a reader of your own,
    `my_readers:Games`, with settings `{kind: "my_readers:Games", moves: 40}`. `auto` goes by their first bytes, also of
    gzip, zstd and UTF-16, and by their ending where that decides (.txt and .md are text, whatever is in them). `json`
    is an array of records, or records over several lines; the first row of `csv` and `tsv` names the fields. A text
    file is one document: its path is its id, its folder its source. A page of a web archive has the fields id, url,
    host and date: with `source: host` each host is a source. `code` is a tree of source files, each a document with the
    fields path, language, id (its path) and source (the first folder of its path)."""
    code: CodeConfig = CodeConfig()
    """Which files of a source tree are documents."""
    max_record_bytes: int = Field(default=64 << 20, ge=1, le=1 << 30)
    """A longer record is put in quarantine; it bounds the memory that reading takes."""
    unit_bytes: int = Field(default=256 << 20, ge=1)
    """A larger file is read in ranges of about this size, each a unit that a restart need not do again: plain JSONL by
    bytes, Parquet by row groups. What is read does not depend on it."""
    kind: Literal["documents", "chat", "preferences"] = "documents"
    """What a record is: a document with a text; a conversation, of which a model learns what the assistant says; or a
    pair of answers, a better and a worse one. Messages are {role, content}, or ShareGPT's {from, value}; the roles are
    system, developer, user, assistant and tool. A conversation is read in the first layout that its record has:
    messages, conversations, prompt and completion, instruction and output."""
    messages: str = "messages"
    """Chat: field with the list of messages."""
    conversations: str = "conversations"
    """Chat without messages: field with the list of messages, as ShareGPT calls it."""
    prompt: str = "prompt"
    """Chat without messages: field with what the user says. Preferences: field with the prompt. Text or messages."""
    completion: str = "completion"
    """Chat without messages: field with what the assistant says. Text or messages."""
    instruction: str = "instruction"
    """Chat without messages: field with the instruction of an Alpaca record."""
    input: str = "input"
    """Alpaca: field with the text that the instruction is about; may be empty or missing."""
    output: str = "output"
    """Alpaca: field with what the assistant says."""
    alpaca_prompt: Literal["alpaca", "plain"] = "alpaca"
    """What the user says in an Alpaca record: `alpaca` is the prompt that Alpaca was trained with ("Below is an
    instruction ..."), with and without an input; `plain` is the instruction, a blank line and the input."""
    system: str = "system"
    """ShareGPT and Alpaca: field with a system prompt, put first where the messages do not begin with one."""
    tools: str = "tools"
    """Chat and preferences: field with the tools that the assistant may call, a list of JSON schemas or its JSON
    text; the chat template is given them."""
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

    @field_validator("format", mode="before")
    @classmethod
    def _reader(cls, value: Any) -> Any:
        try:
            return chosen(value)
        except ConfigError as error:
            message = f"{error.what}; {error.mend}"
            raise PydanticCustomError("no_reader", "{message}", {"message": message}) from None

    @field_serializer("format")
    def _format_as_json(self, value: str | Reader) -> Any:
        return as_json(value) if isinstance(value, Reader) else value

    @property
    def format_name(self) -> str:
        """The name of the format that the files are said to be; "auto" where their content says it."""
        return name_of(type(self.format)) if isinstance(self.format, Reader) else self.format

    @model_validator(mode="after")
    def _one_text(self) -> ReadConfig:
        if self.kind != "documents" and isinstance(self.text, TextTemplate):
            raise ValueError(f"text: kind {self.kind} takes its text from messages; a template is for documents")
        return self

    @property
    def text_name(self) -> str:
        """The field that holds the text of a file that is one text."""
        return self.text if isinstance(self.text, str) else "text"

    @property
    def text_fields(self) -> tuple[str, ...]:
        """The fields that make up a document's text."""
        return (self.text,) if isinstance(self.text, str) else self.text.fields


_CODE = "reader_code"


def bound(config: ReadConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` of `read` (in their form for keys) as workers need them, with the code of a user's reader."""
    values = dict(settings)
    if isinstance(config.format, Reader):
        code = Code.of(type(config.format))
        values["format"] = as_json(config.format)
        values[_CODE] = None if code is None else asdict(code)
    return values


def received(values: Mapping[str, Any]) -> ReadConfig:
    """Return the settings from the values that `bound` returned.

    Raises:
        ConfigError: the reader's module is missing on this node, or has a different source here.
    """
    settings = dict(values)
    if (code := settings.pop(_CODE, None)) is not None:
        Code(**code).arrive()
    return ReadConfig(paths=("-",), **settings)
