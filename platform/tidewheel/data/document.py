"""The Document: what a pipeline reads, and how one is named."""

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


#: Fields of `meta` whose parts stay in the order in which they are given: a chat template writes them out.
SPOKEN = ("messages", "tools", "prompt", "chosen", "rejected")


def encode_meta(meta: Mapping[str, Any], *, ensure_ascii: bool = True) -> str:
    """JSON text of a document's `meta`: names sorted, but inside conversations as they are."""
    parts = (f"{json.dumps(name, ensure_ascii=ensure_ascii)}: "
             f"{json.dumps(meta[name], sort_keys=name not in SPOKEN, ensure_ascii=ensure_ascii)}"
             for name in sorted(meta))
    return f"{{{', '.join(parts)}}}"


def content_id(text: str) -> str:
    """Id of a document that came without one: XXH3-128 of its UTF-8 bytes, 32 hex digits.

    Equal texts get equal ids: whoever reads documents must make ids unique within an input, for
    example by dropping the second copy as an exact duplicate.

    Raises:
        UnicodeEncodeError: the text holds lone surrogates, so it is no Unicode text.
    """
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8"))
