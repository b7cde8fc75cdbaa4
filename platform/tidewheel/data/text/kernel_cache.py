"""Cache of the machine code of compiled passes on this machine, keyed by the content of the source.

numba's own cache is keyed by the path and time of a source file, so every submitted job, checkout and container would
compile for a minute. numba's cache files are pickles, so only the user may be able to write to the folder.
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
    """Return the folder of the cache; None if there is none.

    It is the first of `$XDG_CACHE_HOME` (or `~/.cache`) and the temporary folder that this user, and nobody else, can
    write to.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for parent in (Path(cache, "tidewheel"), Path(tempfile.gettempdir(), f"tidewheel-{os.getuid()}")):
        path = parent.resolve() / "kernels"
        if make_private(path) and is_private(path.parent) and os.access(path, os.W_OK):
            return path
    return None


def keep(dispatcher: Any, digest: str) -> None:
    """Make a numba function load and save its machine code under the digest of its source.

    One process of this machine compiles a function; others wait for it and load the saved code.
    """
    path = folder()
    if path is None:
        return
    locator = _ByContent(path, digest)
    kind = type("ByContent", (CompileResultCacheImpl,), {"_locator_classes": [locator]})
    dispatcher._cache = type("KeptByContent", (FunctionCache,), {"_impl_class": kind})(dispatcher.py_func)
    compile_ = dispatcher.compile

    def compile_alone(signature: Any) -> Any:
        with open(path / f"{digest[:16]}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return compile_(signature)

    dispatcher.compile = compile_alone


def is_kept(dispatcher: Any) -> bool:
    """Return whether the cache has machine code of a compiled function."""
    index = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    return index is not None and bool(index._load_index())


def forget_old() -> None:
    """Remove old files from the cache; code that is still in use is compiled again."""
    path = folder()
    for file in path.iterdir() if path else ():
        try:
            if time.time() - file.stat().st_mtime > KEPT_SECONDS:
                file.unlink()
        except FileNotFoundError:
            continue  # another process removed it


class _ByContent(_CacheLocator):
    """Cache locator of one function. numba expects a class with `from_function`; an instance takes its place."""

    def __init__(self, path: Path, digest: str) -> None:
        self._path = path
        self._digest = digest

    def from_function(self, py_func: Any, py_file: Any) -> _ByContent:  # type: ignore[override]
        return self

    def get_cache_path(self) -> str:
        return str(self._path)

    def get_source_stamp(self) -> str:
        return self._digest

    def get_disambiguator(self) -> str:
        return self._digest[:16]
