"""URLs of documents: where they stand, and the normal form in which they are compared."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import pyarrow as pa

_PORTS = {"http": 80, "https": 443, "ftp": 21}
_TRACKING = re.compile(r"(utm_\w+|gclid|gclsrc|dclid|gbraid|wbraid|fbclid|msclkid|twclid|yclid|igshid|mc_[ce]id)(=|$)",
                       re.IGNORECASE)
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def of_metas(metas: pa.Array | pa.ChunkedArray) -> list[str]:
    """The `url` of each meta, "" where there is none."""
    found = (json.loads(meta).get("url") for meta in metas.to_pylist())
    return [url if isinstance(url, str) else "" for url in found]


def hashes(metas: pa.Array | pa.ChunkedArray) -> tuple[pa.Array, pa.Array]:
    """XXH3-128 (high, low) of the normal form of each document's URL, uint64 [n]; null without a usable URL."""
    import pyarrow as pa
    import xxhash

    forms = [normalised(url) for url in of_metas(metas)]
    digests = [xxhash.xxh3_128_intdigest(form.encode()) if form else None for form in forms]
    return (pa.array([None if digest is None else digest >> 64 for digest in digests], pa.uint64()),
            pa.array([None if digest is None else digest & ((1 << 64) - 1) for digest in digests], pa.uint64()))


def normalised(url: str) -> str:
    """The form in which URLs are compared; "" for what is no URL of a host.

    Not part of it: scheme, user, `www.`, default port, fragment (but for `#!...`, which names a page), tracking
    parameters (utm_*, gclid, fbclid and the like), slashes at the end of the path. Hosts are in lower case and
    punycode, escapes of plain characters are undone (RFC 3986, section 6.2.2). The order of parameters stays.
    """
    parts = parse(url)
    if parts is None:
        return ""
    host, rest, fragment = parts
    path, _, query = rest.partition("?")
    kept = "&".join(part for part in query.split("&") if part and not _TRACKING.match(part))
    text = host.removeprefix("www.") + _escapes(path).rstrip("/")
    return text + (f"?{_escapes(kept)}" if kept else "") + (f"#{fragment}" if fragment.startswith("!") else "")


def parse(url: str) -> tuple[str, str, str] | None:
    """(host with a port that is not the scheme's own, path and query, fragment), or None."""
    try:
        parts = urlsplit(url.strip())
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        return None
    name = _ascii(host)
    if not name or parts.scheme not in _PORTS:
        return None
    place = name if port in (None, _PORTS[parts.scheme]) else f"{name}:{port}"
    return place, parts.path + (f"?{parts.query}" if parts.query else ""), parts.fragment


def _ascii(host: str) -> str:
    """A host name in lower case and punycode; as it is, where that has none."""
    host = host.lower()
    if host.isascii():
        return host
    try:
        return host.encode("idna").decode()
    except UnicodeError:
        return host


def _escapes(text: str) -> str:
    """Percent escapes of unreserved characters undone, the others in upper case."""
    def undo(match: re.Match[str]) -> str:
        character = chr(int(match[1], 16))
        return character if character in _UNRESERVED else match[0].upper()

    return _ESCAPE.sub(undo, text)
