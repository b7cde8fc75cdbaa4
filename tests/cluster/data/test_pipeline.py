"""The data pipeline on a real Ray cluster: correct results, no repeated work, and bytes that only the input decides."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidewheel.config import build
from tidewheel.data import pipeline, pipeline_plan
from tidewheel.data.config import PipelineConfig
from tidewheel.data.stage import Unit
from tidewheel.data.stages import execute
from tidewheel.errors import InputError, StorageError
from tidewheel.shards.tokenizer import load as load_tokenizer
from tidewheel.shards.verify import verify
from tidewheel.storage import store

pytestmark = pytest.mark.cluster

STOP = ["the", "of", "and", "to", "that", "with", "have", "be"]
ITEM = "Which lighthouse keeper painted seventeen crimson herons upon the northern harbour wall before breakfast"


def words(generator: random.Random, count: int) -> list[str]:
    return [generator.choice(STOP) if generator.random() < 0.3 else
            "".join(generator.choice("aeioulnrst") for _ in range(generator.randint(4, 8))) for _ in range(count)]


def corpus() -> tuple[list[dict], dict[str, str]]:
    """Return (records, expected verdict of each id that is not simply kept)."""
    generator = random.Random(5)
    records = [{"id": f"plain-{number:03d}", "text": " ".join(words(generator, generator.randint(60, 400))),
                "source": "web", "number": number} for number in range(60)]
    fate = {}

    def add(identity, text, becomes, source="web"):
        records.append({"id": identity, "text": text, "source": source})
        if becomes:
            fate[identity] = becomes

    add("exact-copy", records[0]["text"].replace(" ", "  ") + "!", "exact_duplicate")  # longer, so it is the better one
    fate["plain-000"] = fate.pop("exact-copy")
    near = records[1]["text"].split()
    near[len(near) // 2] = "altered"
    add("near-copy", " ".join(near), None)
    add("from-books", records[2]["text"], None, source="books")  # higher priority: the plain one goes
    fate["plain-002"] = "exact_duplicate"
    add("leaked", " ".join(words(generator, 60)) + f". {ITEM}. " + " ".join(words(generator, 60)), "contaminated")
    add("too-short", "the of and", "gopher_too_few_words")
    add("no-stops", "lorem ipsum dolor amet " * 30, "gopher_too_few_stop_words")
    add("plain-005", records[5]["text"], None)  # the same record twice
    return records, fate


BAD = [b'{"id": "bad-1", "text": "unfinished', b'{"id": "bad-2", "body": "no text"}',
       '{"text": "café"}'.encode("latin-1"),
       json.dumps({"id": "plain-006", "text": "that mouse will have been with the cat " * 7}).encode()]  # id is taken


def write(folder: Path, *, files: int = 4, seed: int = 0) -> Path:
    """Write the corpus below `folder`, distributed over files in an order that `seed` decides."""
    lines = [json.dumps(record).encode() for record in corpus()[0]] + BAD
    random.Random(seed).shuffle(lines)
    (folder / "corpus").mkdir(parents=True)
    (folder / "evals").mkdir()
    for number in range(files):
        data = b"".join(line + b"\n" for line in lines[number::files])
        if number % 2:
            (folder / "corpus" / f"{seed}-{number}.jsonl.gz").write_bytes(gzip.compress(data))
        else:
            (folder / "corpus" / f"{seed}-{number}.jsonl").write_bytes(data)
    (folder / "corpus" / "empty.jsonl").write_bytes(b"")
    (folder / "evals" / "quiz.jsonl").write_text(json.dumps({"id": "q1", "question": ITEM}) + "\n")
    return folder


def recipe(*overrides: str, steps: list | None = None) -> PipelineConfig:
    return build(PipelineConfig, {
        "name": "test", "max_bad_fraction": 0.2, "partitions": 3,
        "read": {"paths": ["corpus/*.jsonl*"], "priority": {"books": 5}},
        "steps": steps or [{"filter": {"gopher_quality": {}}}, "dedup_exact", {"dedup_near": {}},
                           {"decontaminate": {"evals": ["evals/*.jsonl"]}},
                           {"tokenize": {"train": {"vocabulary_size": 400, "sample_bytes": 20_000}}},
                           {"pack": {"sequence_length": 64, "validation_fraction": 0.2, "rows_per_shard": 16}}]},
        overrides)


def shard_hashes(output) -> dict[str, list[str]]:
    """Return names and hashes of the files of both sets, and the bytes of the manifests."""
    folder_store = store(output)
    return {name: [f"{entry.key} {folder_store.hash(entry.key)}" for entry in folder_store.list(name)]
            for name in ("shards", "validation")}


def documents_of(output) -> dict[str, str]:
    """Return the texts decoded from the tokens of both sets."""
    folder_store = store(output)
    pieces: dict[str, dict[int, list[int]]] = defaultdict(dict)
    for name in ("shards", "validation"):
        encoder = load_tokenizer(folder_store.read(f"{name}/tokenizer.json"))
        for shard in folder_store.read_json(f"{name}/manifest.json")["shards"]:
            table = pa.ipc.open_file(pa.py_buffer(folder_store.read(f"{name}/{shard['name']}"))).read_all()
            for row in table.to_pylist():
                ends = [*row["segment_starts"][1:], row["length"]]
                for first, last, identity, offset in zip(row["segment_starts"], ends, row["document_ids"],
                                                         row["document_offsets"], strict=True):
                    assert offset not in pieces[identity], "a piece occurs twice"
                    pieces[identity][offset] = row["tokens"][first:last]
    texts = {}
    for identity, found in pieces.items():
        tokens: list[int] = []
        for offset in sorted(found):
            assert offset == len(tokens), "a piece is missing"
            tokens += found[offset]
        assert tokens[-1] == encoder.eos
        texts[identity] = encoder.decode(tokens[:-1])
    return texts


def verdict_rows(output: Path) -> dict[str, dict]:
    tables = [pq.read_table(path) for path in (output / "verdicts").rglob("*.parquet")]
    return {row["id"]: row for table in tables for row in table.to_pylist()}


@pytest.fixture(scope="module")
def finished(cluster, tmp_path_factory):
    """(output folder, summary) of an undisturbed run; tests must not change it."""
    root = tmp_path_factory.mktemp("pipeline")
    seen: list[tuple] = []
    summary = pipeline.run(recipe(), input=str(write(root / "in")), output=str(root / "out"),
                           on_progress=lambda *told: seen.append(told))
    return root, summary, seen


def test_each_document_gets_the_expected_verdict(finished):
    root, summary, _ = finished
    records, fate = corpus()
    verdicts = verdict_rows(root / "out")
    near = {"near-copy", "plain-001"} & set(verdicts)
    assert len(near) == 1, "one of the two alike documents goes"
    expected = {**fate, **dict.fromkeys(near, "near_duplicate")}
    expected["plain-005"] = "same_document"
    assert {identity: row["reason"] for identity, row in verdicts.items()} == expected
    assert verdicts["plain-002"]["survivor"] == "from-books"
    assert verdicts["plain-000"]["survivor"] == "exact-copy"
    assert verdicts[near.pop()]["score"] >= 0.75
    assert json.loads(verdicts["leaked"]["detail"])["item"] == "q1"

    texts = {record["id"]: record["text"] for record in records}
    kept = set(texts) - set(expected) | {"plain-005"}
    assert {identity: texts[identity] for identity in kept} == documents_of(root / "out")
    assert summary.documents + summary.value["validation"]["documents"] == len(kept)


def test_bad_records_are_in_quarantine_with_their_position(finished):
    root, summary, _ = finished
    rows = [json.loads(line) for path in (root / "out" / "quarantine").iterdir() for line in path.open()]
    assert summary.value["quarantine"] == {"duplicate_id": 1, "empty_file": 1, "invalid_json": 1, "missing_text": 1,
                                           "wrong_encoding": 1}
    assert sorted(row["reason"] for row in rows) == sorted(summary.value["quarantine"])
    for row in rows:
        data = (root / "in" / row["file"]).read_bytes()
        data = gzip.decompress(data) if row["file"].endswith(".gz") else data
        if row["line"]:
            assert data[row["offset"] :].split(b"\n")[0] == data.split(b"\n")[row["line"] - 1]
        if row["reason"] == "wrong_encoding":
            assert row["head"] == '{"text": "caf\\xe9"}'


def test_the_summary_balances_and_the_sets_are_intact(finished):
    root, summary, seen = finished
    value = summary.value
    assert json.loads((root / "out" / "summary.json").read_text()) == value
    assert [stage["name"] for stage in value["stages"]] == [
        "ingest", "filter", "partition", "dedup_exact", "dedup_near", "decontaminate", "tokenizer", "pack"]
    for stage in value["stages"]:
        num_dropped = sum(stage["dropped"].values()) + stage["quarantined"]
        assert stage["documents_in"] == stage["documents_out"] + num_dropped
        assert stage["units_reused"] == 0
        if stage["dropped"]:
            counts = json.loads((root / "out" / "verdicts" / stage["name"] / "summary.json").read_text())
            assert counts["dropped"] == stage["dropped"]
            assert set(value["samples"][stage["name"]]) == set(stage["dropped"])
    assert verify(str(root / "out" / "shards")) == []
    assert verify(str(root / "out" / "validation")) == []
    assert value["histograms"]["words"]["threshold"] == 50
    assert sum(value["histograms"]["words"]["counts"]) == value["stages"][1]["documents_in"]
    entropy = value["ngram_entropy"]
    assert 0 < entropy["bigram"] < entropy["unigram"] <= entropy["unigram_model"]
    assert entropy["bigram_model"] > entropy["bigram"]
    assert {entry["name"] for entry in value["evaluation_sets"]} == {"quiz"}
    assert {told[0] for told in seen} >= {"ingest", "partition", "dedup_exact", "dedup_near", "tokenizer", "pack"}
    assert all(done <= total for _, done, total, _ in seen)


def test_a_second_run_does_nothing(finished, monkeypatch):
    root, first, _ = finished
    import ray.data

    monkeypatch.setattr(ray.data, "from_arrow", None)  # no execution can start
    before = {path: path.stat().st_mtime_ns for path in (root / "out").rglob("*.arrow")}
    again = pipeline.run(recipe(), input=str(root / "in"), output=str(root / "out"))
    assert {path: path.stat().st_mtime_ns for path in (root / "out").rglob("*.arrow")} == before
    for one, other in zip(first.value["stages"], again.value["stages"], strict=True):
        assert other["units_reused"] == other["units"]
        assert {**one, "units_reused": 0, "seconds": 0, "filters": []} == {
            **other, "units_reused": 0, "seconds": 0, "filters": []}
    assert {**first.value, "stages": []} == {**again.value, "stages": []}
    planned = pipeline_plan.plan(recipe(), input=str(root / "in"), output=str(root / "out"))
    assert [(stage.units, stage.published) for stage in planned.stages] == [
        (5, 5), (3, 3), (3, 3), (3, 3), (3, 3), (1, 1), (3, 3)]
    changed = recipe("steps.3.decontaminate.ngram=8")
    planned = pipeline_plan.plan(changed, input=str(root / "in"), output=str(root / "out"))
    assert [stage.published for stage in planned.stages] == [5, 3, 3, 3, 0, None, None]


def test_file_order_and_count_do_not_change_the_output(finished, tmp_path):
    root, _, _ = finished
    pipeline.run(recipe(), input=str(write(tmp_path / "in", files=7, seed=9)), output=str(tmp_path / "out"))
    assert shard_hashes(tmp_path / "out") == shard_hashes(root / "out")


def test_parquet_and_arrow_give_the_same_bytes(finished, tmp_path):
    root, _, _ = finished
    folder = write(tmp_path / "in", files=4)
    lines = []
    for path in sorted((folder / "corpus").glob("0-[12].*")):
        data = path.read_bytes()
        lines += (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
        path.unlink()
    good = [json.loads(line) for line in lines if line not in BAD]
    (folder / "corpus" / "bad.jsonl").write_bytes(b"".join(line + b"\n" for line in lines if line in BAD))
    table = pa.Table.from_pylist(good, schema=pa.schema([(name, pa.string()) for name in ("id", "text", "source")]))
    pq.write_table(table.slice(0, 20), folder / "corpus" / "a.jsonl.parquet", row_group_size=7)
    with pa.ipc.new_file(str(folder / "corpus" / "b.jsonl.arrow"), table.schema) as sink:
        sink.write_table(table.slice(20))
    pipeline.run(recipe(), input=str(folder), output=str(tmp_path / "out"))
    assert shard_hashes(tmp_path / "out") == shard_hashes(root / "out")


def test_ranges_of_files_do_not_change_the_output(finished, tmp_path):
    root, whole, _ = finished
    config = recipe("read.unit_bytes=4096")
    done = pipeline.run(config, input=str(root / "in"), output=str(tmp_path / "out"))
    stages = [done.stage(name) for name in ("ingest", "partition")]
    assert stages[0]["units"] > whole.stage("ingest")["units"] + 5
    for stage, other in zip(stages, (whole.stage("ingest"), whole.stage("partition"))):
        assert {**stage, "units": 0, "seconds": 0, "filters": []} == {
            **other, "units": 0, "seconds": 0, "filters": []}
    assert done.value["quarantine"] == whole.value["quarantine"]

    def without_recipe(output):
        manifests = [json.loads((output / name / "manifest.json").read_text()) for name in ("shards", "validation")]
        return [{**manifest, "recipe": {}, "recipe_hash": "", "hash": ""} for manifest in manifests]

    assert without_recipe(tmp_path / "out") == without_recipe(root / "out")  # they hold the shards' hashes
    again = pipeline.run(config, input=str(root / "in"), output=str(tmp_path / "out"))
    assert all(entry["units_reused"] == entry["units"] for entry in again.value["stages"])


def test_web_archives_and_text_trees_are_packed(cluster, tmp_path):
    pytest.importorskip("trafilatura")
    from tests.unit.data.readers.test_web import response

    for name in ("in/web", "in/books"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "in/web/a.warc.gz").write_bytes(b"".join(gzip.compress(response(number)) for number in range(20)))
    (tmp_path / "in/books/one.md").write_text("the book has words of its own and is kept with that\n" * 9)
    config = recipe("read.paths=[web/*.warc.gz, books/**/*.md]", "read.source=host", steps=[
        "dedup_exact", {"tokenize": {"train": {"vocabulary_size": 300}}}, {"pack": {"sequence_length": 64}}])
    done = pipeline.run(config, input=str(tmp_path / "in"), output=str(tmp_path / "out"))
    assert done.stage("ingest")["documents_out"] == 21
    texts = documents_of(tmp_path / "out")
    assert "Paragraph 7-4" in texts["urn:uuid:0007"]
    assert texts["books/one.md"].startswith("the book has words")


def test_only_lost_units_are_made_again(finished, tmp_path):
    root, _, _ = finished
    shutil.copytree(root / "out", tmp_path / "out")
    units = {stage: sorted((tmp_path / "out" / "stages" / stage / "units").glob("*.json"))
             for stage in ("ingest", "partition", "dedup_exact", "dedup_near_edges", "pack")}
    for stage in ("ingest", "partition", "dedup_exact", "dedup_near_edges"):
        units[stage][1].unlink()
    next((tmp_path / "out" / "shards").glob("*.arrow")).unlink()
    (tmp_path / "out" / "shards" / "manifest.json").unlink()
    (tmp_path / "out" / "shards" / ".tmp-123-left.arrow").write_bytes(b"half")
    done = pipeline.run(recipe(), input=str(root / "in"), output=str(tmp_path / "out"))
    assert shard_hashes(tmp_path / "out") == shard_hashes(root / "out")
    assert not list((tmp_path / "out").rglob(".tmp-*"))
    redone = {entry["name"]: entry["units"] - entry["units_reused"] for entry in done.value["stages"]}
    assert redone == {"ingest": 1, "filter": 1, "partition": 1, "dedup_exact": 1, "dedup_near": 1, "decontaminate": 0,
                      "tokenizer": 0, "pack": 1}


def test_killed_workers_do_not_change_the_output(finished, tmp_path):
    import psutil

    root, _, _ = finished
    killed = []

    def kill_a_worker(stage: str, done: int, total: int, note: str) -> None:
        children = psutil.Process().children(recursive=True)
        workers = [process for process in children if process.name().startswith(("ray::Map", "ray::HashShuffle"))]
        if workers and len(killed) < 4 and stage not in killed:
            killed.append(stage)
            workers[0].kill()

    done = pipeline.run(recipe(), input=str(write(tmp_path / "in")), output=str(tmp_path / "out"),
                        on_progress=kill_a_worker)
    assert killed
    assert done.documents
    assert shard_hashes(tmp_path / "out") == shard_hashes(root / "out")


def test_another_recipe_reuses_shared_units_and_leaves_no_old_verdicts(finished, tmp_path):
    root, _, _ = finished
    shutil.copytree(root / "out", tmp_path / "out")
    strict = recipe("steps.2.dedup_near.min_jaccard=1.0")
    done = pipeline.run(strict, input=str(root / "in"), output=str(tmp_path / "out"), may_replace=True)
    assert done.stage("dedup_exact")["units_reused"] == 3
    assert done.stage("dedup_near")["dropped"] == {}
    assert "near_duplicate" not in {row["reason"] for row in verdict_rows(tmp_path / "out").values()}
    assert verify(str(tmp_path / "out" / "shards")) == []
    back = pipeline.run(recipe(), input=str(root / "in"), output=str(tmp_path / "out"), may_replace=True)
    assert "near_duplicate" in {row["reason"] for row in verdict_rows(tmp_path / "out").values()}
    assert back.stage("pack")["units_reused"] == 3


def test_a_bare_recipe_runs_with_more_partitions_than_documents(cluster, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "one document only"}\n{"text": "one document only"}\n')
    config = recipe("partitions=5", "read.paths=[a.jsonl]", steps=[
        "dedup_exact", {"dedup_near": {}}, {"filter": {"gopher_quality": {"min_words": 1, "min_stop_words": 0}}},
        {"tokenize": {"train": {"vocabulary_size": 300}}}, {"pack": {"sequence_length": 16, "validation_fraction": 0}}])
    done = pipeline.run(config, input=str(tmp_path / "in"), output=str(tmp_path / "out"))
    assert done.documents == 1
    assert list(documents_of(tmp_path / "out").values()) == ["one document only"]
    assert done.stage("partition")["dropped"] == {"same_document": 1}
    assert done.value["ngram_entropy"]["unigram"] is None


def test_rounds_and_an_index_of_an_earlier_dump_on_a_cluster(finished, tmp_path, monkeypatch):
    from tidewheel.data.stages import near_rounds

    root, _, _ = finished
    before = verdict_rows(root / "out")
    monkeypatch.setattr(near_rounds, "FEW_EDGES", 0)
    steps = recipe().canonical()["steps"]
    steps[2] = {"dedup_near": {"verify": "exact", "min_jaccard": 0.7, "write_index": True}}
    first = pipeline.run(recipe(steps=steps), input=str(root / "in"), output=str(tmp_path / "first"))
    assert first.value["near_dedup"]["rounds"] >= 1
    assert {name for name, row in verdict_rows(tmp_path / "first").items() if row["reason"] == "near_duplicate"} == {
        name for name, row in before.items() if row["reason"] == "near_duplicate"}
    index = str(tmp_path / "first" / "near_index")
    steps[2] = {"dedup_near": {"verify": "exact", "min_jaccard": 0.7, "against": [index]}}
    steps[1] = {"filter": {"gopher_quality": {}}}  # without exact deduplication: everything has an exact copy there
    with pytest.raises(InputError, match="no document is left"):
        pipeline.run(recipe(steps=steps), input=str(root / "in"), output=str(tmp_path / "second"))
    shutil.copytree(root / "in", tmp_path / "in")
    own = [{"id": "plain-000", "text": " ".join(words(random.Random(77), 90))}]
    (tmp_path / "in" / "corpus" / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    pipeline.run(recipe("read.paths=[corpus/own.jsonl,corpus/0-0.jsonl]", steps=steps), input=str(tmp_path / "in"),
                 output=str(tmp_path / "second"))
    result = verdict_rows(tmp_path / "second")
    assert set(documents_of(tmp_path / "second")) == {"plain-000"}, "an id of the earlier dump, with another text"
    old = {json.loads(row["detail"])["index"] for row in result.values() if row["reason"] == "near_duplicate"}
    assert old == {index}


def test_too_many_bad_records_name_the_worst_file(cluster, tmp_path):
    write(tmp_path / "in")
    (tmp_path / "in" / "corpus" / "worst.jsonl").write_bytes(b"{\n" * 30)
    with pytest.raises(InputError) as error:
        pipeline.run(recipe(), input=str(tmp_path / "in"), output=str(tmp_path / "out"))
    assert error.value.where == "corpus/worst.jsonl"
    assert "30 of 30" in str(error.value)
    assert not (tmp_path / "out" / "shards").exists()
    assert not (tmp_path / "out" / "stages" / "partition").exists()
    assert list((tmp_path / "out" / "quarantine").iterdir())


@pytest.mark.parametrize(("stage", "file", "reader"), [
    ("ingest", "documents", "partition"), ("partition", "keys", "dedup_exact"), ("partition", "documents", "pack")])
def test_a_damaged_unit_is_reported_and_made_again(finished, tmp_path, stage, file, reader):
    root, _, _ = finished
    shutil.copytree(root / "out", tmp_path / "out")
    path = max((tmp_path / "out" / "stages" / stage / "units").glob(f"*/{file}"), key=lambda each: each.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    shutil.rmtree(tmp_path / "out" / "stages" / reader)
    with pytest.raises(StorageError, match="delete this file and run again") as error:
        pipeline.run(recipe(), input=str(root / "in"), output=str(tmp_path / "out"))
    assert error.value.where == str(path)
    path.unlink()
    pipeline.run(recipe(), input=str(root / "in"), output=str(tmp_path / "out"))
    assert shard_hashes(tmp_path / "out") == shard_hashes(root / "out")


def test_a_filter_that_drops_everything_raises(cluster, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "too short"}\n')
    config = recipe("read.paths=[a.jsonl]", steps=[
        {"filter": {"gopher_quality": {}}}, "dedup_exact", {"dedup_near": {}}, {"tokenize": {"train": {}}}, "pack"])
    with pytest.raises(InputError, match="no document is left: 1 record read; filter dropped 1"):
        pipeline.run(config, input=str(tmp_path / "in"), output=str(tmp_path / "out"))


def test_an_object_store_gives_the_same_bytes(finished, s3, tmp_path):
    root, _, _ = finished
    uri = s3.create_bucket("pipeline")
    folder_store = store(uri)
    for path in sorted((root / "in").rglob("*.*")):
        folder_store.write(path.relative_to(root / "in").as_posix(), path.read_bytes())
    run = pipeline.run(recipe(), input=uri, output=f"{uri}/out")
    assert shard_hashes(f"{uri}/out") == shard_hashes(root / "out")
    config = recipe(f"steps.3.decontaminate.evals=[{uri}/evals/*.jsonl]")  # by their own address, the same items
    again = pipeline.run(config, input=uri, output=f"{uri}/out", may_replace=True)
    assert all(entry["units_reused"] == entry["units"] for entry in again.value["stages"])
    assert again.value["contamination"] == run.value["contamination"]


def test_a_shuffle_starts_no_processes_of_its_own(cluster, tmp_path: Path):
    """Ray would start new workers for each side of a shuffle, which costs more than most shuffles (`_same_workers`)."""
    from ray.data._internal.execution.operators import hash_shuffle_v2

    folder, before = tmp_path / "workers", dict(hash_shuffle_v2._SHUFFLE_MAP_RUNTIME_ENV["env_vars"])
    folder.mkdir()
    assert before  # else Ray has changed, and `_same_workers` is no longer needed

    def told(side: str) -> None:
        shuffle = {"RAY_DATA_SHUFFLE_MAP_WORKER", "RAY_DATA_SHUFFLE_REDUCE_WORKER"} & os.environ.keys()
        (folder / f"{side}-{os.getpid()}-{','.join(sorted(shuffle))}").touch()

    def read(task: execute.Task) -> list[pa.Table]:
        told("read")
        return [pa.table({"part": pa.array([0, 1] * 50, pa.int32())})]

    def reduce(number: int, rows: pa.Table) -> None:
        told("reduce")

    tasks = [execute.Task(str(tmp_path), Unit("test", f"{number}", f"{number}", number)) for number in range(4)]
    assert not list(execute.shuffle_units(tasks, read, pa.schema([("part", pa.int32())]),
                                          [execute.Hop("part", reduce)], 2))
    results = [path.name.split("-") for path in folder.iterdir()]
    assert {side for side, _, _ in results} == {"read", "reduce"}
    assert not [item for item in results if item[2]], "in an environment of its own"
    assert hash_shuffle_v2._SHUFFLE_MAP_RUNTIME_ENV["env_vars"] == before


def test_ray_data_starts_no_actors_that_have_nothing_to_do(finished):
    """This Ray has no dashboard and cannot grow."""
    from ray.util import list_named_actors

    assert list_named_actors(all_namespaces=True) == []
