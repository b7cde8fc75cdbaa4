"""URL lists and the normal form of URLs."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.filtering import judged
from tidewheel.config import build
from tidewheel.data import url as urls
from tidewheel.data.config import PipelineConfig
from tidewheel.data.filters.urls import UrlFilter
from tidewheel.data.stages import recipe_versions
from tidewheel.errors import ConfigError, InputError


def table(*urls):
    metas = [json.dumps({"_line": 1} if url is None else {"url": url}) for url in urls]
    count = len(urls)
    return pa.table({"id": [str(number) for number in range(count)], "text": ["x"] * count, "source": ["web"] * count,
                     "meta": metas})


@pytest.mark.parametrize("url", [
    "https://example.com/a", "http://example.com/a/", "HTTP://WWW.Example.com:80/a#part", "https://example.com:443/a?",
    "https://user@example.com/a?utm_source=x&utm_medium=y", "https://example.com./%61?fbclid=1&gclid=2",
    " http://example.com/a ",
])
def test_urls_of_one_page_have_one_normal_form(url):
    assert urls.normalised(url) == "example.com/a"


def test_urls_of_different_pages_stay_different():
    forms = {urls.normalised(url) for url in (
        "http://example.com/A", "http://example.com/a", "http://example.com:8080/a", "http://example.com/a?id=1",
        "http://example.com/a?id=2", "http://example.com/#!/a", "http://blog.example.com/a", "http://example.com/a%2Fb",
        "http://example.com/a?utmost=1", "http://example.com")}
    assert len(forms) == 10
    assert urls.normalised("http://example.com/?b=1&utm_id=3&a=%7e%c3") == "example.com?b=1&a=~%C3"
    assert urls.normalised("https://BÜCHER.example/x") == "xn--bcher-kva.example/x"


@pytest.mark.parametrize("url", ["", "no url", "mailto:a@b.c", "/path/only", "http://", "http://[::1", "http://a:99999/",
                                 "C:\\file", "javascript:alert(1)"])
def test_invalid_urls_have_no_normal_form(url):
    assert urls.normalised(url) == ""
    reasons, statistics = judged(table(url), UrlFilter(domains=("a",), words=("url", "path")))
    assert reasons == [""]
    assert statistics["url_missing"].tolist() == [1]


@pytest.mark.parametrize("url", ["http://a b.example/", "http://a\x1f/", "http://a\u2003b.example/x", "http://\u00a8.example/"])
def test_a_host_with_whitespace_is_invalid(url):
    assert urls.parse(url) is None
    assert urls.normalised(url) == ""


@pytest.mark.parametrize(("url", "form"), [
    ("http://a/x y?q=1 2#part", "a/x%20y?q=1%202"), ("http://a/x%20y", "a/x%20y"), ("http://a/ /", "a/%20"),
    ("http://a/\x85/", "a/%C2%85"), ("http://a/x?q #f", "a/x?q%20"), ("http://a/#!x y", "a#!x%20y"),
    ("http://a/100%", "a/100%25"), ("http://a/%%34%31", "a/%2541")])
def test_whitespace_and_stray_percent_signs_are_escaped(url, form):
    assert urls.normalised(url) == form


@pytest.mark.parametrize(("url", "form"), [
    ("https://a:80/x", "a/x"), ("http://www.www.a/", "a"), ("http://a/?x=1&%75tm_source=2", "a?x=1"),
    ("http://[2001:DB8::1]/x", "[2001:db8::1]/x"), ("http://[::1]:8080/x", "[::1]:8080/x"),
    ("http://\u00a1..", "xn--7a"), ("http://a\u3002/", "a")])
def test_a_form_that_was_not_stable_is(url, form):
    assert urls.normalised(url) == form
    assert urls.normalised(f"http://{form}") == form


PIECES = ("www.", " ", "\t", "\x1f", "\x85", "%", "%41", "%2F", "%75tm_a=1", "utm_a=1", "&", "?", "#!", "/", ":80",
          ":443", ":8080", "[::1]", "[", "@", "a", "\u00fc", "\u0130", "\u3002", ".", "\u2488", "\uff05", "\uff3b",
          "\u00a8", "xn--")


@given(st.sampled_from(["http", "https", "ftp"]), st.sampled_from(["http://", "https://", "FTP://www.", ""]),
       st.text(max_size=40) | st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
       | st.from_regex(r"[a-z.]{1,12}(:[0-9]{1,4})?/[ -~]{0,30}", fullmatch=True))
def test_the_form_is_its_own_normal_form(scheme, beginning, rest):
    if form := urls.normalised(beginning + rest):
        assert urls.normalised(f"{scheme}://{form}") == form


@pytest.mark.parametrize(("step", "uses"), [
    ("dedup_url", True), ({"filter": {"urls": {"domains": ["a"]}}}, True), ({"filter": {"c4": {}}}, False),
    ("dedup_exact", False)])
def test_only_recipes_that_compare_urls_depend_on_their_form(step, uses):
    config = build(PipelineConfig, {"read": {"paths": ["*"]}, "steps": [step]})
    assert (urls.VERSION.part in recipe_versions.of_steps(config)) == uses


def test_domains_match_by_whole_labels():
    config = UrlFilter(domains=("bad.com", "*.worse.org", "https://pages.host.net/x", "10.0.0.1"))
    reasons, statistics = judged(table(
        "http://bad.com/", "https://www.BAD.com:8443/x", "http://a.b.worse.org", "http://notbad.com", "http://bad.com.au",
        "http://host.net", "http://pages.host.net/y", "http://10.0.0.1/", None), config)
    assert reasons == ["url_domain", "url_domain", "url_domain", "", "", "", "url_domain", "url_domain", ""]
    assert statistics["url_missing"].tolist() == [0] * 8 + [1]


def test_pages_and_words():
    config = UrlFilter(urls=("example.com/page/",), words=("Casino",), soft_words=("free", "win"))
    reasons, statistics = judged(table(
        "https://www.example.com/page?utm_source=x", "https://example.com/page/2", "http://a.com/best-CASINO-here",
        "http://a.com/casinos", "http://a.com/free", "http://free.com/free", "http://a.com/%66ree_win"), config)
    assert reasons == ["url_exact", "", "url_word", "", "", "url_word", "url_word"]
    assert statistics["url_soft_words"].tolist() == [0, 0, 0, 0, 1, 2, 2]
    assert config.limits()["url_soft_words"] == (None, 1)


def test_lists_come_from_files(tmp_path):
    (tmp_path / "domains.txt").write_text("# adult\n\nbad.com\r\n  worse.org \n")
    (tmp_path / "words.gz").write_bytes(gzip.compress(b"casino\n"))
    config = UrlFilter(domain_files=(str(tmp_path / "domains.txt"),), word_files=(str(tmp_path / "words.gz"),))
    reasons, _ = judged(table("http://x.worse.org", "http://a.com/casino", "http://a.com/adult"), config)
    assert reasons == ["url_domain", "url_word", ""]
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not a list"):
        UrlFilter(domain_files=(str(tmp_path / "binary"),)).check()


def test_a_filter_without_lists_is_an_error():
    with pytest.raises(ConfigError, match="at least one list"):
        UrlFilter()


def test_hashes_of_urls():
    metas = pa.array([json.dumps({"url": url}) for url in ("http://a.com/", "https://www.a.com", "http://b.com", 5)])
    high, low = urls.hashes(metas)
    assert high[0] == high[1] != high[2]
    assert low[0] == low[1] != low[2]
    assert not high[3].is_valid
    assert urls.of_metas(metas)[3] == ""
