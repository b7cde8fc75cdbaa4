"""What each part makes of a fixed input, as one hash: the promise that a part's version stands for.

The hash is of content, not of bytes: another release of pyarrow or zstd may pack the same rows differently.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
from backports import zstd

from tests.plain_execution import without_ray
from tidewheel.config import Config, build
from tidewheel.data import pipeline, readers, url
from tidewheel.data.config import PipelineConfig, ReadConfig, Step
from tidewheel.data.reader import READERS
from tidewheel.data.readers import code
from tidewheel.data.stage import UNIT_FILES, Published, unit_key
from tidewheel.data.stages import (
    decontaminate,
    dedup_exact,
    dedup_lines,
    dedup_near,
    dedup_url,
    filters,
    ingest,
    near_edges,
    near_exact,
    near_index,
    near_rounds,
    pack,
    partition,
    row_local,
    tokenizer,
    write,
)
from tidewheel.rewards import KIND as REWARDS
from tidewheel.rewards.scoring.base import Sample
from tidewheel.storage import content_hash, store
from tidewheel.versions import Version

RECORDED = Path(__file__).with_name("outputs.json")
WORDS = ("the", "river", "of", "time", "and", "history", "that", "measured", "what", "because", "it", "was", "to", "be",
         "with", "have", "theorem", "harbour", "winter", "committee", "water", "stone", "light", "paper", "number",
         "letter", "garden", "Café", "naïve", "straße")
STAGES = {
    "ingest": ingest.VERSION, "partition": partition.VERSION.using(url.VERSION), "filter_2": row_local.VERSION,
    "dedup_url": dedup_url.VERSION, "dedup_exact": dedup_exact.VERSION, "dedup_lines": dedup_lines.VERSION,
    "near_index": near_index.VERSION, "dedup_near_edges": near_edges.VERSION, "dedup_near_exact": near_exact.VERSION,
    "dedup_near_round": near_rounds.VERSION, "dedup_near": dedup_near.VERSION,
    "decontaminate_index": decontaminate.INDEX_VERSION, "decontaminate": decontaminate.VERSION,
    "decontaminate_packed": decontaminate.VERSION, "tokenizer": tokenizer.VERSION, "pack": pack.VERSION,
    "write": write.MEGATRON_VERSION,
}
"""Version of the part that makes each stage's units. Rounds are numbered, and count together."""
FILTERS: dict[str, dict[str, Any]] = {
    "urls": {"domains": ["bad.example"], "words": ["casino"]}, "gopher_repetition": {}, "gopher_quality": {},
    "c4": {}, "fineweb": {}, "refinedweb": {}, "words": {"words": ["harbour", "winter stone"]}, "pii": {},
}
REWARD_SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "exact_match": ({}, {"unicode": "NFKC", "ignore_case": True, "ignore_punctuation": True, "ignore_articles": True},
                    {"after": "####", "collapse_spaces": False, "unicode": "none"}),
    "gsm8k": ({}, {"last_number": True}, {"marker": "Answer:"}),
    "regex": ({"pattern": "[0-9]+"}, {"pattern": "(?s)####\\s*(?P<answer>.*)"}),
    "json_object": ({}, {"required": {"a": "integer"}, "extra_keys": False, "fenced": True, "max_depth": 2}),
    "json_schema": ({"definition": {}}, {"definition": {"type": "object", "required": ["a"]}, "fenced": True,
                                         "max_depth": 2}),
    "arithmetic": ({}, {"after": "####", "tolerance": 1000.0, "numbers": False}),
    "python_tests": ({}, {"partial": True, "seconds": 1}),
}
"""Settings under which each reward judges; the last ones are in its key."""


@dataclass(frozen=True)
class Outcome:
    """What a case gives.

    Args:
        versions: of the parts that the output follows from.
        settings: all settings of the parts, defaults included: a default belongs to the promise.
        output: hash of the content.
        key: that a unit with these settings has, which nothing else may change.
    """

    versions: dict[str, int]
    settings: Any
    output: str
    key: str = ""


def documents(count: int = 240) -> list[dict[str, Any]]:
    """Return documents with what the parts look for: duplicates of all kinds, boilerplate, addresses, bad lines."""
    chance = random.Random(7)
    results: list[dict[str, Any]] = []
    for number in range(count):
        sentences = [" ".join(chance.choice(WORDS) for _ in range(chance.randrange(6, 22))).capitalize() + "."
                     for _ in range(chance.randrange(3, 14))]
        lines = [" ".join(sentences[place:place + 3]) for place in range(0, len(sentences), 3)]
        if number % 5 == 0:
            lines.append("Read our cookie policy, and accept all of it before you go on reading here.")
        if number % 7 == 0:
            lines += ["SHARE THIS", "Mail someone@example.org or ask 8.8.8.8", "12 likes", "a { b }"]
        text = "\n".join(lines)
        if number % 11 == 10:
            text = results[-1]["text"]
        elif number % 13 == 12:
            text = results[-2]["text"] + " One more sentence stands here."
        url = f"http://{'bad' if number % 29 == 0 else 'www'}.example/{number // 2 if number % 17 == 0 else number}"
        results.append({"id": f"d{number:04d}", "text": text, "url": url, "source": f"s{number % 3}"})
    return results


def pipeline_cases() -> dict[str, Outcome]:
    """Run one recipe with every step, in this process; return the outcome of each stage."""
    config = build(PipelineConfig, {
        "partitions": 3, "read": {"paths": ["corpus/*.jsonl"], "source": "source"}, "steps": [
            {"filter": {"gopher_quality": {"min_words": 20, "min_stop_words": 1}}}, "dedup_url", "dedup_exact",
            {"dedup_near": {"write_index": True}}, {"dedup_lines": {"max_repeats": 2}},
            {"filter": {"refinedweb": {}, "pii": {}}}, {"decontaminate": {"evals": ["evals/*.jsonl"], "action": "cut"}},
            {"tokenize": {"train": {"vocabulary_size": 400}}}, {"pack": {"sequence_length": 64}},
            {"write": {"formats": ["parquet", "jsonl", "arrow", "mds", "megatron"]}}]})
    with tempfile.TemporaryDirectory(prefix="tw-golden-") as folder:
        root = Path(folder)
        corpus = documents()
        _lines(root / "in/corpus/a.jsonl", corpus[:150])
        _lines(root / "in/corpus/b.jsonl", [*corpus[150:], {"no": "text"}])
        _lines(root / "in/evals/quiz.jsonl", [{"question": doc["text"][:400], "answer": "yes"} for doc in corpus[:3]])
        with without_ray(), patch.object(near_rounds, "FEW_EDGES", 0):
            pipeline.run(config, input=str(root / "in"), output=str(root / "out"))
        output = store(str(root / "out"))
        contents: dict[str, list[str]] = {}
        for stamp in output.list("stages"):
            if "/units/" in stamp.key and stamp.key.endswith(".json") and stamp.key.count("/") == 3:
                unit = Published.from_json(output.read(stamp.key))
                stage = re.sub(r"_round_\d+$", "_round", unit.unit.stage)
                contents.setdefault(stage, []).extend(
                    f"{unit.unit.stage} {unit.unit.number} {name} {_content(output.read(file.key))}"
                    for name, file in unit.files.items())
    return {f"stage {stage}": _outcome(STAGES[stage], config, sorted(lines))
            for stage, lines in contents.items() if stage in STAGES}


def filter_case(name: str) -> Outcome:
    """Apply one filter to the documents."""
    step = build(Step, {"filter": {name: FILTERS[name]}}).filter
    assert step is not None
    docs = documents()
    table = pa.table({"id": [doc["id"] for doc in docs], "text": pa.array([doc["text"] for doc in docs],
                      pa.large_string()), "source": [doc["source"] for doc in docs],
                      "meta": [json.dumps({"url": doc["url"]}) for doc in docs]})
    judged = filters.judge(step.filters, table)
    statistics = {key: [round(value, 9) for value in values.tolist()] for key, values in judged.statistics.items()}
    (version,) = filters.versions(step.filters)
    return _outcome(version, step, [judged.reasons.tolist(), judged.texts.to_pylist(), statistics])


def url_case() -> Outcome:
    """Bring URLs into the form in which they are compared."""
    addresses = ["HTTPS://user@WWW.Example.com:443/%7ea/%c3//?b=1&utm_source=x&%66bclid=y#part",
                 "http://a.example/#!/x y", "http://a.example:8080/100%/a b?q=1 2", "http://www.www.a.example./",
                 "http://BÜCHER.example/ü",
                 "http://[2001:DB8::1]:8080/", "http://a b.example/", "ftp://a.example:21/a", "no url"]
    return _outcome(url.VERSION, ReadConfig(paths=("*",)), [url.normalised(address) for address in addresses])


def reader_case(kind: str) -> Outcome:
    """Read one file of a format."""
    docs = [{**doc, "text": doc["text"].replace("\n", " ")} for doc in documents(40)]
    with tempfile.TemporaryDirectory(prefix="tw-golden-") as folder:
        name = f"file.{'txt' if kind == 'text' else kind}"
        (Path(folder) / name).write_bytes(_file(kind, docs))
        config = ReadConfig(paths=(name,))
        folder_store = store(folder)
        shape = readers.shape_of(folder_store, name, config)
        assert shape.format == kind, shape
        records = [repr(record) for record in readers.read_records(folder_store, name, config, shape=shape)]
    return _outcome(READERS.find(kind).VERSION, config, records)


def code_case() -> Outcome:
    """Read a small source tree, of which some files are left out."""
    files = {"a.py": "def f():\n    return 1\n", "lib/b.rs": "fn main() {}\n", "c.unknown": "?", "empty.py": "",
             "vendor/d.py": "x = 1\n", "g.py": "# Code generated by a tool. DO NOT EDIT.\nx = 1\n", "e.bin.py": "\0\0"}
    config = ReadConfig(paths=("**",), format="code")
    with tempfile.TemporaryDirectory(prefix="tw-golden-") as folder:
        folder_store = store(folder)
        for name, text in files.items():
            folder_store.write(name, text.encode())
        names = [(name, name) for name in sorted(files)]
        records = [repr(record) for record in code.records(folder_store, names, config)]
        by_name = {name: code.reason_by_name(name, len(text), config.code) for name, text in files.items()}
    return _outcome(READERS.find("code").VERSION, config, [records, by_name])


def reward_case(name: str) -> Outcome:
    """Judge answers of all kinds with one reward."""
    answers = ("#### 42", "#### 1,042.50 dollars\n", "####-7", "the Caf\u00e9!", "cafe\u0301", "\uff34he 42.",
               "Answer: 42", '{"a": 1}',
               '```json\n{"a": 1}\n```', '{"a": [[1]]}', '{"a": 1.0, "b": NaN}', "", "x" * 5001, "\ud800")
    references = ("42", "so\n#### 1042.5", "-7", "Caf\u00e9", None, " ")
    batch = [Sample("", answer, reference) for answer in answers for reference in references]
    rewards = [REWARDS.build(name, {"max_characters": 5000, **chosen}) for chosen in REWARD_SETTINGS[name]]
    judged = [reward.judge(batch) for reward in rewards]
    version = rewards[-1].VERSION
    assert version is not None
    return _outcome(version, rewards[-1], [[list(map(str, scores.values)), {
        index: failure.reason for index, failure in scores.failures.items()}] for scores in judged])


def _file(kind: str, docs: list[dict[str, Any]]) -> bytes:
    table = pa.Table.from_pylist(docs)
    sink = io.BytesIO()
    if kind == "text":
        return docs[0]["text"].encode()
    if kind in ("csv", "tsv"):
        between = "," if kind == "csv" else "\t"
        rows = [list(docs[0]), *([str(value) for value in doc.values()] for doc in docs)]
        return "\n".join(between.join(f'"{value}"' for value in row) for row in rows).encode()
    if kind == "json":
        return json.dumps(docs).encode()
    if kind == "parquet":
        pq.write_table(table, sink)
    elif kind == "arrow":
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        lines = [json.dumps(doc) for doc in docs]
        return "\n".join([*lines, "{broken", '{"id": "x"}']).encode()
    return sink.getvalue()


CASES: dict[str, Callable[[], Outcome]] = {
    **{f"filter {name}": lambda name=name: filter_case(name) for name in FILTERS},  # type: ignore[misc]
    **{f"read {kind}": lambda kind=kind: reader_case(kind)  # type: ignore[misc]
       for kind in ("jsonl", "json", "csv", "tsv", "text", "parquet", "arrow")},
    **{f"reward {name}": lambda name=name: reward_case(name) for name in REWARD_SETTINGS},  # type: ignore[misc]
    "read code": code_case, "normal url": url_case,
}


def outcomes() -> Iterator[tuple[str, Outcome]]:
    """Run everything; yield (case, outcome)."""
    yield from pipeline_cases().items()
    for name, case in CASES.items():
        yield name, case()


def _outcome(version: Version, settings: Config, output: Any) -> Outcome:
    key = unit_key("golden", settings=settings.decisive(), version=version, inputs=["input"])
    return Outcome(version.using(UNIT_FILES).numbers(), settings.canonical(), _hash(output), key)


def _lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _content(data: bytes) -> str:
    """Return the hash of what a file holds."""
    if data.startswith(b"PAR1"):
        return _hash(pq.read_table(io.BytesIO(data)).to_pylist())
    if data.startswith(b"\xff\xff\xff\xff"):
        return _hash(pa.ipc.open_stream(data).read_all().to_pylist())
    if data.startswith(b"ARROW1"):
        return _hash(pa.ipc.open_file(data).read_all().to_pylist())
    if data.startswith(b"\x28\xb5\x2f\xfd"):
        return content_hash(zstd.decompress(data))
    if data.startswith(b"\x1f\x8b"):
        return content_hash(gzip.decompress(data))
    return content_hash(data)


def _hash(value: Any) -> str:
    return content_hash(json.dumps(value, sort_keys=True, default=repr).encode()).removeprefix("blake3-")[:32]
