"""URLs of documents, and the normal form in which they are compared."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, urlsplit

from tidewheel.versions import Version

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = Version("normal_url")
"""Which URLs are the same page."""
_SCHEMES = frozenset({"http", "https", "ftp"})
_DEFAULT_PORTS = frozenset({None, 80, 443, 21})  # whatever the scheme, which is not part of the normal form
_TRACKING = re.compile(r"(utm_\w+|gclid|gclsrc|dclid|gbraid|wbraid|fbclid|msclkid|twclid|yclid|igshid|mc_[ce]id)(=|$)",
                       re.IGNORECASE)
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})?")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_BLANK = re.compile(r"[\s\x00-\x1f\x7f-\x9f]")
_NOT_IN_HOSTS = re.compile(rf"{_BLANK.pattern}|[][/?#@:]")


class Address(NamedTuple):
    """The parts of a URL that name a page.

    Args:
        host: in lower case and punycode; an IPv6 address in brackets.
        port: None for the default port of HTTP, HTTPS or FTP.
        path: as it is in the URL, and the following two.
        query: without its "?".
        fragment: without its "#".
    """

    host: str
    port: int | None
    path: str
    query: str
    fragment: str


def of_metas(metas: pa.Array | pa.ChunkedArray) -> list[str]:
    """Return the `url` of each meta, or "" if it has none."""
    urls = (json.loads(meta).get("url") for meta in metas.to_pylist())
    return [url if isinstance(url, str) else "" for url in urls]


def hashes(metas: pa.Array | pa.ChunkedArray) -> tuple[pa.Array, pa.Array]:
    """Return the XXH3-128 of the normal form of each document's URL.

    Returns:
        (high, low) halves, each uint64 [n]; null for documents without a usable URL.
    """
    import pyarrow as pa
    import xxhash

    forms = [normalised(url) for url in of_metas(metas)]
    digests = [xxhash.xxh3_128_intdigest(form.encode()) if form else None for form in forms]
    return (pa.array([None if digest is None else digest >> 64 for digest in digests], pa.uint64()),
            pa.array([None if digest is None else digest & ((1 << 64) - 1) for digest in digests], pa.uint64()))


def normalised(url: str) -> str:
    """Return the form in which URLs are compared; "" if the text is not the URL of a page on a host.

    The form leaves out the scheme, the user, `www.`, default ports, the fragment (except `#!...`, which names a page),
    tracking parameters (utm_*, gclid, fbclid and the like) and slashes at the end of the path. Hosts are in lower case
    and punycode. Escapes of unreserved characters are undone (RFC 3986, section 6.2.2); whitespace, control characters
    and a "%" that begins no escape are escaped. The order of parameters stays.

    The form is stable: with any scheme before it, it is its own normal form.
    """
    address = parse(url)
    if address is None:
        return ""
    host = address.host
    while host.startswith("www."):
        host = host.removeprefix("www.")
    port = "" if address.port is None else f":{address.port}"
    path = _escaped(address.path).rstrip("/")
    parameters = [part for part in _escaped(address.query).split("&") if part and not _TRACKING.match(part)]
    query = f"?{'&'.join(parameters)}" if parameters else ""
    fragment = f"#{_escaped(address.fragment)}" if address.fragment.startswith("!") else ""
    return f"{host}{port}{path}{query}{fragment}"


def parse(url: str) -> Address | None:
    """Return the parts of an HTTP, HTTPS or FTP URL, or None if it is not one or its host is not valid."""
    try:
        parts = urlsplit(url.strip())
        name, port = parts.hostname or "", parts.port
    except ValueError:
        return None
    if parts.scheme not in _SCHEMES:
        return None
    authority = parts.netloc.rpartition("@")[2]
    host = _bracketed(name) if authority.startswith("[") else _host(name)
    if not host:
        return None
    return Address(host, None if port in _DEFAULT_PORTS else port, parts.path, parts.query, parts.fragment)


def _bracketed(name: str) -> str:
    """Return an IP literal in its brackets; "" if it is not valid."""
    return "" if _BLANK.search(name) or not name.isascii() else f"[{name.lower()}]"


def _host(name: str) -> str:
    """Return a host name in lower case, and in punycode if IDNA can express it; "" if it is not valid."""
    name = _punycode(name.lower().rstrip(".")).rstrip(".")
    return "" if _NOT_IN_HOSTS.search(name) else name


def _punycode(name: str) -> str:
    """Return a host name in punycode, or unchanged if IDNA cannot express it."""
    if name.isascii():
        return name
    try:
        return name.encode("idna").decode().lower()
    except UnicodeError:
        return name


def _escaped(text: str) -> str:
    """Return text with the escapes that the normal form has, and only those, in upper case."""
    def replaced(match: re.Match[str]) -> str:
        if match[1] is None:
            return "%25"
        character = chr(int(match[1], 16))
        return character if character in _UNRESERVED else match[0].upper()

    return _BLANK.sub(lambda match: quote(match[0], safe=""), _ESCAPE.sub(replaced, text))
