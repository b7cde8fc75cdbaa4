"""A mixture of experts made from a dense checkpoint computes what the dense model does, at first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.every import every
from tests.oracles import ORACLES, VOCABULARY, imported, packed
from tidewheel.checkpoint.conversion import import_
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.upcycling import check_weights, mixture_of, upcycle
from tidewheel.cli import run_command
from tidewheel.errors import ConfigError
from tidewheel.models import families
from tidewheel.models.decoder import Decoder
from tidewheel.models.huggingface import weight_shapes
from tidewheel.storage import store


def dense(name: str, folder: Path) -> Decoder:
    """Write a dense checkpoint to "dense" of a folder, and return its model."""
    ORACLES[name].build().save_pretrained(folder / "hf")
    import_(str(folder / "hf"), str(folder / "dense"))
    return imported(folder / "hf")


def loaded(config: Any, uri: Path) -> Decoder:
    model = Decoder(config, VOCABULARY)
    CheckpointManager(store(uri).child("checkpoints")).load_latest({"model": model.state_dict()})
    return model


@pytest.mark.parametrize(("name", "kind"), [("llama", "mixtral"), ("qwen3, tied", "qwen3_moe")])
def test_the_first_logits_are_those_of_the_dense_model(name: str, kind: str, tmp_path: Path):
    model = dense(name, tmp_path)
    done = upcycle(str(tmp_path / "dense"), str(tmp_path / "sparse"), {
        "kind": kind, "num_experts": 4, "experts_per_token": 2})
    sparse = loaded(done.config, tmp_path / "sparse")
    assert sparse.state_dict()["blocks.1.ffn.router.weight"].std() > 0
    rows = packed()
    with torch.no_grad():
        torch.testing.assert_close(sparse(*rows), model(*rows), rtol=0, atol=1e-5)


def test_noise_makes_experts_differ(tmp_path: Path):
    dense("llama", tmp_path)
    done = upcycle(str(tmp_path / "dense"), str(tmp_path / "sparse"), {"kind": "mixtral", "num_experts": 3}, noise=0.1)
    experts = loaded(done.config, tmp_path / "sparse").state_dict()["blocks.0.ffn.experts.w1"]
    whole = loaded(imported(tmp_path / "hf").config, tmp_path / "dense").state_dict()["blocks.0.ffn.w1.weight"]
    for expert in experts:
        assert 0.08 < float((expert - whole).std() / whole.std()) < 0.12
    assert not torch.equal(experts[0], experts[1])


@every([
    ({"kind": "llama"}, "has no experts"), ({"kind": "olmoe"}, "normalise_weights is False"),
    ({"kind": "mixtral", "shared_experts": 1}, "shared_experts"), ({"kind": "gpt_oss"}, "which the dense model lacks"),
    ({"kind": "qwen3_moe", "expert_ffn_dim": 8}, "expert_ffn_dim is 8"), ({"kind": "qwen3_moe"}, "q_norm")])
def test_mixtures_that_would_compute_something_else_are_refused(case: tuple[dict[str, Any], str]) -> None:
    settings, said = case
    llama = families.of_shape({"preset": "debug", "qk_norm": False})
    with pytest.raises(ConfigError, match=said):
        check_weights(weight_shapes(llama, VOCABULARY), weight_shapes(mixture_of(llama, settings), VOCABULARY))


def test_the_command_prints_settings_to_train_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    dense("llama", tmp_path)
    command = ["checkpoint", "upcycle", str(tmp_path / "dense"), str(tmp_path / "sparse")]
    assert run_command([*command, "--set", "kind=mixtral", "--set", "num_experts=4"]) == 0
    printed = capsys.readouterr().out
    assert "kind: mixtral" in printed
    assert f"init_from: {store(tmp_path / 'sparse').uri}" in printed
