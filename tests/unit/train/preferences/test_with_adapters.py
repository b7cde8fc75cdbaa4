"""Tests of preferences with an adapter: its frozen base as the reference, and a reward model's head beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.unit.train.helpers import config, write_shards
from tests.unit.train.preferences.pairs import pair_config, random_pairs, write_pairs
from tidewheel import storage
from tidewheel.checkpoint import conversion
from tidewheel.checkpoint.adapter_files import export_adapter, import_adapter
from tidewheel.checkpoint.manifest import read_manifest
from tidewheel.checkpoint.verify import locate
from tidewheel.cli import run_command
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import ConfigError, TidewheelError
from tidewheel.inference.judges import RewardModelJudge
from tidewheel.inference.reference import ReferenceModel, make
from tidewheel.inference.writer import Writer
from tidewheel.models.adapting import peft_files

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
TOKENS = torch.tensor([7, 5, 9, 11, 5, 13])
"""A prompt of two tokens and an answer. 5 ends a step."""


def their_reward(model: torch.nn.Module, head: str) -> float:
    """Return the reward of `TOKENS` that transformers computes."""
    with torch.no_grad():
        values = model(input_ids=TOKENS[None]).logits.flatten()
    return float(values[0] if head == "outcome" else values[torch.tensor([4, 5])].mean())


def reward(folder: Path, run: str) -> float:
    """Return the reward of `TOKENS` by the reward model of a run."""
    template = folder / "template.jinja"
    template.write_text("{%- for message in messages %}{{- message.content }}{%- endfor %}")
    return RewardModelJudge(run, str(template), device="cpu")._reward(TOKENS, 2)


@pytest.mark.parametrize("head", HEADS)
def test_the_head_of_a_reward_model_goes_to_peft_and_back_with_its_adapter(folder: Path, head: str):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    kind, settings = HEADS[head]
    whole, written, imported = (str(folder / f"{name}-{head}") for name in ("base", "theirs", "imported"))
    conversion.export(f"{folder}/runs/base", whole)

    def base() -> torch.nn.Module:
        """Return the base with a random head."""
        loaded = getattr(transformers, kind).from_pretrained(whole, num_labels=1, pad_token_id=0, dtype=torch.float32)
        return loaded.eval()

    torch.manual_seed(0)
    task = {"outcome": "SEQ_CLS", "process": "TOKEN_CLS"}[head]
    lora = peft.LoraConfig(r=2, task_type=task, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(base(), lora).eval()
    theirs.save_pretrained(written)
    expected = their_reward(theirs, head)
    assert import_adapter(written, f"{folder}/runs/base", imported)["objective"]["head"] == head
    start = (*LORA, "adapter.alpha=8", "adapter.targets=[wq, w2]", f"adapter.init_from={imported}", "steps=1",
             "objective.kind=reward_model", *settings, f"model.init_from={folder}/runs/base")
    wanted = pair_config(folder, f"from-peft-{head}", *start, "optimizer.learning_rate=1e-9")
    fit_local(wanted)
    assert abs(expected) > 1e-4
    assert reward(folder, wanted.run_uri) == pytest.approx(expected, rel=1e-5)
    for name, source in (("imported", imported), ("trained", wanted.run_uri)):
        export_adapter(source, f"{written}-{name}")
        again = peft.PeftModel.from_pretrained(base(), f"{written}-{name}").eval()
        assert their_reward(again, head) == pytest.approx(expected, rel=1e-5), name
    with pytest.raises(ConfigError, match=r"there is no run.json"):
        reward(folder, imported)
    with pytest.raises(TidewheelError, match="a decoder is expected"):
        fit_local(config(folder, f"decoder-{head}", *start[:5], f"model.init_from={folder}/runs/base",
                         "data.validation=''"))


def test_a_head_that_does_not_fit_is_refused(folder: Path):
    wanted = pair_config(folder, "head", *LORA, "objective.kind=reward_model", "steps=1")
    fit_local(wanted)
    written = storage.store(str(folder / "head"))
    export_adapter(wanted.run_uri, written.uri)
    settings = written.read_json(peft_files.CONFIG)
    weights = safetensors.torch.load(written.read(peft_files.WEIGHTS))
    score = f"{peft_files.PREFIX}score"
    changes: dict[str, tuple[dict, dict[str, torch.Tensor | None]]] = {
        "2 labels": ({}, {f"{score}.weight": torch.ones(2, 32)}),
        r"the head is \[1, 48\], a head of this model is \[1, 32\]": ({}, {f"{score}.weight": torch.ones(1, 48)}),
        "score.weight is missing": ({}, {f"{score}.weight": None}),
        "score.bias is 2; heads here have none": ({"task_type": "TOKEN_CLS"}, {f"{score}.bias": torch.full((1,), 2.0)}),
        "task_type None does not say": ({"task_type": None}, {}),
        "not supported: modules_to_save": ({"modules_to_save": ["score", "embed_tokens"]}, {})}
    for message, (other_settings, other_weights) in changes.items():
        written.write_json(peft_files.CONFIG, {**settings, **other_settings})
        tensors = {name: value for name, value in {**weights, **other_weights}.items() if value is not None}
        written.write(peft_files.WEIGHTS, safetensors.torch.save(tensors))
        with pytest.raises(ConfigError, match=message):
            peft_files.read_with_head(written, wanted.model)
    written.write_json(peft_files.CONFIG, settings)
    written.write(peft_files.WEIGHTS, safetensors.torch.save(weights))
    with pytest.raises(ConfigError, match="a decoder is expected"):
        peft_files.read(written, wanted.model)
    fit_local(config(folder, "wide", "steps=1", "model.dim=64", "data.validation=''", "evaluation.sample_tokens=0"))
    with pytest.raises(ConfigError, match=r"the head is \[1, 32\], a head of this model is \[1, 64\]"):
        import_adapter(written.uri, f"{folder}/runs/wide", str(folder / "nowhere"))
    fit_local(config(folder, "slim", "steps=1", "model.ffn_dim=32", "data.validation=''", "evaluation.sample_tokens=0"))
    with pytest.raises(ConfigError, match=r"w1.adapter.b is .*, but .* in this model"):
        import_adapter(written.uri, f"{folder}/runs/slim", str(folder / "nowhere"))
    assert not (folder / "nowhere").exists()


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
    with pytest.raises(TidewheelError, match="a decoder is expected"):
        Writer.open(f"{folder}/runs/base", adapters={"rewards": wanted.run_uri})
    template = folder / "template.jinja"
    template.write_text("{%- for message in messages %}{{- message.content + ' ' }}{%- endfor %}")
    scores = RewardModelJudge(wanted.run_uri, str(template), device="cpu").judge("abc", ["de", "fghi"]).scores
    assert len(set(scores)) == 2
    with pytest.raises(TidewheelError, match="a decoder is expected"):
        run_command(["generate", wanted.run_uri, "--prompt", "a"]) and ReferenceModel(wanted.run_uri)
