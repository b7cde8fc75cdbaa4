"""Ids of documents."""

import pytest
import xxhash

from tidewheel.data.document import DOCUMENT_SCHEMA, content_id


def test_content_id_is_a_hash_of_the_bytes():
    assert content_id("grüße") == xxhash.xxh3_128_hexdigest("grüße".encode())
    assert len(content_id("")) == 32
    assert content_id("a") != content_id("a ")


def test_lone_surrogates_raise():
    with pytest.raises(UnicodeEncodeError):
        content_id("\ud800")


def test_schema():
    assert DOCUMENT_SCHEMA.names == ["id", "text", "source", "meta"]
    assert str(DOCUMENT_SCHEMA.field("text").type) == "large_string"
