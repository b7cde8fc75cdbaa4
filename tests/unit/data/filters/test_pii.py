"""Addresses that are replaced, and text that only looks like one."""

import ipaddress

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.filtering import judged
from tidewheel.data.filters.pii import Pii, replace_addresses, replace_emails

MAIL, HOST = ("<mail>",), ("<host>",)


@pytest.mark.parametrize(("text", "expected"), [
    ("write to jane.doe@mail.example.net.", "write to <mail>."),
    ("<jane@host.org>, (joe_2@host.co.uk)", "<<mail>>, (<mail>)"),
    ("'jane+list@host.org'", "'<mail>'"), ("mailto:jane@host.org?subject=x", "mailto:<mail>?subject=x"),
    ("o'brien@host.ie", "<mail>"), ("jörg@müller.de", "<mail>"), ("李雷@例子.中国", "<mail>"),
    ("a@xn--fiqs8s.cn", "<mail>"),
    ("a..b@host.org", "a..<mail>"), ("JANE@HOST.ORG", "<mail>"), ("jane@host.org@more", "jane@host.org@more"),
    ("one@host.org,two@host.org", "<mail>,<mail>"), ("jane@host.org-", "<mail>-"),
    ("follow @jane on x", "follow @jane on x"), ("jane@localhost", "jane@localhost"),
    ("5 apples @ 1.50", "5 apples @ 1.50"),
    ("a@1.2", "a@1.2"), ("@decorator.name", "@decorator.name"), ("lib@4.2.1", "lib@4.2.1"), ("@", "@"), ("", ""),
    ("x@host.c", "x@host.c"), ("...@host.org", "...@host.org"),
])
def test_emails(text: str, expected: str):
    assert replace_emails(text, MAIL) == (expected, expected.count("<mail>"))


@pytest.mark.parametrize(("text", "expected"), [
    ("from 163.36.107.25.", "from <host>."), ("http://24.27.98.30/pictures", "http://<host>/pictures"),
    ("130.89.148.77:8080, (57.120.21.121)", "<host>:8080, (<host>)"), ("ip4:199.127.61.0/24", "ip4:<host>/24"),
    ("130.89.148.77-130.89.148.99", "<host>-<host>"), ("{{123.45.67.89,98.76.54.32}}", "{{<host>,<host>}}"),
    ("130.89.148.77\n", "<host>\n"), ("It is 130.89.148.77.Next", "It is <host>.Next"),
    ("主机163.36.107.25。", "主机<host>。"),
    # reserved, private and documentation
    *[(text, text) for text in (
        "127.0.0.1", "10.155.255.254", "172.31.254.254", "192.168.254.10", "169.254.10.20", "100.64.10.20",
        "224.0.10.251", "255.255.255.255", "192.0.2.17", "198.51.100.24", "203.0.113.190", "198.18.10.20", "0.10.20.30",
        # versions, sections and other numbers
        "1.2.3.4-beta", "12.34.10.20-beta", "12.34.10.20-1ubuntu2", "12.34.10.20+deb", "12.34.10.20~rc1",
        "v12.34.10.20", "lib-12.34.10.20.jar", "lib_12.34.10.20", "12.34.10.20.30", "E.12.34.10.20", "12.34.10.20a",
        "Section 11.7.33.10", "version 12.34.10.20", "Ver. 12.34.10.20", "pkg==12.34.10.20", "11.4.2.3. Installing",
        "36.4.4.1", "77.10.20.30.in-addr.arpa", "12.34.10.20_2",
        # no addresses
        "999.999.999.999", "108.0.0.01", "256.192.33.121", "192.168.1", "1.1.1.1", "8.8.4.4", "2017.12.24.10")],
])
def test_addresses(text: str, expected: str):
    assert replace_addresses(text, HOST) == (expected, expected.count("<host>"))


@given(st.lists(st.integers(0, 255), min_size=4, max_size=4))
@examples(150)
def test_public_addresses_are_replaced_and_others_not(numbers: list[int]):
    address = ".".join(map(str, numbers))
    given_out = ipaddress.ip_address(address)
    _, count = replace_addresses(f"at {address}, port 80", HOST)
    special = given_out.is_multicast or given_out.is_reserved or given_out.is_private
    if sum(number < 10 for number in numbers) >= 3 or special:
        assert not count
    elif given_out.is_global and numbers[:3] not in ([192, 88, 99], [192, 0, 0]):  # relays and protocol assignments
        assert count == 1


WHOLE = st.sampled_from(["jane@host.org", "a.b@c.de", "163.36.107.25", "10.0.0.1", "1.2.3.4-beta", "57.120.21.121", "<",
                         "漢", "email@example.com", "192.0.2.17"])
PIECES = st.one_of(WHOLE, st.sampled_from([" ", ".", "@", "-", "x", "\n"]))


@given(st.lists(st.lists(PIECES, max_size=12).map("".join), max_size=5))
@examples(100)
def test_replacements_in_a_text_do_not_depend_on_other_texts(texts: list[str]):
    config = Pii()
    reasons, statistics, replaced = judged(texts, config)
    assert reasons == [""] * len(texts)
    assert set(statistics) == set(config.limits())
    assert replaced.to_pylist() == [judged([text], config)[2][0].as_py() for text in texts]
    assert replaced.to_pylist() == judged(pa.chunked_array([texts[:1], texts[1:]], pa.string()), config)[2].to_pylist()


@given(st.lists(WHOLE, max_size=12).map(" ".join))
@settings(max_examples=100, deadline=None)
def test_applying_the_filter_twice_equals_applying_it_once(text: str):
    once = judged([text], Pii())[2]
    assert judged(once, Pii())[2].equals(once)


def test_placeholders_depend_only_on_the_address():
    _, statistics, replaced = judged([f"{name}@host.org and 163.36.107.{number}" for number, name in enumerate(
        ["ann", "bob", "cy", "dan", "ann", "ANN"], 20)], Pii())
    first = [text.split(" ")[0] for text in replaced.to_pylist()]
    assert set(first) == set(Pii().email_placeholders)
    assert first[0] == first[4] == first[5]
    assert statistics["pii_emails"].tolist() == statistics["pii_addresses"].tolist() == [1] * 6
    assert judged(["ann@host.org 163.36.107.25"], Pii(emails=False, addresses=False))[2].to_pylist() == [
        "ann@host.org 163.36.107.25"]


def test_long_runs_without_an_address_are_fast():
    text = "a" * 200_000 + "@" + "b." * 50_000 + "@" * 10_000 + "1." * 50_000
    assert replace_emails(text, MAIL) == (text, 0)
    assert replace_addresses(text, HOST) == (text, 0)
