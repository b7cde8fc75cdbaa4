"""Tests of preferences with an adapter: its frozen base as the reference, and a reward model's head beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.unit.train.helpers import config, write_shards
from tests.unit.train.preferences.pairs import pair_config, random_pairs, write_pairs
from tidewheel.checkpoint import conversion
from tidewheel.checkpoint.adapter_files import export_adapter
from tidewheel.checkpoint.manifest import read_manifest
from tidewheel.checkpoint.verify import locate
from tidewheel.cli import run_command
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import ConfigError, TidewheelError
from tidewheel.inference.judges import RewardModelJudge
from tidewheel.inference.reference import ReferenceModel, make

LORA = ("adapter.kind=lora", "adapter.rank=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with preference sets and a base model of 2 steps."""
    folder = tmp_path_factory.mktemp("adapted")
    write_pairs(folder / "pairs", random_pairs(24))
    write_pairs(folder / "held_out", random_pairs(5, seed=1), shards=1)
    write_shards(folder / "shards")
    fit_local(config(folder, "base", "steps=2", "data.validation=''", "evaluation.sample_tokens=0"))
    return folder


def lines(folder: Path, run: str) -> list[dict]:
    found = [json.loads(line) for line in (folder / f"runs/{run}/metrics.jsonl").read_text().splitlines()]
    return [line for line in found if "objective" in line]


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_the_base_is_the_reference_without_a_column(folder: Path, kind: str):
    start = (*LORA, f"objective.kind={kind}", f"model.init_from={folder}/runs/base", "optimizer.learning_rate=0.03")
    made = make(ReferenceModel(str(folder / "runs/base")), [str(folder / "pairs"), str(folder / "held_out")],
                str(folder / "references"), mismatched=True)
    column = fit_local(pair_config(folder, f"{kind}-column", *start, f"data.reference={made.uri}"))
    beside = fit_local(pair_config(folder, f"{kind}-beside", *start))
    for ours, theirs in zip(lines(folder, f"{kind}-beside"), lines(folder, f"{kind}-column"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["objective"] == pytest.approx(theirs["objective"], rel=1e-3, abs=1e-5)
    assert lines(folder, f"{kind}-beside")[0]["objective"]["margins"] == pytest.approx(0, abs=1e-6)
    assert lines(folder, f"{kind}-beside")[-1]["objective"]["margins"] != pytest.approx(0, abs=1e-4)
    assert beside.validation_loss == pytest.approx(column.validation_loss, rel=1e-5)
    assert run_command(["evaluate", str(folder / f"runs/{kind}-beside")]) == 0


def test_an_adapter_that_moves_positions_needs_a_column(folder: Path):
    wanted = pair_config(folder, "prompt", "adapter.kind=prompt_tuning", "adapter.targets=[embedding]",
                         "objective.kind=dpo", f"model.init_from={folder}/runs/base")
    with pytest.raises(ConfigError, match="cannot be the reference") as caught:
        fit_local(wanted)
    assert f"tidewheel reference {folder}/runs/base" in caught.value.fix
    assert not (folder / "runs/prompt").exists()


HEADS = {"outcome": ("AutoModelForSequenceClassification", ()),
         "process": ("AutoModelForTokenClassification", ("objective.head=process", "objective.step_token=5"))}


@pytest.mark.parametrize("head", HEADS)
def test_peft_reads_a_reward_models_adapter_with_its_head(folder: Path, head: str):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    kind, settings = HEADS[head]
    wanted = pair_config(folder, f"peft-{head}", *LORA, "objective.kind=reward_model", "steps=2", *settings,
                         f"model.init_from={folder}/runs/base", "optimizer.learning_rate=0.1")
    fit_local(wanted)
    written, whole = str(folder / f"peft-{head}-adapter"), str(folder / f"peft-{head}-base")
    export_adapter(wanted.run_uri, written)
    conversion.export(f"{folder}/runs/base", whole)
    base = getattr(transformers, kind).from_pretrained(whole, num_labels=1, pad_token_id=0, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, written).eval()
    tokens = torch.tensor([[7, 5, 9, 11, 5, 13]])
    template = folder / "template.jinja"
    template.write_text("{%- for message in messages %}{{- message.content }}{%- endfor %}")
    with torch.no_grad():
        values = theirs(input_ids=tokens).logits.flatten()
    ours = RewardModelJudge(wanted.run_uri, str(template), device="cpu")._reward(tokens[0], 2)
    ends = torch.tensor([4, 5])  # the step token in the answer, and the last token
    expected = values[0] if head == "outcome" else values[ends].mean()
    assert ours == pytest.approx(float(expected), rel=1e-5)
    assert abs(ours) > 1e-4


def test_a_reward_models_head_is_trained_and_kept_with_its_adapter(folder: Path):
    start = (*LORA, "objective.kind=reward_model", f"model.init_from={folder}/runs/base", "checkpoint.every_steps=2")
    wanted = pair_config(folder, "reward", *start, "steps=2")
    fit_local(wanted)
    _, checkpoints, name = locate(wanted.run_uri)
    manifest = read_manifest(checkpoints, name)
    saved = [path for path in manifest.tensors if path.startswith("model/")]
    assert "model/output.weight" in saved
    assert all(".adapter." in path for path in saved if path != "model/output.weight")
    assert "optimizer/output.weight.m" in manifest.tensors or any(
        "output.weight" in path for path in manifest.tensors if path.startswith("optimizer/"))
    head = conversion.read_weights(checkpoints, name, manifest, ["output.weight", "embedding.weight"])
    fresh = fit_local(pair_config(folder, "untrained", *start, "steps=1", "optimizer.learning_rate=1e-9"))
    assert fresh.steps == 1
    _, others, other = locate(str(folder / "runs/untrained"))
    before = conversion.read_weights(others, other, read_manifest(others, other), ["output.weight", "embedding.weight"])
    assert head["output.weight"].shape == (1, 32)
    assert not torch.allclose(head["output.weight"], before["output.weight"], atol=1e-5)
    assert torch.equal(head["embedding.weight"], before["embedding.weight"])
    assert fit_local(pair_config(folder, "reward", *start, "steps=4")).steps == 4, "a later start loads both"
    straight = fit_local(pair_config(folder, "straight", *start, "steps=4"))
    assert straight.steps == 4
    assert run_command(["evaluate", wanted.run_uri]) == 0
    template = folder / "template.jinja"
    template.write_text("{%- for message in messages %}{{- message.content + ' ' }}{%- endfor %}")
    scores = RewardModelJudge(wanted.run_uri, str(template), device="cpu").judge("abc", ["de", "fghi"]).scores
    assert len(set(scores)) == 2
    with pytest.raises(TidewheelError, match="a decoder is expected"):
        run_command(["generate", wanted.run_uri, "--prompt", "a"]) and ReferenceModel(wanted.run_uri)
