"""Stages of near-deduplication in this process: the rule for any partitioning; short documents; earlier dumps."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from tests.plain_execution import without_ray
from tidewheel.config import build
from tidewheel.data import verdicts
from tidewheel.data.config import DedupNearStep, PipelineConfig
from tidewheel.data.dedup import minhash
from tidewheel.data.stage import read_file
from tidewheel.data.stages import dedup_exact, dedup_near, ingest, near_edges, near_index, near_rounds, partition
from tidewheel.data.stages.execute import Runner
from tidewheel.data.stages.resolve import resolve
from tidewheel.errors import InputError

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def documents(seed: int, families: int = 12, source: str = "web") -> list[dict]:
    """Families of edited copies, including chains, short documents and exact copies."""
    generator = random.Random(seed)

    def word():
        return "".join(generator.choices(LETTERS, k=5))

    results = []
    for family in range(families):
        text = [word() for _ in range(generator.randint(30, 120))]
        for copy in range(generator.randint(1, 9)):
            results.append({"id": f"{source}-{family}-{copy}", "text": " ".join(text), "source": source})
            text = list(text)
            for _ in range(generator.randint(0, 2)):
                text[generator.randrange(len(text))] = word()
    results += [{"id": f"{source}-short-{number}", "text": text, "source": source} for number, text in enumerate(
        ["Hello there", "hello, there!", "Hello you", "1 2 3 4 5 6", "1 2 3 4 5 7", "1-2-3-4-5-6"])]
    return results


def write(folder: Path, *groups: list[dict], name: str = "a.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [record for group in groups for record in group]
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in rows))
    return folder


def dedup(folder: Path, output: Path, *, seed: int = 0, partitions: int = 4, exact: bool = False, priority=None,
          **near) -> tuple[dict[str, dict], dict]:
    """Return (verdicts by id, report) of near-deduplication, optionally after exact deduplication."""
    steps = [*(["dedup_exact"] if exact else []), {"dedup_near": near}, {"tokenize": {"train": {}}}, "pack"]
    config = build(PipelineConfig, {"partitions": partitions, "read": {"paths": ["*.jsonl"],
                                                                        "priority": priority or {}}, "steps": steps})
    job = resolve(config, input=str(folder), output=str(output))
    runner = Runner(job.output)
    rows: dict[str, dict] = {}

    def take(done):
        for unit in done.units:
            if "verdicts" in unit.files:
                rows.update((row["id"], row) for row in verdicts.decode(
                    read_file(job.store, unit.files["verdicts"])).to_pylist())

    with without_ray(seed):
        _, parts = partition.run(job, runner, ingest.run(job, runner).units)
        if exact:
            done, parts = dedup_exact.run(job, runner, parts)
            take(done)
        done, _ = dedup_near.run(job, runner, parts)
        take(done)
    if config.step("dedup_near").write_index:
        near_index.commit(job, [unit for unit in done.units if unit.unit.stage == near_index.STAGE])
    return rows, dedup_near.report(job, done.units)


def greedy(records: list[dict], least: float, ngram: int, unit: minhash.Unit) -> set[str]:
    """Return the documents to drop, by brute force over exact similarities, which the bands find almost certainly."""
    ordered = sorted(records, key=lambda record: (-len(record["text"].encode()), record["id"]))
    sets = minhash.shingle_sets([record["text"] for record in ordered], ngram=ngram, unit=unit)
    kept: list[int] = []
    for number in range(len(ordered)):
        if not any(len(sets[number]) and minhash.exact_jaccard(sets[other], sets[number]) >= least for other in kept):
            kept.append(number)
    return {record["id"] for record in ordered} - {ordered[number]["id"] for number in kept}


def test_partitions_and_rounds_do_not_change_the_result(tmp_path, monkeypatch):
    folder = write(tmp_path / "in", documents(1, families=25))
    expected, report = dedup(folder, tmp_path / "one", partitions=1)
    assert len(expected) > 40
    assert report["rounds"] == 0
    monkeypatch.setattr(near_rounds, "FEW_EDGES", 0)
    rounds = set()
    for partitions, seed in ((1, 1), (3, 2), (8, 3)):
        found, again = dedup(folder, tmp_path / f"{partitions}", partitions=partitions, seed=seed)
        assert found == expected
        rounds.add(again.pop("rounds"))
        assert {**again, "rounds": 0, "sample": {}} == {**report, "sample": {}}
    assert min(rounds) >= 2
    monkeypatch.setattr(near_rounds, "FEW_EDGES", 40)
    assert dedup(folder, tmp_path / "mixed", partitions=5)[0] == expected


def test_a_lost_round_is_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(near_rounds, "FEW_EDGES", 0)
    folder = write(tmp_path / "in", documents(1, families=25))
    expected, _ = dedup(folder, tmp_path / "out")
    for stage in ("dedup_near_round_1", "dedup_near_round_2", "dedup_near"):
        units = sorted((tmp_path / "out" / "stages" / stage / "units").glob("*.json"))
        assert len(units) == 4
        units[1].unlink()
        units[2].unlink()
        assert dedup(folder, tmp_path / "out")[0] == expected


@pytest.mark.parametrize(("unit", "ngram", "bands", "rows"), [("words", 3, 30, 4), ("characters", 9, 25, 4)])
def test_exact_verification_applies_the_greedy_rule_to_true_similarities(tmp_path, unit, ngram, bands, rows):
    records = documents(2)
    folder = write(tmp_path / "in", records)
    found, report = dedup(folder, tmp_path / "out", unit=unit, ngram=ngram, bands=bands, rows=rows, verify="exact",
                          min_jaccard=0.8)
    long = [record for record in records if "short" not in record["id"]]
    assert {name for name in found if "short" not in name} == greedy(long, 0.8, ngram, unit)
    texts = {record["id"]: record["text"] for record in records}
    for name, row in found.items():
        a, b = minhash.shingle_sets([texts[name], texts[row["survivor"]]], ngram=ngram, unit=unit)
        if len(a):
            assert row["score"] == minhash.exact_jaccard(a, b)
    assert report["sample"]["precision"] == 1.0


def test_documents_without_shingles_are_compared_by_their_text(tmp_path):
    for verify in ("estimated", "exact"):
        found, _ = dedup(write(tmp_path / "in", documents(3)), tmp_path / verify, verify=verify)
        short = {name.removeprefix("web-short-"): (row["survivor"].removeprefix("web-short-"), row["score"])
                 for name, row in found.items() if "short" in name}
        assert short == {"0": ("1", 1.0), "5": ("3", 1.0)}


@pytest.mark.parametrize(("exact", "verify", "partitions"), [
    (False, {"doubt": 0}, (4, 4, 4)), (True, {}, (3, 8, 5)), (False, {"verify": "exact"}, (5, 2, 3))])
def test_an_index_of_an_earlier_dump_gives_the_result_of_one_run(tmp_path, exact, verify, partitions):
    old, middle, new = documents(4, source="old"), documents(4, source="middle"), documents(4, source="new")
    for number, record in enumerate(itertools.chain(middle, new)):  # the same families, edited further
        if number % 3:
            record["text"] = record["text"].replace("a", "x", 1 + number % 2)
    new += documents(8, families=4, source="own")
    new.append({**old[0], "source": "new"})  # an id of the old dump
    options = {"exact": exact, **verify}
    first, _ = dedup(write(tmp_path / "a", old), tmp_path / "out-a", partitions=partitions[0], write_index=True,
                     **options)
    index_a = str(tmp_path / "out-a" / "near_index")
    second, _ = dedup(write(tmp_path / "b", middle), tmp_path / "out-b", partitions=partitions[1], write_index=True,
                      against=[index_a], **options)
    indexes = [index_a, str(tmp_path / "out-b" / "near_index")]
    third, report = dedup(write(tmp_path / "c", new), tmp_path / "out-c", partitions=partitions[2], against=indexes,
                          **options)
    assert report["against"] == indexes
    assert third[old[0]["id"]]["score"] == 1.0

    new[-1]["id"] = "old-0-0-again"
    once, _ = dedup(write(tmp_path / "all", old, middle, new), tmp_path / "out", priority={"old": 2, "middle": 1},
                    **options)
    third["old-0-0-again"] = third.pop(old[0]["id"])
    results = {**first, **second, **third}
    assert {name: (row["survivor"], row["score"]) for name, row in results.items()} == {
        name: (row["survivor"], row["score"]) for name, row in once.items()}
    for name, row in third.items():
        source = row["survivor"].split("-")[0]
        if name != "old-0-0-again":
            where = {"old": indexes[0], "middle": indexes[1]}.get(source)
            assert row["detail"] == (json.dumps({"index": where}) if where else "")
    assert {row["survivor"].split("-")[0] for row in third.values()} >= {"old", "own"}


def test_an_incompatible_index_is_refused(tmp_path):
    folder = write(tmp_path / "in", documents(5, families=2))
    dedup(folder, tmp_path / "out", write_index=True)
    index = str(tmp_path / "out" / "near_index")
    with pytest.raises(InputError, match=r"parameters: bands is 14 there and 13 here; min_jaccard is 0.72"):
        dedup(folder, tmp_path / "b", against=[index], permutations=112, bands=13, min_jaccard=0.8)
    with pytest.raises(InputError, match="there is no index"):
        dedup(folder, tmp_path / "b", against=["none"])
    (tmp_path / "out" / "near_index" / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match="not a manifest"):
        dedup(folder, tmp_path / "b", against=[index])
    assert not (tmp_path / "b").exists()


def test_another_index_changes_keys_and_leaves_no_old_files(tmp_path):
    folder = write(tmp_path / "in", documents(5, families=4))
    index = tmp_path / "out" / "near_index"
    dedup(folder, tmp_path / "out", write_index=True)
    before = {path.name: path.read_bytes() for path in index.iterdir()}
    dedup(folder, tmp_path / "out", write_index=True, seed=9)
    assert {path.name: path.read_bytes() for path in index.iterdir()} == before
    write(folder, documents(6, families=2, source="more"), name="b.jsonl")
    dedup(folder, tmp_path / "out", write_index=True)
    names = {path.name for path in index.iterdir()}
    assert len(names) == 5
    assert names != set(before)


def test_the_sample_measures_recall_and_precision(tmp_path):
    folder = write(tmp_path / "in", documents(7, families=120))
    _, report = dedup(folder, tmp_path / "out")
    sample = report["sample"]
    bins = [row for row in sample["bins"] if row["pairs"] >= 30]
    assert len(bins) >= 4
    for row in bins:
        share = row["expected"] / row["pairs"]
        assert abs(row["found"] / row["pairs"] - share) < 4 * (share * (1 - share) / row["pairs"]) ** 0.5 + 0.01
    assert sample["precision"] > 0.85
    assert sample["precision_within_0.05"] > 0.95
    assert sum(row["candidates"] for row in sample["bins"]) == report["candidates"]
    sizes = [size["clusters"] for size in report["cluster_sizes"]]
    assert sum(sizes) <= report["dropped"]
    assert report["largest_cluster"] <= 9
    small = dedup(folder, tmp_path / "out2", bands=1, rows=8)[1]["sample"]
    assert all(row["pairs"] == 0 for row in small["bins"]), "one band has no others to be measured by"


def test_estimates_near_the_threshold_are_in_doubt():
    error = 0.0424  # sqrt(0.72 x 0.28 / 112)
    for settings, low, high in (({}, 0.72 - 2.5 * error, 0.72 + 2.5 * error), ({"doubt": 0}, 0.72, 0.72),
                                ({"verify": "exact"}, 0.72 - 4 * error, float("inf"))):
        assert near_edges.doubtful(build(DedupNearStep, settings)) == pytest.approx((low, high), abs=1e-3)


def test_shingle_sets_decide_pairs_in_doubt(tmp_path):
    records = documents(9, families=40)
    folder = write(tmp_path / "in", records)
    texts = {record["id"]: record["text"] for record in records}

    def wrong(**near):
        found, report = dedup(folder, tmp_path / "-".join(near), **near)
        pairs = [minhash.shingle_sets([texts[name], texts[row["survivor"]]]) for name, row in found.items()]
        exact = [minhash.exact_jaccard(a, b) for a, b in pairs if len(a)]
        return len(found), report["compared_exactly"], sum(value < 0.72 for value in exact)

    removed, compared, bad = wrong(doubt=2.5)
    assert removed > 80
    assert compared > 20
    assert bad == 0
    removed, compared, bad = wrong(doubt=0)
    assert compared == 0
    assert bad > 0
