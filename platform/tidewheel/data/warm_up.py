"""Check and load the machine code of all compiled passes in `data`."""

from __future__ import annotations

import importlib

KERNEL_MODULES = ("tidewheel.data.text.kernels", "tidewheel.data.text.textpass_kernels",
                  "tidewheel.data.text.line_kernels", "tidewheel.data.text.kernel_tools",
                  "tidewheel.data.text.kept_line_kernels", "tidewheel.data.decontaminate.eval_kernels",
                  "tidewheel.data.dedup", "tidewheel.data.dedup.minhash", "tidewheel.data.tokenize.pack")
"""Modules with kernels; filters name theirs in `Filter.KERNELS`."""


def import_kernels() -> None:
    """Import every module that has kernels."""
    from tidewheel.data.filter import FILTERS

    own = [name for filter in FILTERS.built_in() for name in FILTERS.find(filter).KERNELS]
    for name in (*KERNEL_MODULES, *own):
        importlib.import_module(name)


def is_warm() -> bool:
    """Return whether this machine has the machine code of every kernel, from the package or from the cache."""
    from tidewheel.data.text import kernel_tools

    import_kernels()
    return all(kernel.is_ready() for name, kernel in kernel_tools.KERNELS.items() if name.startswith("tidewheel."))


def warm_up() -> None:
    """Call every kernel once, as pipelines do; this compiles missing machine code into a cache on disk.

    The driver calls it before workers start, unless `is_warm`, so that workers load machine code instead of compiling.
    """
    import numpy as np
    import pyarrow as pa

    from tidewheel.data import decontaminate, dedup, textpass
    from tidewheel.data.dedup import minhash
    from tidewheel.data.filter import FILTERS, Batch
    from tidewheel.data.text import hashing, kernel_cache
    from tidewheel.data.text.measures import LineRules, LineShape, Measures
    from tidewheel.data.tokenize import pack

    kernel_cache.forget_old()
    texts = pa.array(["a few words to scan, 1 2 3", "the same again"], pa.large_string())
    hashing.text_hashes(texts)
    minhash.minhash(texts)
    minhash.minhash(texts, unit="characters")
    minhash.exact_jaccard(*minhash.shingle_sets(texts))
    everything = Measures(True, True, LineShape(".", 30), LineRules(True, 5, 3, 1000, True, True, True, True, True))
    textpass.measure(texts, everything, minhash=(5, 16, 1), hashes=True)
    for name in FILTERS.built_in():
        filter = FILTERS.find(name)
        if filter.KERNELS:
            filter().apply(Batch.of(texts))
    items = [decontaminate.EvalItem("warm", "0", "one item of a few words that is long enough to be looked up here")]
    decontaminate.contaminated(decontaminate.EvalIndex.build(items), texts)
    dedup.cluster(pa.table({"a": ["x"], "b": ["y"], "score": [1.0]}))
    for dtype in ("uint16", "uint32"):
        pack.pack(["x"], np.arange(3), np.array([0, 3]), sequence_length=4, token_dtype=dtype, pad_id=1,
                  loss_mask=np.ones(3))
