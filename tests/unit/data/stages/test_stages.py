"""Parts of stages that need no cluster: finding input, partition counts, plans, n-gram entropies, histograms."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, defaultdict

import numpy as np
import pyarrow as pa
import pytest

from tidewheel.config import build
from tidewheel.data import pipeline, pipeline_plan
from tidewheel.data.config import PipelineConfig
from tidewheel.data.stage import Unit
from tidewheel.data.stages import histograms, ngrams
from tidewheel.data.stages.execute import Task, _decode, _encode
from tidewheel.data.stages.resolve import resolve
from tidewheel.data.tokenize.pack import pack
from tidewheel.errors import InputError, StorageError
from tidewheel.storage import Stamp


def recipe(paths=("*.jsonl",), steps=(), tokenize=None, **more):
    return build(PipelineConfig, {"read": {"paths": list(paths)}, **more, "steps": [
        *steps, {"tokenize": tokenize or {"train": {}}}, "pack"]})


@pytest.fixture
def folder(tmp_path):
    for name in ("a.jsonl", "b.jsonl", "deep/c.jsonl", "evals/quiz.jsonl", "out/shards/d.jsonl"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"id": "1", "text": name, "question": "what"}) + "\n")
    return tmp_path / "in"


def test_relative_and_absolute_patterns_find_files(folder, tmp_path):
    def names(*paths):
        return [file.name for file in resolve(recipe(paths), input=str(folder), output=str(folder / "out")).files]

    assert names("*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names("*.jsonl", "a.jsonl", "deep/*") == ["a.jsonl", "b.jsonl", "deep/c.jsonl"]
    assert names("**/*.jsonl") == ["a.jsonl", "b.jsonl", "deep/c.jsonl", "evals/quiz.jsonl"], "not the output itself"
    assert names(f"{folder}/deep/*.jsonl") == [f"{folder}/deep/c.jsonl"]
    assert names(f"file://{folder}/a.jsonl", f"{folder}/a.jsonl") == [f"{folder}/a.jsonl"]


@pytest.mark.parametrize(("config", "error", "told"), [
    (lambda: recipe(["none*.jsonl"]), InputError, "no file matches 'none*.jsonl'"),
    (lambda: recipe(["*.jsonl", "none*.jsonl"]), InputError, "no file matches 'none*.jsonl'"),
    (lambda: recipe(["/no/such/folder/*.jsonl"]), StorageError, "there is no such folder"),
    (lambda: recipe(steps=[{"decontaminate": {"evals": ["none/*.jsonl"]}}]), InputError, "no evaluation items"),
    (lambda: recipe(steps=[{"decontaminate": {"evals": ["none.jsonl"]}}]), InputError, "no such file of evaluation"),
    (lambda: recipe(tokenize={"file": "none.json"}), InputError, "no such tokenizer file"),
    (lambda: recipe(tokenize={"file": "a.jsonl"}), InputError, "not a tokenizer.json"),
])
def test_missing_inputs_raise_before_anything_is_written(folder, tmp_path, config, error, told):
    with pytest.raises(error) as raised:
        pipeline.run(config(), input=str(folder), output=str(tmp_path / "new"))
    assert told in str(raised.value)
    assert "fix:" in str(raised.value)
    assert not (tmp_path / "new").exists()


def test_a_missing_input_is_not_created(tmp_path):
    with pytest.raises(StorageError, match="there is no such folder"):
        pipeline.run(recipe(), input=str(tmp_path / "none"), output=str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_a_file_is_refused(folder):
    with pytest.raises(StorageError, match="it must be a folder"):
        pipeline_plan.plan(recipe(), input=str(folder), output=str(folder / "a.jsonl"))


def test_the_plan_writes_nothing_and_needs_no_cluster(folder, tmp_path):
    steps = [{"filter": {"gopher_quality": {}}}, "dedup_exact", {"filter": {"gopher_quality": {"min_words": 9}}}]
    plan = pipeline_plan.plan(recipe(steps=steps), input=str(folder), output=str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    assert [stage.name for stage in plan.stages] == ["ingest", "partition", "dedup_exact", "filter_2", "tokenizer",
                                                     "pack"]
    assert [stage.units for stage in plan.stages] == [2, 4, 4, 4, 1, 4]
    assert plan.stages[0].published == 0
    assert plan.stages[0].note.endswith("filter: gopher_quality")
    assert plan.stages[3].note == "gopher_quality"
    assert {tuple(row) for row in plan.rows()} == {("stage", "units", "published", "what")}


@pytest.mark.parametrize(("size", "expected"), [(0, 4), (4 * 64 << 20, 4), ((4 * 64 << 20) + 1, 8), (1 << 40, 16384)])
def test_partitions_depend_on_the_size_alone(folder, monkeypatch, size, expected):
    from tidewheel.data.stages.resolve import partition_count
    from tidewheel.data.stages.sources import SourceFile

    for count in (1, 7):
        files = [SourceFile("r", "k", "n", size // count + (size % count if place == 0 else 0), "f")
                 for place in range(count)]
        assert partition_count(recipe(), files) == expected
    packed = SourceFile("r", "k.jsonl.zst", "n", 16 * 64 << 20, "f")  # more text than bytes
    assert partition_count(recipe(), [packed]) == 64
    assert partition_count(recipe(partitions=3), files) == 3


def test_tasks_round_trip_as_json():
    task = Task("s3://b/o", Unit("s", "l", "k", 3), {"documents": Stamp("a", 1, "h"), "dropped": [Stamp("b", 2, "i")],
                                                     "settings": {"x": None}})
    assert _decode(_encode(task)) == task


def test_histograms_add_up_and_count_everything():
    values = np.array([-1.0, 0.0, 0.05, 0.5, 1.0, 7.0])
    whole = histograms.histogram("hash_ratio", values, (None, 0.1))
    assert sum(whole["counts"]) == 6
    assert (whole["threshold"], whole["limits"]) == (0.1, [None, 0.1])
    parts = [{"x": histograms.histogram("hash_ratio", values[:2], (None, 0.1))},
             {"x": histograms.histogram("hash_ratio", values[2:], (None, 0.1))}]
    assert histograms.merge(parts)["x"] == whole


def packed(generator, documents, vocabulary, length):
    sizes = generator.integers(1, 3 * length, documents)
    tokens = generator.integers(0, vocabulary, sizes.sum()).astype(np.uint32)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return pack([f"d{number}" for number in range(documents)], tokens, offsets, sequence_length=length,
                token_dtype="uint16", pad_id=1)


def brute_counts(table):
    unigrams, bigrams = Counter(), Counter()
    for row in table.to_pylist():
        ends = [*row["segment_starts"][1:], row["length"]]
        for first, last in zip(row["segment_starts"], ends, strict=True):
            piece = row["tokens"][first:last]
            unigrams.update(piece)
            bigrams.update(itertools.pairwise(piece))
    return unigrams, bigrams


@pytest.mark.parametrize("merged", [1, ngrams.MERGED])
def test_ngram_entropies_match_counting_by_hand(merged: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ngrams, "MERGED", merged)
    generator = np.random.default_rng(0)
    vocabulary = 30
    training, validation = (packed(generator, count, vocabulary, 16) for count in (60, 20))
    counts = {}
    for name, table in (("training", training), ("validation", validation)):
        halves = [ngrams.count([part], vocabulary, 1 << 20) for part in (table.slice(0, 7), table.slice(7))]
        tables = [ngrams.to_tables(half) for half in halves]
        counts[name] = ngrams.merge([pair[0] for pair in tables], [pair[1] for pair in tables], vocabulary)
        unigrams, bigrams = brute_counts(table)
        assert {token: count for token, count in enumerate(counts[name].unigrams.tolist()) if count} == unigrams
        assert dict(zip(counts[name].codes.tolist(), counts[name].counts.tolist(), strict=True)) == {
            a * vocabulary + b: count for (a, b), count in bigrams.items()}
    result = ngrams.entropies(counts["validation"], counts["training"])

    uni_t, bi_t = brute_counts(training)
    uni_v, bi_v = brute_counts(validation)
    total_v, total_t = sum(uni_v.values()), sum(uni_t.values())
    followers, context = defaultdict(set), Counter()
    for (a, b), count in bi_t.items():
        followers[a].add(b)
        context[a] += count
    context_v = Counter()
    for (a, _), count in bi_v.items():
        context_v[a] += count

    def smooth(token):
        return (uni_t[token] + 1) / (total_t + vocabulary)

    def model(a, b):
        kinds = len(followers[a])
        return (bi_t[a, b] + kinds * smooth(b)) / (context[a] + kinds) if context[a] else smooth(b)

    assert result["unigram"] == pytest.approx(-sum(c * math.log(c / total_v) for c in uni_v.values()) / total_v)
    assert result["bigram"] == pytest.approx(
        -sum(c * math.log(c / context_v[a]) for (a, _), c in bi_v.items()) / sum(bi_v.values()))
    assert result["unigram_model"] == pytest.approx(-sum(c * math.log(smooth(t)) for t, c in uni_v.items()) / total_v)
    assert result["bigram_model"] == pytest.approx(
        -sum(c * math.log(model(a, b)) for (a, b), c in bi_v.items()) / sum(bi_v.values()))


def test_the_bigram_model_is_a_probability():
    generator = np.random.default_rng(1)
    vocabulary = 12
    training = ngrams.count([packed(generator, 20, vocabulary, 8)], vocabulary, 1 << 20)
    codes = np.arange(vocabulary * vocabulary)
    for previous in range(vocabulary):
        losses = []
        for following in range(vocabulary):
            code = codes[[previous * vocabulary + following]]
            one = ngrams.Counts(np.zeros(vocabulary, np.int64), code, np.array([1]))
            losses.append(ngrams.entropies(one, training)["bigram_model"])
        assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1)


def test_counting_stops_at_the_limit_and_empty_splits_have_no_entropy():
    table = packed(np.random.default_rng(2), 30, 10, 8)
    assert ngrams.count([table, table], 10, 64).unigrams.sum() <= 64
    nothing = ngrams.count([table.slice(0, 0)], 10, 1 << 20)
    some = ngrams.count([table], 10, 1 << 20)
    assert ngrams.entropies(nothing, some)["unigram"] is None
    assert ngrams.entropies(some, nothing)["bigram_model"] == pytest.approx(math.log(10))
    assert isinstance(pa.concat_tables(ngrams.to_tables(nothing)), pa.Table)


def test_counts_are_not_taken_for_shares():
    for name in ("c4_sentences", "c4_removed_lines", "pii_emails", "words"):
        assert histograms.histogram(name, np.array([7.0]))["edges"][-1] > 7


def test_progress_counts_the_stages_of_the_plan(folder, tmp_path):
    steps = [{"filter": {"gopher_quality": {}}}, "dedup_exact", {"filter": {"gopher_quality": {"min_words": 9}}}]
    for config in (recipe(steps=steps), build(PipelineConfig, {
            "read": {"paths": ["*.jsonl"]}, "steps": [*steps, {"write": {"formats": ["jsonl"]}}]})):
        plan = pipeline_plan.plan(config, input=str(folder), output=str(tmp_path / "new"))
        assert pipeline.stages(config) == [stage.name for stage in plan.stages]
