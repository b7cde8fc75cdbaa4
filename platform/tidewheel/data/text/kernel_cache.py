"""Machine code of compiled passes, kept on this machine under the content of its source.

numba's own cache goes by the path and the time of a source file: there every job that is uploaded, every checkout and
every container would compile for a minute. Its files are pickles, so the folder must be one that only its user writes.
"""

from __future__ import annotations

import fcntl
import functools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

from tidewheel.private_folders import is_private, make_private

KEPT_SECONDS = 90 * 86400


@functools.cache
def folder() -> Path | None:
    """Where machine code is kept: below `$XDG_CACHE_HOME`, the home's `.cache`, or the temporary folder, the first that
    can be written by this user and by nobody else; None if none can."""
    places = [os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), None]
    for place in places:
        path = Path(place, "tidewheel") if place else Path(tempfile.gettempdir(), f"tidewheel-{os.getuid()}")
        path = path.resolve() / "kernels"
        if make_private(path) and is_private(path.parent) and os.access(path, os.W_OK):
            return path
    return None


def keep(dispatcher: Any, digest: str) -> None:
    """Load and save the machine code of a numba function under the digest of its source.

    One process of this machine compiles; others that want the same function wait for it and load what it saved.
    """
    place = folder()
    if place is None:
        return
    locator = _ByContent(place, digest)
    kind = type("ByContent", (CompileResultCacheImpl,), {"_locator_classes": [locator]})
    dispatcher._cache = type("KeptByContent", (FunctionCache,), {"_impl_class": kind})(dispatcher.py_func)
    compile_ = dispatcher.compile

    def compile_alone(signature: Any) -> Any:
        with open(place / f"{digest[:16]}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return compile_(signature)

    dispatcher.compile = compile_alone


def is_kept(dispatcher: Any) -> bool:
    """Whether machine code of a compiled function is on this machine's disk."""
    index = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    return index is not None and bool(index._load_index())


def forget_old() -> None:
    """Remove what was compiled long ago; should it still be in use, it is compiled once more."""
    place = folder()
    for file in place.iterdir() if place else ():
        try:
            if time.time() - file.stat().st_mtime > KEPT_SECONDS:
                file.unlink()
        except FileNotFoundError:
            continue  # another process did


class _ByContent(_CacheLocator):
    """One function's place, in the terms of numba's cache. It stands where numba wants a class that makes one."""

    def __init__(self, place: Path, digest: str) -> None:
        self._place, self._digest = place, digest

    def from_function(self, py_func: Any, py_file: Any) -> _ByContent:  # type: ignore[override]
        return self

    def get_cache_path(self) -> str:
        return str(self._place)

    def get_source_stamp(self) -> str:
        return self._digest

    def get_disambiguator(self) -> str:
        return self._digest[:16]
