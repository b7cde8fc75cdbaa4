"""Training is deterministic; encoding is lossless and appends EOS to every document."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tidewheel
from tidewheel.data.tokenize.tokenizer import WORD_CHARACTERS, train_bpe
from tidewheel.errors import InputError
from tidewheel.shards.tokenizer import load as Encoder

TEXTS = [f"The quick brown fox number {i} jumps over {i * 7 % 13} lazy dogs. Grüße, 世界! {'ab' * (i % 5)}\n\n"
         for i in range(200)]
TRAIN = """
import sys
from tidewheel.data.tokenize.tokenizer import train_bpe
texts = sys.stdin.read().split("\\x00")
sys.stdout.buffer.write(train_bpe(texts, 600))
"""


@pytest.fixture(scope="module")
def tokenizer() -> bytes:
    return train_bpe(TEXTS, 600)


@pytest.mark.parametrize(("threads", "seed", "texts"), [("1", "0", TEXTS), ("2", "7", TEXTS), ("4", "8", TEXTS[::-1])])
def test_training_gives_the_same_bytes_in_any_process(tokenizer: bytes, threads: str, seed: str, texts: list[str]):
    environment = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed, "TOKENIZERS_PARALLELISM": "true",
                                "PYTHONPATH": str(Path(tidewheel.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", TRAIN], input="\x00".join(texts).encode(), env=environment,
                          capture_output=True, check=True)
    assert done.stdout == tokenizer


def test_special_tokens_come_first_and_sizes_are_padded(tokenizer: bytes):
    encoder = Encoder(tokenizer)
    vocabulary = json.loads(tokenizer)["model"]["vocab"]
    assert (vocabulary["<|endoftext|>"], vocabulary["<|pad|>"]) == (0, 1)
    assert (encoder.eos, encoder.pad) == (0, 1)
    assert encoder.vocabulary_size == len(vocabulary) <= 600
    assert encoder.padded_size % 128 == 0
    assert 0 <= encoder.padded_size - encoder.vocabulary_size < 128


@given(st.lists(st.one_of(st.text(max_size=30), st.sampled_from(["<|endoftext|>", "a<|pad|>b", "", "  \n\n x\r\n"])),
                max_size=6))
@settings(max_examples=50, deadline=None)
def test_decoding_restores_texts_and_each_document_has_one_eos(tokenizer: bytes, texts: list[str]):
    encoder = Encoder(tokenizer)
    tokens, offsets = encoder.encode(texts)
    assert tokens.dtype == np.uint32
    assert offsets.dtype == np.int64
    assert offsets[0] == 0
    assert offsets[-1] == len(tokens)
    for number, document in enumerate(texts):
        own = tokens[offsets[number] : offsets[number + 1]]
        assert own[-1] == encoder.eos
        assert not np.isin(own[:-1], [encoder.eos, encoder.pad]).any()  # special tokens in a text are plain text
        assert encoder.decode(own) == document


def test_pickling_and_batches_do_not_change_tokens(tokenizer: bytes):
    encoder = pickle.loads(pickle.dumps(Encoder(tokenizer)))
    texts = TEXTS * 6  # more than one batch
    tokens, offsets = encoder.encode(texts)
    once, bounds = encoder.encode(TEXTS)
    assert len(offsets) == len(texts) + 1
    np.testing.assert_array_equal(tokens, np.tile(once, 6))
    np.testing.assert_array_equal(offsets[: len(bounds)], bounds)


@pytest.mark.parametrize("word", ["a" * 100_000, " " * 100_000, "世" * 30_000, "-" * 100_000])
def test_a_long_word_is_cut_before_merging(word: str):
    """The trainer's work is quadratic in the length of a piece; no token is longer than a piece."""
    trained = train_bpe([word], 258 + 30)
    vocabulary = json.loads(trained)["model"]["vocab"]
    characters = max(len(token) for token in vocabulary) // len(word[0].encode())
    assert 16 <= characters <= WORD_CHARACTERS


def test_the_trained_tokenizer_does_not_cut_words(tokenizer: bytes):
    kinds = [part["type"] for part in json.loads(tokenizer)["pre_tokenizer"]["pretokenizers"]]
    assert kinds == ["Split", "ByteLevel"]


def test_a_cut_word_counts_as_its_pieces():
    texts = [*TEXTS, "a" * 2 * WORD_CHARACTERS + " " + "b" * WORD_CHARACTERS]
    cut = [*TEXTS, "a" * WORD_CHARACTERS, "a" * WORD_CHARACTERS, " " + "b" * (WORD_CHARACTERS - 1), "b"]
    assert train_bpe(texts, 600) == train_bpe(cut, 600)


def test_small_vocabularies_and_invalid_files_are_refused(tokenizer: bytes):
    with pytest.raises(ValueError, match="at least 258"):
        train_bpe(TEXTS, 100)
    with pytest.raises(InputError, match=r"not a tokenizer\.json"):
        Encoder(b"{}")
    with pytest.raises(InputError, match=r"not a tokenizer\.json"):
        Encoder(b"\xff\xfe")
    without_end = json.loads(tokenizer.decode().replace("<|endoftext|>", "<|other|>"))
    with pytest.raises(InputError, match="no end-of-text token"):
        Encoder(json.dumps(without_end).encode())


def test_a_tiny_corpus_gives_a_smaller_vocabulary():
    encoder = Encoder(train_bpe(["ab ab"], 1000))
    assert 258 <= encoder.vocabulary_size < 300
