"""Packing in waves: the same rows, published early, and the same bytes after a kill."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.plain_execution import without_ray
from tidewheel.config import build
from tidewheel.data import pipeline
from tidewheel.data.config import PipelineConfig
from tidewheel.data.stage import Published
from tidewheel.data.stages import execute, pack
from tidewheel.demo.corpus import build_corpus
from tidewheel.errors import ConfigError
from tidewheel.shards import growing
from tidewheel.shards.growing import Growing, wave_key
from tidewheel.shards.manifest import read_manifest
from tidewheel.shards.verify import verify
from tidewheel.storage import store


def recipe(waves: int | None = None, **more: Any) -> PipelineConfig:
    settings = {"sequence_length": 64, "validation_fraction": 0.1, "rows_per_shard": 50,
                **({} if waves is None else {"waves": waves}), **more}
    read = {"paths": ["corpus/*.jsonl"]}
    return build(PipelineConfig, {"partitions": 6, "max_bad_fraction": 0.5, "read": read, "steps": [
        "dedup_exact", {"tokenize": {"train": {"vocabulary_size": 400, "sample_bytes": 50_000}}}, {"pack": settings}]})


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    build_corpus(store(folder), max_bytes=150_000)
    return folder


@pytest.fixture(scope="module")
def plain(raw, tmp_path_factory):
    """The output without waves."""
    return run(raw, tmp_path_factory.mktemp("plain"))


def run(raw: Path, output: Path, waves: int | None = None, on_progress: Any = None) -> Path:
    with without_ray():
        pipeline.run(recipe(waves), input=str(raw), output=str(output), on_progress=on_progress, may_replace=True)
    return output


def files(output: Path) -> dict[str, bytes]:
    return {str(path.relative_to(output)): path.read_bytes() for name in pack.SETS
            for path in sorted((output / name).rglob("*.*"))}


def test_a_set_without_waves_has_its_old_manifest(raw, plain, tmp_path):
    assert recipe(0).recipe_hash() == recipe().recipe_hash() != recipe(2).recipe_hash()
    assert files(run(raw, tmp_path, 0)) == files(plain)
    assert not (plain / "shards" / "growing.json").exists()


@pytest.mark.parametrize(("waves", "number"), [(1, 1), (4, 4), (100, 6)])
def test_waves_have_the_same_rows(raw, plain, tmp_path, waves, number):
    run(raw, tmp_path, waves)
    for name in pack.SETS:
        ours, theirs = (read_manifest(store(place).child(name)) for place in (tmp_path, plain))
        assert ours.shards == theirs.shards
        assert (ours.documents, ours.tokens) == (theirs.documents, theirs.tokens)
        assert verify(str(tmp_path / name)) == []
        assert len(ours.waves) == (number if name == pack.TRAINING else 0)
    manifest = read_manifest(store(tmp_path).child("shards"))
    assert all(manifest.waves)
    known = growing.take_in(store(tmp_path).child("shards"), Growing.of(manifest).head())
    assert known == Growing.of(manifest) or known.manifest.shards == manifest.shards
    assert known.hashes == Growing.of(manifest).hashes
    in_waves, before = (store(place).read_json("summary.json") for place in (tmp_path, plain))
    for key in ("tokens", "rows", "documents", "validation", "ngram_entropy", "bytes_per_token"):
        assert in_waves[key] == before[key]


def test_a_wave_is_published_when_its_partitions_are_packed(raw, tmp_path):
    """Waves are published in order, each when all of its partitions are packed; the validation set comes first."""
    seen: list[tuple[int, int]] = []
    place, packed = store(tmp_path).child("shards"), list[int]()

    def results(tasks: Sequence[execute.Task], chain: Any, partitions: int = 1) -> Iterator[Published]:
        tasks = sorted(tasks, key=lambda task: task.unit.number)
        random.Random(3).shuffle(tasks)
        for unit in plain_results(tasks, chain, partitions):
            if unit.unit.stage == pack.STAGE:
                assert read_manifest(store(tmp_path).child("validation")).rows
                known = growing.read_set(place)
                assert known.to_come
                complete = [all(number in packed for number in (2 * wave, 2 * wave + 1)) for wave in range(3)]
                assert len(known.waves) == [*complete, False].index(False)
                seen.append((len(packed), len(known.waves)))
                packed.append(unit.unit.number)
            yield unit

    with without_ray(seed=5):
        plain_results = execute._results
        execute._results = results
        pipeline.run(recipe(3), input=str(raw), output=str(tmp_path))
    assert [number for number, _ in seen] == list(range(6))
    assert 0 < seen[-1][1] < 3


def test_a_run_killed_while_packing_continues(raw, tmp_path):
    class Killed(Exception):
        pass

    def die(stage: str, done: int, total: int, note: str) -> None:
        if (stage, done) == (pack.STAGE, 5):
            raise Killed

    with pytest.raises(Killed):
        run(raw, tmp_path / "killed", 6, die)
    folder_store = store(tmp_path / "killed").child("shards")
    waves = [wave.key for wave in folder_store.list("waves")]
    before = {key: folder_store.read(key) for key in ("growing.json", *waves)}
    assert len(before) > 1
    assert not folder_store.exists("manifest.json")
    again = files(run(raw, tmp_path / "killed", 6))
    assert again == files(run(raw, tmp_path / "whole", 6))
    assert {key: again[f"shards/{key}"] for key in before} == before
    stages = store(tmp_path / "killed").read_json("summary.json")["stages"]
    assert stages[-1]["units_reused"] == 12


def test_waves_of_an_earlier_recipe_are_removed(raw, tmp_path):
    run(raw, tmp_path, 6)
    run(raw, tmp_path, 2)
    folder_store = store(tmp_path).child("shards")
    assert [found.key for found in folder_store.list("waves")] == [wave_key(0), wave_key(1)]
    assert store(tmp_path).read_json("summary.json")["stages"][-1]["units_reused"] == 12  # the rows are the same


def test_preferences_have_no_waves():
    with pytest.raises(ConfigError, match=r"pack\.waves works only for packed sequences"):
        build(PipelineConfig, {"read": {"paths": ["x"], "kind": "preferences"}, "steps": [
            {"tokenize": {"file": "tokenizer.json"}}, {"pack": {"waves": 2}}]})
