"""Replace e-mail addresses and public IPv4 addresses with fixed placeholders (as FineWeb does, Penedo et al. 2024).

The hash of an address selects its placeholder, so an address has the same placeholder everywhere and nothing depends on
order. The default placeholders are reserved for documentation (RFC 2606, RFC 5737). Applying the filter twice gives the
same text as applying it once.

These addresses stay, because they do not identify anybody: addresses in reserved, private, multicast and documentation
ranges; addresses with at least three one-digit numbers, which are versions and section numbers ("11.4.2.3") or public
resolvers ("8.8.4.4"; 0.02 % of all addresses look like this); and numbers that the surrounding text shows to be
versions or parts of a name ("v10.2.33.4", "12.4.10.2-beta", "lib-10.2.33.4.jar", "1.2.3.4.5").
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network
from typing import ClassVar

import numpy as np
from pydantic import Field

from tidewheel.data.filter import Batch, Filter, Limits, Verdicts
from tidewheel.versions import Version

_ATOM = r"\w!#$%&'*+/=?^`{|}~-"
_LOCAL = re.compile(rf"[{_ATOM}]+(?:\.[{_ATOM}]+)*")  # applied to the reversed text before the "@"
_LABEL = r"[^\W_](?:[\w-]{0,62}[^\W_])?"
_DOMAIN = re.compile(rf"(?:{_LABEL}\.)+(?:[^\W\d_]{{2,63}}|xn--[a-zA-Z0-9-]{{2,59}})(?![\w@])")
_LONGEST_LOCAL, _LONGEST_DOMAIN = 64, 254

_NUMBER = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_ADDRESS = rf"{_NUMBER}(?:\.{_NUMBER}){{3}}"
_ADDRESSES = re.compile(
    rf"(?<![\w.])(?<![A-Za-z_][-+~])({_ADDRESS})"
    rf"(?!\w|\.[a-z0-9_]|[+~]\w|-(?!{_ADDRESS}(?![\w.]))\w)", re.ASCII)
_VERSION_BEFORE = re.compile(
    r"(?:\b(?:v|ver|version|versions|release|rev|revision|build|firmware|patch|section|sec|chapter|clause|table|figure)"
    r"[.:]?|§|==|>=|<=|~=)\s*$", re.IGNORECASE)
_CONTEXT = 16  # number of characters before an address that are searched for such a word
_MAYBE_ADDRESS = r"\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]"
#: IANA's special-purpose registry, multicast and the future-use block; frozen here, as Python's list changes.
_NOT_PUBLIC = tuple(IPv4Network(block) for block in (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "224.0.0.0/4", "240.0.0.0/4"))


class Pii(Filter):
    """Replace e-mail and public IPv4 addresses with placeholders that the hash of the address selects."""

    VERSION: ClassVar[Version | None] = Version("filter_pii")
    ORDER: ClassVar[int] = 100
    EDITS: ClassVar[str] = "pii_replaced"
    DETAILS: ClassVar[tuple[str, ...]] = ("pii_emails", "pii_addresses")

    emails: bool = True
    """Replace e-mail addresses."""
    addresses: bool = True
    """Replace public IPv4 addresses."""
    email_placeholders: tuple[str, ...] = Field(
        default=("email@example.com", "firstname.lastname@example.org"), min_length=1)
    """Placeholders for e-mail addresses."""
    address_placeholders: tuple[str, ...] = Field(
        default=("192.0.2.17", "192.0.2.201", "198.51.100.24", "198.51.100.133", "203.0.113.8", "203.0.113.190"),
        min_length=1)
    """Placeholders for IPv4 addresses."""

    def limits(self) -> Limits:
        """Return statistics without limits: no document is dropped."""
        return {"pii_emails": (None, None), "pii_addresses": (None, None)}

    def apply(self, batch: Batch) -> Verdicts:
        """Replace addresses.

        Returns:
            No reasons; statistics: pii_emails and pii_addresses, the numbers of replacements; and the texts.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        column = batch.texts
        emails = np.zeros(len(column))
        addresses = np.zeros(len(column))
        at = np.zeros(len(column), bool)  # the few texts that may contain an e-mail address
        dotted = np.zeros(len(column), bool)  # the few texts that may contain an IPv4 address
        if self.emails:
            at[:] = pc.match_substring(column, "@").to_numpy(zero_copy_only=False)
        if self.addresses:
            dotted[:] = pc.match_substring_regex(column, _MAYBE_ADDRESS).to_numpy(zero_copy_only=False)
        replaced = []
        for row in np.flatnonzero(at | dotted).tolist():
            text = column[row].as_py()
            if at[row]:
                text, emails[row] = replace_emails(text, self.email_placeholders)
            if dotted[row]:
                text, addresses[row] = replace_addresses(text, self.address_placeholders)
            if emails[row] or addresses[row]:
                replaced.append(text)
        if replaced:
            changed = pa.array(emails + addresses > 0)
            column = pc.replace_with_mask(column, changed, pa.array(replaced, pa.large_string()))
        return Verdicts([""] * len(column), {"pii_emails": emails, "pii_addresses": addresses}, column)


def replace_emails(text: str, placeholders: tuple[str, ...]) -> tuple[str, int]:
    """Return (text with placeholders, number of replacements).

    An address consists of a name of letters, digits and the marks that RFC 5322 allows, "@", and a domain whose last
    label consists of letters. Both may be in any script.
    """
    parts: list[str] = []
    done = count = 0
    at = text.find("@")
    while at >= 0:
        span = _email(text, at, done)
        if span is not None:
            start, end = span
            if text[start:end] not in placeholders:
                parts += [text[done:start], _placeholder(text[start:end].lower(), placeholders)]
                done = end
                count += 1
        at = text.find("@", at + 1)
    return ("".join([*parts, text[done:]]), count) if count else (text, 0)


def _email(text: str, at: int, done: int) -> tuple[int, int] | None:
    """Return the [start, end) of the address around the "@"; None if there is none."""
    before = text[max(done, at - _LONGEST_LOCAL) : at]
    local = _LOCAL.match(before[::-1])
    domain = _DOMAIN.match(text, at + 1, at + 1 + _LONGEST_DOMAIN)
    if local is None or domain is None:
        return None
    name = local.group()[::-1]
    first = next((index for index, character in enumerate(name) if character.isalnum()), None)  # skip quotes before it
    return None if first is None else (at - len(name) + first, domain.end())


def replace_addresses(text: str, placeholders: tuple[str, ...]) -> tuple[str, int]:
    """Return (text with placeholders, number of replacements). Versions and section numbers are not replaced."""
    count = 0

    def replacement(match: re.Match[str]) -> str:
        nonlocal count
        address = match.group(1)
        if not _is_personal(address) or _VERSION_BEFORE.search(text, max(match.start() - _CONTEXT, 0), match.start()):
            return address
        count += 1
        return _placeholder(address, placeholders)

    return _ADDRESSES.sub(replacement, text), count


def _is_personal(address: str) -> bool:
    """Return whether an address is public and has at most two one-digit numbers."""
    if sum(len(number) == 1 for number in address.split(".")) >= 3:
        return False
    value = IPv4Address(address)
    return not any(value in block for block in _NOT_PUBLIC)


def _placeholder(address: str, placeholders: tuple[str, ...]) -> str:
    import xxhash

    return placeholders[xxhash.xxh3_64_intdigest(address.encode()) % len(placeholders)]
