"""The pack stage with every tokenizer, policy and method: sets verify, and documents can be decoded completely."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pyarrow as pa
import pytest

from tests.unit.data.tokenize.test_chat import CHATML, SPECIAL
from tests.unit.shards.test_tokenizer import TEXTS, files
from tidewheel.config import build
from tidewheel.data.config import PipelineConfig
from tidewheel.data.document import DOCUMENT_SCHEMA
from tidewheel.data.stage import Published, write_ipc
from tidewheel.data.stages import pack
from tidewheel.data.stages.partition import Part
from tidewheel.data.stages.resolve import resolve
from tidewheel.data.tokenize.tokenizer import train_bpe
from tidewheel.errors import InputError
from tidewheel.shards.reader import ShardSet
from tidewheel.shards.tokenizer import of_manifest
from tidewheel.shards.verify import inspect, verify
from tidewheel.storage import store

__all__ = ["files"]
NAMES = {"huggingface": "tokenizer.json", "sentencepiece": "tokenizer.model", "tiktoken": "tokenizer.tiktoken"}


def packed(folder: Path, tokenizer: dict, settings: dict, *, kind: str = "documents", metas: list[str] | None = None,
           texts: list[str] = TEXTS) -> list[Published]:
    """Publish the units of two partitions below `folder`/out."""
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in" / "a.jsonl").write_text("{}\n")
    config = build(PipelineConfig, {"partitions": 2, "read": {"paths": ["a.jsonl"], "kind": kind}, "steps": [
        {"tokenize": tokenizer}, {"pack": {"sequence_length": 32, "validation_fraction": 0.2, **settings}}]})
    job = resolve(config, input=str(folder / "in"), output=str(folder / "out"))
    parts = []
    for number in range(2):
        own = texts[number::2]
        table = pa.table([[f"d{number + 2 * place:03d}" for place in range(len(own))], own, ["s"] * len(own),
                          (metas or ["{}"] * len(texts))[number::2]], schema=DOCUMENT_SCHEMA)
        with job.store.writer(f"part-{number}") as sink:
            write_ipc(sink, table)
        parts.append(Part(number, sink.stamp, sink.stamp, (), len(own)))
    stamp = job.store.write("tokenizer", job.tokenizer)
    units = [pack.pack_part(task) for task in pack.tasks(job, parts, stamp)]
    pack.commit(job, units, job.tokenizer, ())
    return units


def documents(uri: str) -> dict[str, list[int]]:
    """Return the tokens of every document of a set, with its pieces joined."""
    shard_set = ShardSet.open(uri)
    results: dict[str, dict[int, list[int]]] = {}
    for index in range(len(shard_set.manifest.shards)):
        for row in shard_set.shard(index).batch.to_pylist():
            bounds = itertools.pairwise([*row["segment_starts"], row["length"]])
            for (begin, end), name, offset in zip(bounds, row["document_ids"], row["document_offsets"], strict=True):
                results.setdefault(name, {})[offset] = row["tokens"][begin:end]
    return {name: [token for offset in sorted(own) for token in own[offset]] for name, own in results.items()}


@pytest.mark.parametrize("name", list(NAMES))
@pytest.mark.parametrize(("bos", "eos", "method"), [
    ("none", "document", "best_fit"), ("document", "none", "concatenate"), ("document", "document", "best_fit")])
def test_tokens_are_kept_for_every_policy_and_method(files, tmp_path, name, bos, eos, method):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / NAMES[name]).write_bytes(files[name])
    tokenizer = {"file": NAMES[name], "bos": bos, "eos": eos, "vocabulary_multiple": 64}
    if name == "tiktoken":
        tokenizer |= {"encoding": "cl100k_base", "bos_token": "<|fim_prefix|>"}
    packed(tmp_path, tokenizer, {"method": method, "window": 7})
    whole: dict[str, list[int]] = {}
    for part in pack.SETS:
        uri = str(tmp_path / "out" / part)
        assert verify(uri) == []
        result = documents(uri)
        encoder = of_manifest(store(uri), ShardSet.open(uri).manifest.tokenizer)
        assert encoder.format == name
        assert ShardSet.open(uri).manifest.vocabulary_size % 64 == 0
        for tokens in result.values():
            assert (tokens[0] == encoder.bos) == (bos == "document")
            assert (tokens[-1] == encoder.eos) == (eos == "document")
        whole |= result
    texts = {f"d{number:03d}": text.strip() if name == "sentencepiece" else text for number, text in enumerate(TEXTS)}
    assert {name: encoder.decode(tokens) for name, tokens in whole.items()} == texts


def test_keys_depend_on_the_settings(files, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "tokenizer.json").write_bytes(files["huggingface"])
    keys = {unit.unit.key for settings in ({}, {"method": "concatenate"}, {"window": 9}) for eos in ("none", "document")
            for unit in packed(tmp_path, {"file": "tokenizer.json", "eos": eos}, settings)}
    assert len(keys) == 12


def test_a_conversation_longer_than_a_row_is_split_with_its_mask(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "tokenizer.json").write_bytes(train_bpe(TEXTS, 400, SPECIAL))
    (tmp_path / "in" / "chat.jinja").write_text(CHATML)
    chats = [[{"role": "user", "content": f"ask {n}"}, {"role": "assistant", "content": "the quick brown fox " * n}]
             for n in range(1, 21)]
    texts = ["\n\n".join(message["content"] for message in messages) for messages in chats]
    tokenizer = {"file": "tokenizer.json", "chat_template": "chat.jinja"}
    metas = [json.dumps({"messages": messages}) for messages in chats]
    units = packed(tmp_path, tokenizer, {}, kind="chat", metas=metas, texts=texts)
    marked = 0
    for part in pack.SETS:
        uri = str(tmp_path / "out" / part)
        assert verify(uri) == []
        for number in range(ShardSet.open(uri).manifest.rows):
            marked += inspect(uri, row=number)["loss_tokens"]
        for tokens in documents(uri).values():
            assert len(tokens) > 8
    assert marked == sum(unit.summary[part]["loss_tokens"] for unit in units for part in pack.SETS) > 0


@pytest.mark.parametrize(("change", "message"), [
    ({"file": "none.json"}, "no such tokenizer file"), ({"file": "tokenizer.model"}, "chat templates need"),
    ({"chat_template": "none.jinja"}, "no such chat template"), ({}, "no chat template"),
    ({"chat_template": "bad.jinja"}, "not valid Jinja")])
def test_chat_data_without_a_template_is_refused_before_the_run(files, tmp_path, change, message):
    (tmp_path / "in").mkdir()
    for name, file in NAMES.items():
        (tmp_path / "in" / file).write_bytes(files[name])
    (tmp_path / "in" / "bad.jinja").write_text("{% if %}")
    with pytest.raises(InputError, match=message):
        packed(tmp_path, {"file": "tokenizer.json", **change}, {}, kind="chat")
