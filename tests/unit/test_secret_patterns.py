"""Tests of the patterns of credentials: each is found inside other text, and near misses are not."""

from __future__ import annotations

import re

import pytest

from tidewheel.secret_patterns import KEYS, URL_PASSWORD, key_in

FOUND = {
    "an AWS access key": "AKIA" + "QYLPMN5HFIQR7XYZ", "a private key": "-----BEGIN RSA PRIVATE " + "KEY-----",
    "a GitHub token": "ghp_" + "a1B2" * 9, "a Hugging Face token": "hf_" + "Ab1" * 11,
    "a Slack token": "xoxb-" + "1234567890-abc",
}


@pytest.mark.parametrize("name", sorted(KEYS))
def test_each_kind_of_credential_is_found_in_text(name: str):
    assert key_in(f'token: "{FOUND[name]}"  # keep this') == name


@pytest.mark.parametrize("text", [
    "AKIA is how AWS keys begin", "hf_hub_download", "hf_" + "a" * 20, "-----BEGIN CERTIFICATE-----", "ghp_short",
    "a public key: ssh-ed25519 AAAAC3", "blake3-" + "0f" * 32, "sha256:" + "ab" * 32, "xoxq-1234567890123"])
def test_text_that_only_looks_like_one_is_not_reported(text: str):
    assert key_in(text) is None


@pytest.mark.parametrize(("url", "expected"), [
    ("https://user:secret@host/x", True), ("https://host:8080/x", False), ("s3://bucket/a@b:c", False),
    ("https://user@host/", False), ("redis://:@host", False)])
def test_a_password_in_a_url_is_found(url: str, expected: bool):
    assert bool(re.search(URL_PASSWORD, url)) is expected
