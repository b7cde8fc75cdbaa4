"""Compute the small columns of a document's text that order, compare and show it without the text itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidewheel.data import textpass, url, verdicts
from tidewheel.data.config import PipelineConfig
from tidewheel.data.dedup.minhash import VERSION as minhash_version
from tidewheel.data.dedup.minhash import minhash as signatures_of
from tidewheel.data.text import measures
from tidewheel.versions import Version

VERSION = Version("document_keys", uses=(measures.VERSION, minhash_version, verdicts.VERSION))

URL_COLUMNS = ("url_hi", "url_lo")


def minhash_settings(config: PipelineConfig) -> dict[str, Any] | None:
    """Return the settings of MinHash signatures; None if the recipe needs none."""
    near = config.step("dedup_near")
    return near and {"unit": near.unit, "ngram": near.ngram, "num_permutations": near.num_permutations,
                     "seed": near.seed}


def columns(texts: pa.Array | pa.ChunkedArray, minhash: Mapping[str, Any] | None) -> dict[str, pa.Array]:
    """Return the columns length (bytes), hash_hi and hash_lo; with MinHash settings also shingles and signature.

    Args:
        texts: the documents' texts.
        minhash: `minhash_settings`. A signature is binary: little-endian uint32 values.
    """
    words = minhash is not None and minhash["unit"] == "words"
    settings = (minhash["ngram"], minhash["num_permutations"], minhash["seed"]) if minhash and words else None
    measured = textpass.measure(texts, hashes=True, minhash=settings)
    hashes, signatures, shingles = measured.hashes, measured.signatures, measured.shingles
    assert hashes is not None
    named = {"length": lengths(texts), "hash_hi": pa.array(hashes[:, 0]), "hash_lo": pa.array(hashes[:, 1])}
    if minhash:
        if signatures is None or shingles is None:
            signed = signatures_of(texts, ngram=minhash["ngram"], num_permutations=minhash["num_permutations"],
                                   seed=minhash["seed"], unit=minhash["unit"])
            signatures, shingles = signed.signatures, signed.shingles
        raw = pa.py_buffer(np.ascontiguousarray(signatures, "<u4").tobytes())
        width = pa.binary(4 * minhash["num_permutations"])
        named["shingles"] = pa.array(shingles)
        named["signature"] = pa.FixedSizeBinaryArray.from_buffers(width, len(texts), [None, raw])
    return named


def urls(metas: pa.Array | pa.ChunkedArray) -> dict[str, pa.Array]:
    """Return `URL_COLUMNS`: the two uint64 halves of the hash of each document's URL; null without a URL."""
    return dict(zip(URL_COLUMNS, url.hashes(metas), strict=True))


def lengths(texts: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return the number of UTF-8 bytes of each text, int64."""
    return pc.binary_length(texts).cast(pa.int64())


def heads(texts: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return the first characters of each text, as samples show them."""
    return pc.utf8_slice_codeunits(texts, 0, verdicts.SAMPLE_CHARACTERS).cast(pa.string())
