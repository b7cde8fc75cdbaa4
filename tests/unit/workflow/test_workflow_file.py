"""Tests of workflows in YAML: the shipped ones, against the same written in Python, and run with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines import workflow_dpo, workflow_sft
from tests.unit.workflow import test_run
from tidewheel.errors import ConfigError
from tidewheel.storage import store
from tidewheel.workflow.workflow_file import read_workflow

ROOT = Path(__file__).parents[3]
SFT, DPO = (str(ROOT / f"pipelines/workflow_{name}.yaml") for name in ("sft", "dpo"))
TEMPLATE = ("{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
            "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}")
SMALL = ["model={dim: 32, num_layers: 1, num_heads: 2, tie_embeddings: true}", "steps=2", "schedule.warmup_steps=1",
         "batch={global_sequences: 2, micro_sequences: 1, virtual_ranks: 2}", "checkpoint={}", "evaluation.sequences=2"]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with everything that the workflows read."""
    folder = tmp_path_factory.mktemp("raw")
    pairs = [{"prompt": f"ask {number}", "chosen": f"well {number}", "rejected": "no no no"} for number in range(60)]
    records = {"text": [{"text": f"{pair['prompt']} {pair['chosen']} " * 60} for pair in pairs],
               "chat": [{"prompt": pair["prompt"], "completion": pair["rejected"]} for pair in pairs],
               "preferences": pairs, "evals": [{"id": "q", "question": "Who painted thirteen herons on the wall?"}]}
    for name, lines in records.items():
        (folder / name).mkdir()
        (folder / name / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_yaml_and_python_have_the_same_keys(raw: Path, tmp_path: Path):
    def ids(flow) -> set[str]:
        return {node.id for node in flow.nodes(str(tmp_path), input=str(raw))}

    sft, dpo = ids(read_workflow(SFT)), ids(read_workflow(DPO))
    assert sft == ids(workflow_sft.flow)
    assert dpo == ids(workflow_dpo.flow)
    assert sft < dpo  # DPO finds what the other workflow has published
    assert ids(read_workflow(SFT, ["sft.steps=30"])) - sft == {
        node.id for node in read_workflow(SFT, ["sft.steps=30"]).nodes(str(tmp_path), input=str(raw))
        if node.name in ("sft", "sft-loss", "sft-model")}


def test_the_shipped_workflows_run_and_continue(raw: Path, tmp_path: Path):
    small = [f"{step}.{setting}" for step in ("base", "sft") for setting in SMALL]
    data = ["text.partitions=1", "text.steps.3.pack.validation_fraction=0.3", "sft_chat.partitions=1",
            "sft_chat.steps.3.pack.validation_fraction=0.1"]
    done, begun = test_run.run_here(read_workflow(SFT, [*small, *data]), tmp_path, raw)
    assert sorted(begun) == ["base", "sft", "sft-loss", "sft-model", "sft_chat", "text", "tokenizer"]
    exported = store(done["sft-model"].place)
    assert exported.read_json("tokenizer_config.json")["eos_token"] == "<|im_end|>"
    assert store(done["sft"].place).read_json("run.json")["config"]["model"]["init_from"] == done["base"].place
    more = [*small, *data, *(f"dpo.{setting}" for setting in SMALL), "preferences.partitions=1",
            "preferences.steps.3.pack.validation_fraction=0.1"]
    done, begun = test_run.run_here(read_workflow(DPO, more), tmp_path, raw)
    assert sorted(begun) == ["dpo", "dpo-margins", "dpo-model", "preferences", "reference"]
    first = store(done["dpo"].place).read("metrics.jsonl").decode().splitlines()[0]
    assert '"loss":0.69314' in first, "log 2: training starts at the reference"
    _, begun = test_run.run_here(read_workflow(DPO, more), tmp_path, raw)
    assert begun == []


@pytest.mark.parametrize(("step", "message"), [
    ("{train: {name: a, config: {}, data: texts}}", "(?s)'texts' of kind Pipeline.*: text"),
    ("{exprot: {name: a, run: base}}", "did you mean 'export'"),
    ("{export: {name: a, run: base}, evaluate: {name: b, run: base}}", "export and evaluate|evaluate and export"),
    ("{export: {name: text, run: base}}", "two steps have the name 'text'")])
def test_wrong_steps_are_refused(tmp_path: Path, step: str, message: str):
    (tmp_path / "flow.yaml").write_text(f"name: wrong\ninclude: {SFT}\nsteps: [{step}]\n")
    with pytest.raises(ConfigError, match=message):
        read_workflow(str(tmp_path / "flow.yaml"))


def test_a_change_of_an_unknown_step_is_refused():
    with pytest.raises(ConfigError, match="no pipeline or training has the name 'bsae'"):
        read_workflow(SFT, ["bsae.steps=3"])
