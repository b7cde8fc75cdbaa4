"""Search of a near-duplicate index against brute force and datasketch; invalid indexes and files are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasketch import MinHash

import tidewheel as tw
from tests.plain_execution import without_ray
from tidewheel.cli import run_command
from tidewheel.cluster.s3_server import S3Server
from tidewheel.config import build
from tidewheel.data import similar
from tidewheel.data.config import PipelineConfig
from tidewheel.data.dedup import minhash
from tidewheel.data.stages import dedup_near, ingest, near_index, partition
from tidewheel.data.stages.execute import Runner
from tidewheel.data.stages.resolve import resolve
from tidewheel.errors import ConfigError, InputError, StorageError
from tidewheel.storage import store

SHORT = ["Hello there", "hello, THERE!", "1 2 3 4 5 6"]


def texts(seed: int, families: int = 8) -> list[str]:
    """Families of copies; each copy is edited further than the one before."""
    generator = random.Random(seed)
    results = []
    for _ in range(families):
        words = ["".join(generator.choices("abcdefghij", k=5)) for _ in range(generator.randint(40, 90))]
        for _ in range(4):
            results.append(" ".join(words))
            words[generator.randrange(len(words))] = "edited"
    return results


def write_index(folder: Path, documents: list[str], **near: object) -> str:
    """URI of the index of a pipeline over documents whose ids are their numbers."""
    (folder / "in").mkdir(parents=True)
    rows = [json.dumps({"id": f"d{number}", "text": text}) for number, text in enumerate(documents)]
    (folder / "in" / "a.jsonl").write_text("\n".join(rows))
    config = build(PipelineConfig, {"partitions": 3, "read": {"paths": ["*.jsonl"]}, "steps": [
        {"dedup_near": {"write_index": True, **near}}, {"tokenize": {"train": {}}}, "pack"]})
    job = resolve(config, input=str(folder / "in"), output=str(folder / "out"))
    runner = Runner(job.output)
    with without_ray():
        _, parts = partition.run(job, runner, ingest.run(job, runner).units)
        done, _ = dedup_near.run(job, runner, parts)
    near_index.commit(job, [unit for unit in done.units if unit.unit.stage == near_index.STAGE])
    return str(folder / "out" / "near_index")


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return [*texts(1), *SHORT]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> str:
    return write_index(tmp_path_factory.mktemp("index"), documents)


def sketch(text: str, *, ngram: int, count: int, seed: int, unit: minhash.Unit) -> MinHash:
    """Return datasketch's MinHash of the shingles of a text."""
    made = MinHash(num_perm=count, seed=seed, scheme="affine32", hashfunc=int)
    for value in minhash.shingle_hashes([text], ngram=ngram, unit=unit)[0].tolist():
        made.update(value)
    return made


@pytest.mark.parametrize("near", [
    {}, {"unit": "characters", "ngram": 9, "bands": 20, "rows": 3, "permutations": 64, "seed": 7, "doubt": 0}])
def test_matches_equal_those_of_datasketch(tmp_path, documents, near):
    opened = tw.SimilarityIndex(write_index(tmp_path, documents, **near))
    step = opened.settings
    settings = {"ngram": step.ngram, "count": step.num_permutations, "seed": step.seed, "unit": step.unit}
    assert len(opened) == len(documents)
    own = {f"d{number}": sketch(text, **settings) for number, text in enumerate(documents)}
    long = {name: made for name, made in own.items() if not made.is_empty()}
    assert len(long) >= 32
    for name, made in opened.minhashes():
        if name in long:
            assert made == long[name]
    queries = [text.replace("a", "b", 2) for text in documents[:32]]
    result = opened.similar(queries, min_jaccard=0.4, limit=100)
    matched = 0
    for text, matches in zip(queries, result, strict=True):
        query = sketch(text, **settings)
        assert query == opened.minhash(text)
        expected = {name: query.jaccard(made) for name, made in long.items() if query.jaccard(made) >= 0.4}
        assert {match.id: match.similarity for match in matches} == expected
        assert [match.similarity for match in matches] == sorted(expected.values(), reverse=True)
        matched += len(matches)
    assert matched > 32


def test_estimates_are_close_to_the_exact_jaccard_similarity(index, documents):
    sets = minhash.shingle_sets(documents)
    errors = []
    for number, matches in enumerate(tw.SimilarityIndex(index).similar(documents[:32], min_jaccard=0.3, limit=100)):
        exact = {f"d{other}": minhash.exact_jaccard(sets[number], sets[other]) for other in range(32)}
        errors += [match.similarity - exact[match.id] for match in matches]
        assert {match.id for match in matches} >= {name for name, value in exact.items() if value > 0.55}
    assert len(errors) > 100
    assert np.max(np.abs(errors)) < 5 * 0.5 / np.sqrt(112)


def test_matches_are_limited_ordered_and_include_dropped_documents(index, documents):
    opened = tw.SimilarityIndex(index)
    every = opened.similar([documents[0]], min_jaccard=0.2, limit=100)[0]
    assert every[0] == similar.Match("d0", 1.0, every[0].kept)
    assert {match.id for match in every} == {"d0", "d1", "d2", "d3"}
    assert {match.kept for match in every} == {True, False}
    assert opened.similar([documents[0]], min_jaccard=0.2, limit=2)[0] == every[:2]
    assert opened.similar([documents[0]])[0] == [match for match in every if match.similarity >= 0.72]
    assert opened.similar([]) == []
    assert opened.similar(["nothing of this kind is in the index at all"]) == [[]]


def test_texts_without_shingles_match_only_equal_texts(index):
    result = tw.SimilarityIndex(index).similar(["HELLO there", "hello you", "1-2-3 4 5 6", "1 2 3 4 5 7"])
    assert [{match.id for match in matches} for matches in result] == [{"d32", "d33"}, set(), {"d34"}, set()]


def test_the_datasketch_lsh_finds_documents_of_the_index(index, documents):
    opened = tw.SimilarityIndex(index)
    lsh = opened.lsh()
    assert (lsh.b, lsh.r) == (14, 8)
    for text in documents[:32:5]:
        candidates = set(lsh.query(opened.minhash(text)))
        alike = {match.id for match in opened.similar([text], min_jaccard=0.9, limit=100)[0]}
        assert alike
        assert alike <= candidates


def test_lsh_refuses_an_index_with_one_band(tmp_path, documents):
    opened = tw.SimilarityIndex(write_index(tmp_path, documents, bands=1, rows=8))
    with pytest.raises(InputError, match="one band"):
        opened.lsh()


def test_equal_values_match_brute_force(monkeypatch, index, documents):
    generator = np.random.default_rng(3)
    for a, b, places in ((5, 9, 6), (1, 1, 1), (0, 4, 3), (4, 0, 3)):
        left, right = (generator.integers(0, 3, (count, places)).astype(np.uint32) for count in (a, b))
        expected = (left[:, None] == right[None]).sum(axis=2)
        assert similar.equal_values(left, right).tolist() == expected.tolist()
    once = tw.SimilarityIndex(index).similar(documents, min_jaccard=0.2)
    monkeypatch.setattr(similar, "_QUERIES_AT_ONCE", 3)
    assert tw.SimilarityIndex(index).similar(documents, min_jaccard=0.2) == once


def test_files_of_several_formats_are_signed(tmp_path, monkeypatch, index, documents):
    opened = tw.SimilarityIndex(index)
    rows = [{"id": f"q{number}", "text": text} for number, text in enumerate(documents)]
    broken = ["{", json.dumps({"id": "none"})]
    (tmp_path / "a.jsonl").write_text("\n".join([*broken, *map(json.dumps, rows)]))
    pq.write_table(pa.Table.from_pylist([{"key": row["id"], "body": row["text"]} for row in rows]),
                   tmp_path / "a.parquet")
    (tmp_path / "one.txt").write_text(documents[4])
    monkeypatch.setattr(similar, "_TEXTS", 4)  # read in many pieces
    lines = opened.sign_file(str(tmp_path / "a.jsonl"))
    table = opened.sign_file(str(tmp_path / "a.parquet"), text="body", id="key")
    one = opened.sign_file(str(tmp_path / "one.txt"))
    assert lines.ids == table.ids == [row["id"] for row in rows]
    assert lines.lines[0] == 3
    assert table.lines[0] == 1
    assert lines.unusable == {"invalid_json": 1, "missing_text": 1}
    expected = opened.signatures(documents)
    np.testing.assert_array_equal(lines.signatures, expected)
    np.testing.assert_array_equal(table.signatures, expected)
    np.testing.assert_array_equal(one.signatures, expected[4:5])


def test_unusable_files_raise(tmp_path, index):
    opened = tw.SimilarityIndex(index)
    with pytest.raises(InputError, match="no such file"):
        opened.sign_file(str(tmp_path / "none.jsonl"))
    (tmp_path / "body.jsonl").write_text('{"body": "a text"}\n{"body": "another"}\n')
    with pytest.raises(InputError, match=r"none of 2 records .* missing_text, no field 'text'; there are: 'body'"):
        opened.sign_file(str(tmp_path / "body.jsonl"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match="the file cannot be read"):
        opened.sign_file(str(tmp_path / "a.parquet"))
    pq.write_table(pa.table({"body": ["a text"]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match="text"):
        opened.sign_file(str(tmp_path / "b.parquet"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError):
        opened.sign_file(str(tmp_path / "empty.jsonl"))
    for wrong in ({"min_jaccard": 0.0}, {"min_jaccard": 1.5}, {"min_jaccard": float("nan")}, {"limit": 0}):
        with pytest.raises(ConfigError):
            opened.similar(["a"], **wrong)


@pytest.mark.parametrize(("change", "told"), [
    ({"signatures": "words-0/affine32-1"}, "version 'words-0/affine32-1'"),
    ({"ngram": -1}, "invalid for dedup_near"), ({"seed": None}, "invalid for dedup_near"),
    ({"permutations": 256}, "signatures are"), ({"format": 99}, "reads"),
    ({"unit": ...}, "no parameter unit")])
def test_an_incompatible_index_is_refused(tmp_path, documents, change, told):
    uri = write_index(tmp_path, documents[:4])
    path = Path(uri, "manifest.json")
    manifest = json.loads(path.read_text())
    for name, value in change.items():
        if name == "format":
            manifest["version"] = value
        elif value is ...:
            del manifest["parameters"][name]
        else:
            manifest["parameters"][name] = value
    path.write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=told) as error:
        tw.SimilarityIndex(uri).similar(documents[:1])
    assert error.value.fix
    assert uri in error.value.where


def test_missing_or_damaged_index_files_raise(tmp_path, documents):
    uri = write_index(tmp_path, documents)
    opened = tw.SimilarityIndex(uri)
    path = sorted(Path(uri).glob("*.arrow"))[0]
    content = path.read_bytes()
    for damaged in (content[:-200], content[:-300] + bytes([content[-300] ^ 1]) + content[-299:], b"no Arrow file"):
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match="not what was written"):
            opened.similar(documents[:1])
    path.unlink()
    with pytest.raises(InputError, match="is missing"):
        opened.similar(documents[:1])


def test_an_index_on_an_object_store_is_searched(index, documents):
    with S3Server() as server:
        server.create_bucket("dumps")
        for path in Path(index).iterdir():
            store("s3://dumps/clean/near_index").write(path.name, path.read_bytes())
        store("s3://dumps/new").write("a.jsonl", json.dumps({"id": "mine", "text": documents[0]}).encode())
        opened = tw.SimilarityIndex("s3://dumps/clean/near_index")
        signed = opened.sign_file("s3://dumps/new/a.jsonl")
        assert opened.nearest(signed.signatures) == tw.SimilarityIndex(index).similar(documents[:1])
        with pytest.raises(InputError, match="no index"):
            tw.SimilarityIndex("s3://dumps/clean")


def test_the_command_prints_matches_as_a_table_and_as_json(tmp_path, capsys, index, documents):
    rows = [{"text": documents[0], "id": "mine"}, {"text": "something else altogether, like nothing there", "id": "o"}]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + '\n{"id": "broken"}\n')
    assert run_command(["data", "similar", index, str(file), "--limit", "2"]) == 0
    out, err = capsys.readouterr()
    best = tw.SimilarityIndex(index).similar([documents[0]], limit=2)[0]
    table = [line.split() for line in out.splitlines()[:-1]]
    assert table[0] == ["document", "line", "like", "similarity", "kept"]
    assert table[1:] == [["mine", "1", match.id, f"{match.similarity:.4f}", "yes" if match.kept else "no"]
                         for match in best]
    assert out.splitlines()[-1] == ("1 of 2 documents are like one of the 35 in the index "
                                    "(similarity 0.72 or more)")
    assert "records left out: missing_text 1" in err
    assert run_command(["data", "similar", index, str(file), "--json", "--min-jaccard", "0.3"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["min_jaccard"] == 0.3
    assert result["unusable"] == {"missing_text": 1}
    assert [document["id"] for document in result["documents"]] == ["mine", "o"]
    assert result["documents"][0]["matches"][0]["similarity"] == 1.0
    assert result["documents"][1] == {"id": "o", "line": 2, "matches": []}


def test_the_command_says_what_to_fix(tmp_path, capsys, index):
    for command in ([str(tmp_path), "a.jsonl"], [index, str(tmp_path / "none.jsonl")]):
        assert run_command(["data", "similar", *command]) == 2
        assert "fix:" in capsys.readouterr().err
