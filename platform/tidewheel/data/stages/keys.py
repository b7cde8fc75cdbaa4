"""The small columns that follow from a document's text: what orders, compares and shows it without the text itself."""

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
    """How signatures are made; None when the recipe compares none."""
    near = config.step("dedup_near")
    return near and {"unit": near.unit, "ngram": near.ngram, "num_permutations": near.num_permutations,
                     "seed": near.seed}


def columns(texts: pa.Array | pa.ChunkedArray, minhash: Mapping[str, Any] | None) -> dict[str, pa.Array]:
    """length (bytes), hash_hi, hash_lo; with `minhash_settings` also shingles and signature (little-endian uint32)."""
    words = minhash is not None and minhash["unit"] == "words"
    settings = (minhash["ngram"], minhash["num_permutations"], minhash["seed"]) if minhash and words else None
    measured = textpass.measure(texts, hashes=True, minhash=settings)
    hashes, signatures, shingles = measured.hashes, measured.signatures, measured.shingles
    assert hashes is not None
    found = {"length": lengths(texts), "hash_hi": pa.array(hashes[:, 0]), "hash_lo": pa.array(hashes[:, 1])}
    if minhash:
        if signatures is None or shingles is None:
            signed = signatures_of(texts, ngram=minhash["ngram"], num_permutations=minhash["num_permutations"],
                                   seed=minhash["seed"], unit=minhash["unit"])
            signatures, shingles = signed.signatures, signed.shingles
        raw = pa.py_buffer(np.ascontiguousarray(signatures, "<u4").tobytes())
        width = pa.binary(4 * minhash["num_permutations"])
        found["shingles"] = pa.array(shingles)
        found["signature"] = pa.FixedSizeBinaryArray.from_buffers(width, len(texts), [None, raw])
    return found


def urls(metas: pa.Array | pa.ChunkedArray) -> dict[str, pa.Array]:
    """`URL_COLUMNS`: the hash of each document's URL, uint64; null without one."""
    return dict(zip(URL_COLUMNS, url.hashes(metas), strict=True))


def lengths(texts: pa.Array | pa.ChunkedArray) -> pa.Array:
    """UTF-8 bytes of each text, int64."""
    return pc.binary_length(texts).cast(pa.int64())


def heads(texts: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The first characters of each text, as samples show them."""
    return pc.utf8_slice_codeunits(texts, 0, verdicts.SAMPLE_CHARACTERS).cast(pa.string())
