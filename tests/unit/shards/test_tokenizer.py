"""Three formats, one behaviour: the libraries that made the files are the oracles."""

from __future__ import annotations

import base64
import inspect
import io
import itertools
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel import storage
from tidewheel.data.tokenize.tokenizer import train_bpe
from tidewheel.errors import InputError, ShardError
from tidewheel.shards.tokenizer import Encoder, Settings, load, of_manifest
from tidewheel.shards.tokenizer.tiktoken_ranks import ENCODINGS, from_gpt2

SHARED = Path(__file__).parents[4] / "shared" / "tokenizer"
TEXTS = [f"The quick brown fox number {i} jumps over {i * 7 % 13} lazy dogs. Grüße, 世界! {'ab' * (i % 5)}"
         for i in range(120)]
CL100K = Settings(encoding="cl100k_base", bos_token="<|fim_prefix|>")


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """A small tokenizer in each format."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=320,
                                             byte_fallback=True, pad_id=3, minloglevel=2)
    pairs = [b"th", b"the", b" t", b" the", b"qu", b"ck", b"ox", b"Gr"]
    tokens = [*(bytes([byte]) for byte in range(256)), *pairs]
    ranks = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    return {"huggingface": train_bpe(TEXTS, 400, ("<|bos|>",)), "sentencepiece": model.getvalue(), "tiktoken": ranks}


def encoder(files: dict[str, bytes], name: str, **changes) -> Encoder:
    return load(files[name], Settings(**({**vars(CL100K), **changes} if name == "tiktoken" else changes)))


FORMATS = ["huggingface", "sentencepiece", "tiktoken"]


def expected(files: dict[str, bytes], name: str, text: str) -> list[int]:
    """What the format's own library says."""
    if name == "huggingface":
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(files[name].decode())
        tokenizer.encode_special_tokens = True
        return tokenizer.encode(text, add_special_tokens=False).ids
    if name == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_proto=files[name]).encode(text)
    import tiktoken

    pattern, special = ENCODINGS["cl100k_base"]
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in files[name].splitlines()}
    return tiktoken.Encoding("oracle", pat_str=pattern, mergeable_ranks=ranks,
                             special_tokens=special).encode_ordinary(text)


@pytest.mark.parametrize("name", FORMATS)
@given(texts=st.lists(st.one_of(st.text(max_size=30), st.sampled_from(
    ["<|endoftext|>", "a</s>b<s>", "<pad>", "", "  \n\n x\r\n", "the quick 世界"])), max_size=5))
@settings(max_examples=25, deadline=None)
def test_tokens_are_those_of_the_library(files, name, texts):
    made = encoder(files, name)
    tokens, offsets = made.encode_plain(texts)
    assert (tokens.dtype, offsets.dtype, offsets[0], offsets[-1]) == (np.uint32, np.int64, 0, len(tokens))
    for number, text in enumerate(texts):
        own = tokens[offsets[number] : offsets[number + 1]]
        assert own.tolist() == expected(files, name, text)
        assert not np.isin(own, list(made.special.values())).any()  # special tokens in a text are plain text


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.one_of(st.text(max_size=30), st.sampled_from(TEXTS)))
@settings(max_examples=25, deadline=None)
def test_byte_lengths_add_up_to_the_text(files, name, text):
    made = encoder(files, name)
    sizes = made.byte_lengths()
    tokens, _ = made.encode([text])  # with the end of the document, which has no bytes
    assert sizes.shape == (made.padded_size,)
    assert not sizes[list(made.special.values())].any()
    if name == "sentencepiece":  # what it makes of a text is what its own decoder gives back, and a space in front
        text = " " + made.decode(tokens) if len(tokens) > 1 else ""
        if "\u2047" in text:  # unknown
            return
    assert sizes[tokens].sum() == len(text.encode())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bos", ["none", "document"])
@pytest.mark.parametrize("eos", ["none", "document"])
def test_policy(files, name, bos, eos):
    made = encoder(files, name, bos=bos, eos=eos)
    plain, bounds = made.encode_plain(TEXTS)
    tokens, offsets = made.encode(TEXTS)
    for number in range(len(TEXTS)):
        own = plain[bounds[number] : bounds[number + 1]].tolist()
        assert tokens[offsets[number] : offsets[number + 1]].tolist() == [
            *([made.bos] * (bos == "document")), *own, *([made.eos] * (eos == "document"))]
    assert len(made.encode([])[0]) == 0


@pytest.mark.parametrize("name", FORMATS)
def test_decoding_sizes_and_the_way_through_a_manifest(files, name, tmp_path):
    made = encoder(files, name, vocabulary_multiple=64, eos_token=None, bos="document")
    tokens, offsets = made.encode(TEXTS)
    texts = [made.decode(tokens[first:last]) for first, last in itertools.pairwise(offsets)]
    assert texts == [text.strip() if name == "sentencepiece" else text for text in TEXTS]  # it strips what it is given
    assert made.padded_size % 64 == 0
    assert 0 <= made.padded_size - made.vocabulary_size < 64
    again = pickle.loads(pickle.dumps(made))
    assert again.encode(TEXTS[:3])[0].tolist() == made.encode(TEXTS[:3])[0].tolist()
    folder_store = storage.store(tmp_path)
    stamp = folder_store.write(made.file, made.data)
    result = of_manifest(folder_store, json.loads(json.dumps(made.manifest(stamp.hash))))
    assert (result.bos, result.eos, result.pad, result.padded_size) == (made.bos, made.eos, made.pad, made.padded_size)
    assert result.encode(TEXTS)[0].tolist() == tokens.tolist()
    folder_store.delete(made.file)
    with pytest.raises(ShardError, match="missing"):
        of_manifest(folder_store, made.manifest(stamp.hash))


def test_batches_are_one_flat_array(files):
    made = encoder(files, "huggingface")
    tokens, offsets = made.encode(TEXTS * 6)  # more than one batch
    once, bounds = made.encode(TEXTS)
    np.testing.assert_array_equal(tokens, np.tile(once, 6))
    np.testing.assert_array_equal(offsets[: len(bounds)], bounds)


@pytest.mark.parametrize(("data", "changes", "message"), [
    (b"", {}, "empty"), (b"{}", {}, r"not a tokenizer\.json"), (b"[1]", {}, r"not a tokenizer\.json"),
    (b"once upon a time", {}, r"not a tokenizer\.json"), (b"\xff\xfe\x00\x01" * 50, {}, "neither"),
    (b"\x80\x04\x95pickle", {}, "neither"), (b"YQ== 0\n", {}, "255 single bytes are missing"),
    (b"YQ== 0\nYg== zero\n", {}, "line 2 is not a token and a rank"), (b"YQ== 0\nYg== 0\n", {}, "twice"),
])
def test_wrong_files(data, changes, message):
    with pytest.raises(InputError, match=message):
        load(data, Settings(**changes))


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("tiktoken", {"encoding": None}, "264 ranks: not one of the encodings"),
    ("tiktoken", {"encoding": "gpt5"}, "no encoding 'gpt5'"),
    ("tiktoken", {"special_tokens": {"<|x|>": 3}}, "have ids that the file gives to others"),
    ("tiktoken", {"pattern": "("}, "does not take the pattern"),
    ("tiktoken", {"bos_token": "<|nobody|>"}, "no token '<|nobody|>'"),
    ("huggingface", {"eos_token": "</nobody>"}, "no token '</nobody>'"),
    ("tiktoken", {"bos_token": None, "bos": "document"}, "no begin-of-text token"),
])
def test_wrong_settings(files, name, changes, message):
    with pytest.raises(InputError) as raised:
        encoder(files, name, **changes)
    assert message in str(raised.value)


def test_a_cut_off_sentencepiece_model_is_refused_or_whole(files):
    data = files["sentencepiece"]
    for size in (1, 10, 100, len(data) // 2):
        with pytest.raises(InputError):
            load(data[:size])


def test_encodings_are_those_that_tiktoken_ships():
    from tiktoken_ext import openai_public

    source = inspect.getsource(openai_public)
    for name in ("cl100k_base", "r50k_base"):
        assert ENCODINGS[name][0] in source, name
    for part in ENCODINGS["o200k_base"][0].split(r"|\p{N}{1,3}|")[1].split("|"):
        assert part in source, part
    assert "100276" in source


@pytest.mark.skipif(not SHARED.exists(), reason="no ../shared")
def test_gpt2_files_make_what_its_tokenizer_json_says():
    folder = SHARED / "gpt2"
    made = load(from_gpt2((folder / "vocab.bpe").read_bytes(), (folder / "encoder.json").read_bytes()))
    known = load((folder / "tokenizer.json").read_bytes())
    assert (made.format, made.vocabulary_size, made.eos) == ("tiktoken", 50257, known.eos)
    texts = [*TEXTS, "def f(x):\n\treturn  x's  ", "Ελληνικά \u00a0 123456", (SHARED / "README.md").read_text()]
    assert made.encode(texts)[0].tolist() == known.encode(texts)[0].tolist()
    with pytest.raises(InputError, match="do not belong together"):
        from_gpt2((folder / "vocab.bpe").read_bytes(), b"{}")


def test_batches_are_bounded_by_documents_and_characters(monkeypatch):
    from tidewheel.shards.tokenizer import encoder

    monkeypatch.setattr(encoder, "_BATCH_DOCUMENTS", 3)
    monkeypatch.setattr(encoder, "_BATCH_CHARACTERS", 10)
    texts = ["a" * size for size in (4, 4, 4, 50, 1, 1, 1, 1, 0)]
    results = list(encoder.batches(texts))
    assert [(first, list(map(len, batch))) for first, batch in results] == [
        (0, [4, 4]), (2, [4]), (3, [50]), (4, [1, 1, 1]), (7, [1, 0])]
    assert [text for _, batch in results for text in batch] == texts
    assert list(encoder.batches([])) == []
