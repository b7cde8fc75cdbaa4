"""Decompression of small files, and names of compressed files."""

from __future__ import annotations

import gzip

import pytest

from tidewheel.data.compression import decompress, is_packed, unpacked_name, zstd
from tidewheel.errors import InputError


def test_names_of_compressed_files():
    assert [unpacked_name(name) for name in ("A.JSONL.GZ", "b.txt", "c.warc.zst")] == ["a.jsonl", "b.txt", "c.warc"]
    assert [is_packed(name) for name in ("A.JSONL.GZ", "b.txt")] == [True, False]


@pytest.mark.parametrize("compress", [gzip.compress, zstd.compress])
def test_a_small_file_is_decompressed_up_to_a_limit(compress):
    data = compress(b"a" * 1000)
    assert decompress(data, "list.gz", limit=1000) == b"a" * 1000
    with pytest.raises(InputError, match=r"list\.gz: has more than 999 bytes when it is decompressed"):
        decompress(data, "list.gz", limit=999)
    with pytest.raises(InputError, match=r"list\.gz: cannot be decompressed"):
        decompress(data[:-9], "list.gz")


def test_a_small_file_that_is_not_compressed_stays_as_it_is():
    assert decompress(b"", "list") == b""
    assert decompress(b"word\n", "list.gz", limit=1) == b"word\n"
