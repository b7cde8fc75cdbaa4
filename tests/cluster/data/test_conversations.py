"""Chat and preference pipelines on a real Ray cluster: the same bytes for any file order, and valid rows."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.cluster.data.test_pipeline import shard_hashes
from tests.unit.data.tokenize.test_chat import CHATML, SPECIAL, TEXTS, TOKENS
from tidewheel.config import build
from tidewheel.data import pipeline
from tidewheel.data.config import PipelineConfig
from tidewheel.data.tokenize.tokenizer import train_bpe
from tidewheel.errors import InputError
from tidewheel.shards.preferences import read_pairs
from tidewheel.shards.reader import ShardSet
from tidewheel.shards.tokenizer import of_manifest
from tidewheel.shards.verify import verify

pytestmark = pytest.mark.cluster
ITEM = "Which lighthouse keeper painted seventeen crimson herons upon the northern harbour wall before breakfast"


def conversation(number: int) -> dict:
    generator = random.Random(number)
    turns = [{"role": role, "content": f"{role} {number} " + " ".join(generator.choice(TEXTS).split()[:9])}
             for _ in range(generator.randint(1, 6)) for role in ("user", "assistant")]
    return {"id": f"c{number:03d}", "messages": turns}


def write(folder: Path, kind: str, records: list[dict], *, seed: int = 0) -> Path:
    records = list(records)
    random.Random(seed).shuffle(records)
    (folder / kind).mkdir(parents=True)
    (folder / "evals").mkdir()
    for number in range(3):
        lines = [json.dumps(record) for record in records[number::3]]
        (folder / kind / f"{seed}-{number}.jsonl").write_text("\n".join(lines))
    (folder / "evals" / "quiz.jsonl").write_text(json.dumps({"id": "q1", "question": ITEM}) + "\n")
    (folder / "tokenizer.json").write_bytes(train_bpe(TEXTS, 600, SPECIAL))
    (folder / "tokenizer_config.json").write_text(json.dumps({**TOKENS, "chat_template": CHATML}))
    return folder


def recipe(kind: str, *overrides: str) -> PipelineConfig:
    return build(PipelineConfig, {
        "name": kind, "max_bad_fraction": 0.3, "partitions": 2, "read": {"paths": [f"{kind}/*.jsonl"], "kind": kind},
        "steps": [{"dedup_exact": {}}, {"decontaminate": {"evals": ["evals/*.jsonl"]}},
                  {"tokenize": {"file": "tokenizer.json"}},
                  {"pack": {"sequence_length": 64, "validation_fraction": 0.2, "rows_per_shard": 8}}]}, overrides)


CHAT = [*(conversation(number) for number in range(40)),
        {"id": "copy", "messages": conversation(3)["messages"]},
        {"id": "leaked", "messages": [{"role": "user", "content": ITEM}, {"role": "assistant", "content": "Me."}]},
        {"id": "bad", "messages": [{"role": "user", "content": "hello?"}]}]


def test_chat_data_is_packed_with_its_loss_mask(cluster, tmp_path):
    source = write(tmp_path / "in", "chat", CHAT)
    done = pipeline.run(recipe("chat"), input=str(source), output=str(tmp_path / "out"))
    assert done.value["quarantine"] == {"no_assistant_turn": 1}
    assert done.stage("dedup_exact")["dropped"] == {"exact_duplicate": 1}
    assert done.stage("decontaminate")["dropped"] == {"contaminated": 1}
    assert done.stage("pack")["documents_out"] == 40
    learnt = 0
    for name in ("shards", "validation"):
        folder = str(tmp_path / "out" / name)
        assert verify(folder) == []
        learnt += _check_rows(folder)
    assert 0 < done.value["loss_tokens"] <= learnt

    again = write(tmp_path / "again", "chat", CHAT, seed=7)
    pipeline.run(recipe("chat"), input=str(again), output=str(tmp_path / "other"))
    assert shard_hashes(tmp_path / "other") == shard_hashes(tmp_path / "out")


def _check_rows(place: str) -> int:
    """Reassemble every conversation, check that its marked tokens are the assistant's, and return their number."""
    shard_set = ShardSet.open(place)
    encoder = of_manifest(shard_set.store, shard_set.manifest.tokenizer)
    pieces: dict[str, dict[int, tuple[list[int], list[int]]]] = {}
    for index, info in enumerate(shard_set.manifest.shards):
        for row in shard_set.shard(index).batch.to_pylist():
            starts, length = row["segment_starts"], row["length"]
            for begin, end, name, offset in zip(starts, [*starts[1:], length], row["document_ids"],
                                                row["document_offsets"], strict=True):
                pieces.setdefault(name, {})[offset] = (row["tokens"][begin:end], row["loss_mask"][begin:end])
        assert info.rows <= 8
    count = 0
    for name, own in pieces.items():
        tokens = [token for offset in sorted(own) for token in own[offset][0]]
        marked = [token for offset in sorted(own) for token, mark in zip(*own[offset], strict=True) if mark]
        count += len(marked)
        messages = next(record["messages"] for record in CHAT if record["id"] == name)
        decode = encoder.with_control_tokens.decode
        assert decode(tokens, skip_special_tokens=False) == "".join(
            f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        assert decode(marked, skip_special_tokens=False) == "".join(
            m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant")
    return count


def test_preference_pairs_are_written(cluster, tmp_path):
    records = [{"id": f"p{number}", "prompt": f"ask {number}", "chosen": f"well {number}", "rejected": "no"}
               for number in range(12)]
    records += [{"id": "long", "prompt": "ask", "chosen": "word " * 200, "rejected": "no"},
                {"id": "same", "prompt": "ask", "chosen": "a", "rejected": "a"}]
    source = write(tmp_path / "in", "preferences", records)
    done = pipeline.run(recipe("preferences"), input=str(source), output=str(tmp_path / "out"))
    assert done.value["quarantine"] == {"no_preference": 1}
    assert done.stage("pack")["dropped"] == {"pair_too_long": 1}
    assert json.loads((tmp_path / "out/verdicts/pack/summary.json").read_text())["dropped"] == {"pair_too_long": 1}
    names = []
    for name in ("shards", "validation"):
        assert verify(str(tmp_path / "out" / name)) == []
        names += [row["document_id"] for batch in read_pairs(str(tmp_path / "out" / name)) for row in batch.to_pylist()]
    assert sorted(names) == sorted(f"p{number}" for number in range(12))


def test_a_template_that_refuses_everything_stops_the_run(cluster, tmp_path):
    source = write(tmp_path / "in", "chat", CHAT[:5])
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ raise_exception('never') }}"}))
    with pytest.raises(InputError, match="no conversation could be tokenized"):
        pipeline.run(recipe("chat"), input=str(source), output=str(tmp_path / "out"))
