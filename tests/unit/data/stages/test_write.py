"""Documents as a product: readers written from the formats' definitions give back what went in, to the byte.

`python -m tests.benchmarks.product_readers` does the same with the readers of the formats' owners.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import struct
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from backports import zstd

from tests.plain_execution import without_ray
from tidewheel.config import build
from tidewheel.data import pipeline, pipeline_plan
from tidewheel.data.clean import clean, find
from tidewheel.data.config import PipelineConfig
from tidewheel.data.diff import compare
from tidewheel.data.document import DOCUMENT_SCHEMA
from tidewheel.data.product import card, formats, rows
from tidewheel.data.stage import Published, write_ipc
from tidewheel.data.stages import write
from tidewheel.data.stages.partition import Part
from tidewheel.data.stages.resolve import resolve
from tidewheel.data.tokenize.tokenizer import train_bpe
from tidewheel.errors import ConfigError, InputError
from tidewheel.report.pipeline import write_pipeline_report
from tidewheel.shards.tokenizer import load
from tidewheel.shards.verify import verify
from tidewheel.storage import content_hash, store

EVERY = ["parquet", "jsonl", "arrow", "mds", "megatron"]
PARTITIONS = 3
TEXTS = [f"document {number} caf\u00e9 \U0001f600 \"quoted\"\n" * (number % 5 + 1) for number in range(60)]
LANGUAGES, LICENSES = ("en", "de-DE", None), ("CC-BY 4.0", "<script>alert(1)</script>|x", None)


def document(number: int) -> dict[str, str]:
    meta = {"url": f"http://x/{number}", "language": LANGUAGES[number % 3], "license": LICENSES[number % 3],
            "n": number, "_file": "a.jsonl", "_offset": number}
    meta = {name: value for name, value in meta.items() if value is not None}
    return {"id": f"d{number:03d}", "text": TEXTS[number], "source": "s|[x](y)",
            "meta": json.dumps(meta, sort_keys=True)}


def documents(part: int) -> list[dict[str, str]]:
    return [document(number) for number in range(part, len(TEXTS), PARTITIONS)]


TOKENIZER = train_bpe(TEXTS, 300)


def written(folder: Path, kinds=EVERY, *, chunk: int = 8192, order: int = 1, tokenize: bool = True, **settings
            ) -> tuple[list[Published], dict]:
    """Return (units, manifest) of a product whose documents come in batches of `chunk`."""
    (folder / "in").mkdir(exist_ok=True, parents=True)
    (folder / "in" / "a.jsonl").write_text("{}\n")
    (folder / "in" / "t.json").write_bytes(TOKENIZER)
    steps = [*([{"tokenize": {"file": "t.json"}}] if tokenize else []), {"write": {"formats": kinds, **settings}}]
    config = build(PipelineConfig, {"name": "books", "partitions": PARTITIONS, "read": {"paths": ["a.jsonl"]},
                                    "steps": steps})
    job = resolve(config, input=str(folder / "in"), output=str(folder / "out"))
    parts = []
    for number in range(PARTITIONS):
        table = pa.Table.from_pylist(documents(number), schema=DOCUMENT_SCHEMA)
        with patch("tidewheel.data.stage._BATCH_ROWS", chunk), job.store.writer(f"part-{number}") as sink:
            write_ipc(sink, table)
        parts.append(Part(number, sink.stamp, sink.stamp, (), len(table)))
    stamp = job.store.write("tokenizer", TOKENIZER) if tokenize else None
    units = [write.write_part(task) for task in write.tasks(job, parts, stamp)[::order]]
    return units, write.commit(job, units[::order], [], [], TOKENIZER)


@pytest.fixture(scope="module")
def product(tmp_path_factory):
    """A product in every format, with several files for each partition, and its manifest."""
    folder = tmp_path_factory.mktemp("product")
    manifest = written(folder, validation_fraction=0.2, shard_bytes=900)[1]
    return folder / "out/dataset", manifest


def files(product, kind, split="train", suffix=""):
    return [product[0] / file["name"] for file in product[1]["files"]
            if (file["format"], file["split"]) == (kind, split) and file["name"].endswith(suffix)]


def expected(product) -> dict[str, list[dict]]:
    """Return the rows of both splits in order, as the Parquet files split them."""
    known = {row["id"]: {**row, "meta": json.loads(row["meta"])} for row in map(document, range(len(TEXTS)))}
    split = {name: [row for path in files(product, "parquet", name) for row in pq.read_table(path)["id"].to_pylist()]
             for name in write.SPLITS}
    assert sorted(itertools.chain(*split.values())) == sorted(known)
    assert 3 < len(split["validation"]) < 25
    return {name: [{
        **{key: known[row][key] for key in ("id", "text", "source")},
        **{key: known[row]["meta"].get(key) for key in ("url", "language", "license")},
        "metadata": {key: known[row]["meta"][key] for key in ("n", "_file", "_offset")}} for row in ids]
        for name, ids in split.items()}


def as_rows(table: pa.Table) -> list[dict]:
    return [{**row, "metadata": json.loads(row["metadata"])} for row in table.to_pylist()]


@pytest.mark.parametrize("split", write.SPLITS)
def test_parquet_and_arrow_contain_the_documents(product, split):
    results = [row for path in files(product, "parquet", split) for row in as_rows(pq.read_table(path))]
    assert results == expected(product)[split]
    results = [row for path in files(product, "arrow", split) for row in as_rows(pa.ipc.open_file(path).read_all())]
    assert results == expected(product)[split]


@pytest.mark.parametrize("split", write.SPLITS)
def test_jsonl_contains_the_documents(product, split):
    results = [json.loads(line) for path in files(product, "jsonl", split)
             for line in zstd.decompress(path.read_bytes()).decode().split("\n") if line]
    assert [{"url": None, "language": None, "license": None, **row} for row in results] == expected(product)[split]
    assert all(value is not None for row in results for value in row.values())


@pytest.mark.parametrize("split", write.SPLITS)
def test_mds_follows_its_definition(product, split):
    folder = product[0] / "mds" / split
    index = json.loads((folder / "index.json").read_text())
    assert index["version"] == 2
    results = []
    for shard in index["shards"]:
        assert (shard["format"], shard["compression"], shard["zip_data"]) == ("mds", None, None)
        data = (folder / shard["raw_data"]["basename"]).read_bytes()
        assert len(data) == shard["raw_data"]["bytes"]
        assert hashlib.sha256(data).hexdigest() == shard["raw_data"]["hashes"]["sha256"]
        count, = struct.unpack_from("<I", data)
        assert count == shard["samples"]
        offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
        assert offsets[-1] == len(data)
        assert json.loads(data[4 + 4 * (count + 1) : offsets[0]])["column_names"] == shard["column_names"]
        for begin, end in itertools.pairwise(offsets):
            width = len(shard["column_names"])
            sizes = struct.unpack_from(f"<{width}I", data, begin)
            bounds = itertools.accumulate(sizes, initial=begin + 4 * width)
            values = [data[first:last].decode() for first, last in itertools.pairwise(bounds)]
            assert begin + 4 * width + sum(sizes) == end
            results.append(dict(zip(shard["column_names"], values, strict=True)))
    rows = [{**row, "metadata": json.loads(row["metadata"])} for row in results]
    assert rows == [{key: value or "" for key, value in row.items()} for row in expected(product)[split]]


@pytest.mark.parametrize("split", write.SPLITS)
def test_megatron_follows_its_definition(product, split):
    encoder = load(TOKENIZER)
    found, paths = [], []
    for path in files(product, "megatron", split, ".idx"):
        data, tokens = path.read_bytes(), path.with_suffix(".bin").read_bytes()
        assert data[:9] == b"MMIDIDX\0\0"
        version, code, sequences, ends = struct.unpack_from("<QBQQ", data, 9)
        assert (version, code, ends) == (1, 8, sequences + 1), "8 is uint16"
        sizes = np.frombuffer(data, "<i4", sequences, 34)
        offsets = np.frombuffer(data, "<i8", sequences, 34 + 4 * sequences)
        bounds = np.frombuffer(data, "<i8", ends, 34 + 12 * sequences)
        assert 34 + 12 * sequences + 8 * ends == len(data)
        assert bounds.tolist() == list(range(ends))
        for size, offset in zip(sizes, offsets, strict=True):
            own = np.frombuffer(tokens, "<u2", size, offset)
            assert own[-1] == encoder.eos
            found.append(encoder.decode(own[:-1].tolist()))
        assert 2 * sizes.sum() == len(tokens)
        paths.append(f"{sizes.sum()} {path.relative_to(product[0]).with_suffix('').as_posix()}")
    assert found == [row["text"] for row in expected(product)[split]]
    assert (product[0] / "megatron" / f"{split}.txt").read_text().splitlines() == paths


def test_large_vocabularies_are_int32():
    assert [formats.megatron_dtype(size) for size in (65_499, 65_500)] == ["uint16", "int32"]
    sink = io.BytesIO()
    writer = formats.MegatronWriter(sink, "int32")
    writer.add(rows.Batch(pa.table({}), [], np.array([70_000, 1, 2], np.uint32), np.array([2, 1])))
    assert np.frombuffer(sink.getvalue(), "<i4").tolist() == [70_000, 1, 2]
    assert struct.unpack_from("<QBQQ", writer.index(), 9) == (1, 4, 2, 3)
    assert np.frombuffer(writer.index(), "<i8", 2, 34 + 8).tolist() == [0, 8]


def test_the_manifest_hashes_every_file_and_no_others_exist(product):
    folder, manifest = product
    for file in manifest["files"]:
        data = (folder / file["name"]).read_bytes()
        assert (content_hash(data), hashlib.sha256(data).hexdigest(), len(data)) == (
            file["hash"], file["sha256"], file["bytes"])
    for name, digest in manifest["others"].items():
        assert content_hash((folder / name).read_bytes()) == digest
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {
        "manifest.json", *manifest["others"], *(file["name"] for file in manifest["files"])}
    assert manifest["documents"] == len(TEXTS) == sum(manifest["splits"].values())
    assert sum(file["tokens"] for file in manifest["files"] if file["name"].endswith(".bin")) == sum(
        len(load(TOKENIZER).encode_plain([text])[0]) + 1 for text in TEXTS)


@pytest.mark.parametrize(("chunk", "order"), [(1, 1), (7, -1)])
def test_batches_order_and_reruns_do_not_change_the_files(product, tmp_path, chunk, order):
    """Keys and names depend on how the partitions' files were split, but no byte of a data file does."""
    def contents(manifest):
        return [(file["format"], file["split"], file["rows"], file["hash"]) for file in manifest["files"]]

    settings = {"validation_fraction": 0.2, "shard_bytes": 900, "chunk": chunk}
    manifest = written(tmp_path, order=order, **settings)[1]
    assert contents(manifest) == contents(product[1])
    before = {path: path.read_bytes() for path in (tmp_path / "out/dataset").rglob("*.*")}
    assert written(tmp_path, **settings)[1] == manifest
    assert {path: path.read_bytes() for path in (tmp_path / "out/dataset").rglob("*.*")} == before


def test_a_removed_format_is_deleted_after_the_commit(tmp_path):
    written(tmp_path, ["parquet", "mds"], tokenize=False)
    folder = tmp_path / "out/dataset"
    before = set(folder.rglob("*.parquet"))
    killed = patch.object(write.card, "render", side_effect=KeyError("killed before the commit"))
    with killed, pytest.raises(KeyError):
        written(tmp_path, ["jsonl"], tokenize=False)
    assert set(folder.rglob("*.parquet")) == before, "the manifest still names them"
    written(tmp_path, ["jsonl"], tokenize=False)
    assert {path.suffix for path in folder.rglob("*.*")} == {".zst", ".md", ".json"}
    assert len(list(folder.rglob("*.zst"))) == PARTITIONS


def test_an_unfinished_file_does_not_appear(tmp_path):
    full = patch.object(formats.ParquetFile, "close", side_effect=KeyError("the disk is full"))
    with full, pytest.raises(KeyError):
        written(tmp_path, ["parquet"], tokenize=False)
    assert not [path for path in (tmp_path / "out/dataset").rglob("*") if path.is_file()]


def test_the_card_describes_the_product(product):
    text = (product[0] / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "pretty_name": "books", "language": ["de", "en"], "license": ["cc-by-4.0", "other"],
        "task_categories": ["text-generation"], "size_categories": ["n<1K"],
        "configs": [{"config_name": "default", "data_files": [
            {"split": "train", "path": "data/train-*.parquet"},
            {"split": "validation", "path": "data/validation-*.parquet"}]}]}
    for line in ("| de\\-DE | 20 |", "| \\(not stated\\) | 20 |", "&lt;script&gt;", "| s\\|\\[x\\]\\(y\\) | 60 |"):
        assert line in body
    assert "<script>" not in body
    recipe = "\n".join(line[4:] for line in body.split("## Recipe")[1].split("## Integrity")[0].splitlines())
    config = build(PipelineConfig, yaml.safe_load(recipe))
    assert config.recipe_hash() == product[1]["recipe_hash"]


@pytest.mark.parametrize(("names", "told"), [
    (["MIT"], "mit"), (["apache-2.0", "Apache 2.0"], "apache-2.0"), (["mine"], "other"), (["(not stated)"], "unknown")])
def test_licences_get_the_names_of_the_hub(names, told):
    manifest = {"name": "x", "licenses": {name: [1, 1] for name in names}, "languages": {}, "documents": 1,
                "splits": {}, "formats": []}
    assert card.header(manifest)["license"] == told


def test_croissant_describes_the_product(product):
    value = json.loads((product[0] / "croissant.json").read_text())
    assert value["conformsTo"] == "http://mlcommons.org/croissant/1.0"
    objects = {entry["@id"]: entry for entry in value["distribution"] if entry["@type"] == "cr:FileObject"}
    assert {name: entry["sha256"] for name, entry in objects.items()} == {
        file["name"]: file["sha256"] for file in product[1]["files"]}
    assert {entry["@id"] for entry in value["recordSet"]} == set(write.SPLITS)


def test_a_pipeline_that_ends_with_a_filter_writes_a_product(tmp_path):
    """All stages run in this process: product, summary and report; a second run reuses every unit."""
    (tmp_path / "in").mkdir()
    lines = ["id,text,language", *(f'{number},"{text}",en' for number, text in enumerate(["good words here"] * 2 + [
        f"other words, number {number}" for number in range(20)])), '99,"never closed']
    (tmp_path / "in/a.csv").write_text("\n".join(lines))
    config = build(PipelineConfig, {"read": {"paths": ["*.csv"]}, "max_bad_fraction": 0.1, "steps": ["dedup_exact"]})
    results = []
    for seed in range(2):
        with without_ray(seed):
            results.append(pipeline.run(config, input=str(tmp_path / "in"), output=str(tmp_path / "out")))
    folder = tmp_path / "out/dataset"
    assert sorted(pq.read_table(folder / "data")["id"].to_pylist(), key=int) == [
        str(number) for number in range(22) if number != 1]
    assert results[0].documents == results[1].documents == 21
    assert results[1].stage("write")["units_reused"] == 4
    assert results[0].value["dataset"]["languages"] == {"en": [21, results[0].value["dataset"]["bytes"]]}
    assert "| dedup_exact | 22 | 21 | exact\\_duplicate 1 | 0 | 0 |" in (folder / "README.md").read_text()
    assert not (tmp_path / "out/shards").exists()
    page = store(tmp_path / "out").read(write_pipeline_report(str(tmp_path / "out")).rpartition("/")[2]).decode()
    assert "Data set" in page
    assert "Packed sequences" not in page
    stages = pipeline_plan.plan(config, input=str(tmp_path / "in"), output=str(tmp_path / "out")).stages
    assert [stage.name for stage in stages] == ["ingest", "partition", "dedup_exact", "write"]
    assert [stage.published for stage in stages] == [1, 4, 4, 4]


def run(folder, output, *steps, may_replace=False):
    config = build(PipelineConfig, {"partitions": 2, "read": {"paths": ["*"]}, "steps": list(steps)})
    with without_ray(0):
        return pipeline.run(config, input=str(folder / "in"), output=str(folder / output), may_replace=may_replace)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
def test_products_are_compared_and_cleaned(tmp_path, kind):
    (tmp_path / "in").mkdir()
    texts = ["the same text"] * 3 + [f"text {number}" for number in range(9)]
    (tmp_path / "in/a.jsonl").write_text("\n".join(
        json.dumps({"id": f"d{number}", "text": text}) for number, text in enumerate(texts)))
    run(tmp_path, "a", {"write": {"formats": [kind]}})
    run(tmp_path, "b", "dedup_exact", {"write": {"formats": [kind]}})
    result = compare(str(tmp_path / "a"), str(tmp_path / "b"))
    assert (result.both, result.lost.count, result.gained.count) == (10, 2, 0)
    assert dict(result.lost.reasons) == {"dedup_exact: exact_duplicate": 2}
    with pytest.raises(ConfigError, match="would be replaced"):
        run(tmp_path, "b", {"write": {"formats": ["mds"]}})
    run(tmp_path, "b", {"write": {"formats": ["mds"]}}, may_replace=True)
    left = clean(str(tmp_path / "b"))
    assert {folder.folder for folder in left} >= {"stages"}
    assert not find(str(tmp_path / "b"))
    manifest = json.loads((tmp_path / "b/dataset/manifest.json").read_text())
    assert {path.relative_to(tmp_path / "b/dataset").as_posix() for path in (tmp_path / "b/dataset").rglob("*.*")
            if path.is_file()} == {"manifest.json", *manifest["others"], *(file["name"] for file in manifest["files"])}
    with pytest.raises(InputError, match=r"write\.formats"):
        compare(str(tmp_path / "a"), str(tmp_path / "b"))


def test_manifests_of_an_earlier_recipe_are_removed(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text("\n".join(json.dumps({"text": f"text {number} " * 9}) for number in range(40)))
    tokenize = {"tokenize": {"train": {"vocabulary_size": 300}}}
    made = run(tmp_path, "out", tokenize, {"pack": {"sequence_length": 16}}, "write")
    assert made.tokens > 0
    assert made.stage("write")["documents_out"] == made.stage("pack")["documents_out"] == 40
    assert (tmp_path / "out/dataset/manifest.json").exists()
    run(tmp_path, "out", may_replace=True)
    assert (tmp_path / "out/dataset/manifest.json").exists()
    assert not (tmp_path / "out/shards/manifest.json").exists()
    assert {"shards", "validation"} <= {folder.folder for folder in clean(str(tmp_path / "out"))}
    run(tmp_path, "out", tokenize, {"pack": {"sequence_length": 16}}, may_replace=True)
    assert not (tmp_path / "out/dataset/manifest.json").exists()
    assert {"dataset"} <= {folder.folder for folder in clean(str(tmp_path / "out"))}
    assert verify(str(tmp_path / "out/shards")) == []
