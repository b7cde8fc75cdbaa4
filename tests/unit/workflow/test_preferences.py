"""One workflow from conversations and pairs to a model tuned by DPO, in this process and without Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tidewheel as tw
from tests.unit.workflow import test_run
from tidewheel.storage import store

TEMPLATE = ("{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content + '<|end|>' }}{%- endfor %}"
            "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}")


def flow(**changes: Any) -> tw.Workflow:
    tokenizer = tw.Tokenizer("bpe", "text/*.jsonl", vocabulary_size=300,
                             special_tokens=("<|user|>", "<|assistant|>", "<|end|>"))
    chats = (tw.Pipeline("chats").set(partitions=1).read("chat/*.jsonl", kind="chat")
             .tokenize(tokenizer, chat_template="template.jinja").pack(sequence_length=64, validation_fraction=0.2))
    pairs = (tw.Pipeline("pairs").set(partitions=1).read("pairs/*.jsonl", kind="preferences")
             .tokenize(tokenizer, chat_template="template.jinja").pack(sequence_length=64, validation_fraction=0.2))
    settings = {"model": {"dim": 32, "num_layers": 1, "num_heads": 2}, "steps": 2,
                "evaluation": {"sample_tokens": 0}, "batch": {"global_sequences": 2, "micro_sequences": 1,
                                                              "virtual_ranks": 2}}
    base = tw.Train({**settings, "run": {"id": "base"}}, data=chats)
    reference = tw.Reference("reference", base, pairs)
    tuned = tw.Train({**settings, "run": {"id": "tuned"}}, data=pairs, init_from=base, reference=reference,
                     objective={"kind": "dpo", **changes})
    return tw.Workflow("preferences", tw.Evaluate("score", tuned))


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    for name in ("text", "chat", "pairs"):
        (tmp_path / "raw" / name).mkdir(parents=True)
    pairs = [{"prompt": f"ask {number}", "chosen": f"well {number}", "rejected": "no no no"} for number in range(24)]
    chats = [{"prompt": pair["prompt"], "completion": pair["rejected"]} for pair in pairs]
    texts = [{"text": f"{pair['prompt']} {pair['chosen']} {pair['rejected']}"} for pair in pairs]
    for name, records in (("text", texts), ("chat", chats), ("pairs", pairs)):
        (tmp_path / "raw" / name / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "raw/template.jinja").write_text(TEMPLATE)
    return tmp_path / "raw"


def test_a_model_is_tuned_in_one_workflow(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(test_run, "flow", flow)
    done, begun = test_run.run(tmp_path / "out", raw)
    assert sorted(begun) == ["base", "bpe", "chats", "pairs", "reference", "score", "tuned"]
    assert done["reference"].artifact["pairs"] == 24
    metrics = store(done["tuned"].place).read("metrics.jsonl").decode().splitlines()
    assert '"loss":0.69314' in metrics[0], "log 2: training starts at the reference"
    folder, name = done["score"].place.rsplit("/", 1)
    assert set(store(folder).read_json(name)["sets"]["validation"]) >= {"loss", "margins", "accuracies"}
    _, begun = test_run.run(tmp_path / "out", raw)
    assert begun == []
    _, begun = test_run.run(tmp_path / "out", raw, beta=0.2)
    assert sorted(begun) == ["score", "tuned"], "the reference model's log-probabilities are used again"
