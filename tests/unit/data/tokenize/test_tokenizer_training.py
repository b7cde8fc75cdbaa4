"""The sample and the tokenizer depend only on the set of texts, not on files or order."""

from __future__ import annotations

import gzip
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel import cli
from tidewheel.data.tokenize.tokenizer_training import Sample, train_tokenizer
from tidewheel.errors import ConfigError, InputError
from tidewheel.shards.tokenizer import load

TEXTS = [f"document {i}: " + " ".join(f"word{i * j % 37}" for j in range(40)) for i in range(300)]


@given(st.lists(st.text(max_size=40), max_size=60), st.integers(1, 400), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_sample_does_not_depend_on_order(texts, size, order):
    shuffled = list(texts)
    order.shuffle(shuffled)
    samples = []
    for given_texts in (texts, shuffled):
        sample = Sample(size)
        for text in given_texts:
            sample.add(text)
        samples.append(sample.texts())
    assert samples[0] == samples[1]
    trained, tested = samples[0]
    assert set(trained) | set(tested) <= set(texts)
    assert not set(trained) & set(tested)
    assert sum(len(text.encode()) for text in trained) >= min(size, sum(len(t.encode()) for t in set(texts)))


def write(folder, texts, files):
    folder.mkdir()
    for number in range(files):
        data = "".join(json.dumps({"text": text}) + "\n" for text in texts[number::files]).encode()
        name = folder / f"{number}.jsonl{'.gz' if number % 2 else ''}"
        name.write_bytes(gzip.compress(data) if number % 2 else data)
    return str(folder / "*.jsonl*")


def test_files_and_order_do_not_change_the_tokenizer(tmp_path, capsys):
    shuffled = random.Random(3).sample(TEXTS, len(TEXTS))
    one = train_tokenizer([write(tmp_path / "a", TEXTS, 1)], vocabulary_size=500, sample_bytes=20_000)
    two = train_tokenizer([write(tmp_path / "b", shuffled, 4)], vocabulary_size=500, sample_bytes=20_000)
    assert one == two
    assert (one.documents, one.unusable) == (300, 0)
    assert 20_000 <= one.sample_bytes < 21_000
    assert one.bytes_per_token is not None
    assert one.bytes_per_token > 2
    output = tmp_path / "tokenizer.json"
    assert cli.run_command(["data", "train-tokenizer", str(tmp_path / "b" / "*"), "--vocabulary-size", "500",
                     "--sample-bytes", "20000", "--output", str(output), "--json"]) == 0
    assert output.read_bytes() == one.tokenizer
    assert json.loads(capsys.readouterr().out)["documents"] == 300


def test_special_tokens_follow_the_built_in_ones(tmp_path):
    trained = train_tokenizer([write(tmp_path / "a", TEXTS, 1)], vocabulary_size=400, sample_bytes=9_000,
                           special_tokens=("<|user|>", "<|end|>"))
    encoder = load(trained.tokenizer)
    assert list(encoder.special) == ["<|endoftext|>", "<|pad|>", "<|user|>", "<|end|>"]


def test_missing_files_wrong_fields_and_small_vocabularies_are_refused(tmp_path):
    with pytest.raises(InputError, match="no file matches"):
        train_tokenizer([str(tmp_path / "*.jsonl")], vocabulary_size=500, sample_bytes=9)
    pattern = write(tmp_path / "a", TEXTS[:3], 1)
    with pytest.raises(InputError, match="none of 3 records"):
        train_tokenizer([pattern], field="body", vocabulary_size=500, sample_bytes=9)
    with pytest.raises(ConfigError, match="the vocabulary needs 258"):
        train_tokenizer([pattern], vocabulary_size=100, sample_bytes=9)
