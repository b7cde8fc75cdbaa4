"""Schema and ids of the documents of a pipeline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import xxhash

from tidewheel.versions import Version

VERSION = Version("documents")
DOCUMENT_SCHEMA = pa.schema([
    pa.field("id", pa.string(), nullable=False),  # stable: given, or `content_id`; never a row number
    pa.field("text", pa.large_string(), nullable=False),
    pa.field("source", pa.string(), nullable=False),
    pa.field("meta", pa.string(), nullable=False),  # JSON object
])

SPOKEN = ("messages", "tools", "prompt", "chosen", "rejected")
"""Fields of `meta` whose contents keep their order, because chat templates write them out."""


def encode_meta(meta: Mapping[str, Any], *, ensure_ascii: bool = True) -> str:
    """Return the JSON text of a document's `meta`, with sorted names except inside conversations (`SPOKEN`)."""
    parts = (f"{json.dumps(name, ensure_ascii=ensure_ascii)}: "
             f"{json.dumps(meta[name], sort_keys=name not in SPOKEN, ensure_ascii=ensure_ascii)}"
             for name in sorted(meta))
    return f"{{{', '.join(parts)}}}"


def content_id(text: str) -> str:
    """Return the id of a document without one: XXH3-128 of its UTF-8 bytes, 32 hex digits.

    Equal texts get equal ids, so readers must make ids unique within an input, for example by dropping the second
    copy as an exact duplicate.

    Raises:
        UnicodeEncodeError: the text contains lone surrogates, so it is not valid Unicode.
    """
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8"))
