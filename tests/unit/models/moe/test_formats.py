"""Forms of experts at Hugging Face: fused and single ones are read, single ones are written, a bias is not lost."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.every import every
from tests.oracles import ORACLES, VOCABULARY, imported
from tidewheel.errors import ConfigError
from tidewheel.models import huggingface
from tidewheel.models.decoder import Decoder
from tidewheel.storage import store


def config_of(name: str) -> Any:
    values = json.loads(ORACLES[name].build().config.to_json_string())
    return huggingface.from_config(values, "config.json")[0]


def written(model: Decoder, folder: Path) -> dict[str, torch.Tensor]:
    """Export a model and return the tensors of its file."""
    weights = model.state_dict()
    huggingface.write(store(folder), model.config, VOCABULARY, lambda names: {name: weights[name] for name in names})
    return safetensors.torch.load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_fused_experts_are_read_and_single_ones_are_written(name: str, tmp_path: Path):
    oracle = ORACLES[name].build()
    oracle.save_pretrained(tmp_path / "single")
    single = imported(tmp_path / "single")
    fused = {key: value.contiguous() for key, value in oracle.state_dict().items()}
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in fused)
    (tmp_path / "fused").mkdir()
    (tmp_path / "fused" / "config.json").write_bytes((tmp_path / "single" / "config.json").read_bytes())
    safetensors.torch.save_file(fused, tmp_path / "fused" / "model.safetensors", {"format": "pt"})
    model = imported(tmp_path / "fused")
    for key, value in model.state_dict().items():
        assert torch.equal(value, single.state_dict()[key]), key
    keys = written(model, tmp_path / "ours")
    assert keys.keys() == safetensors.torch.load_file(tmp_path / "single" / "model.safetensors").keys()
    assert any(re.search(r"experts\.3\.", key) for key in keys)


@every(["mixtral", "qwen3_moe", "olmoe", "gpt_oss"])
def test_a_bias_that_balanced_the_experts_is_not_lost_silently(name: str) -> None:
    config = config_of(name)
    bias = torch.zeros(config.num_experts)
    (conversion,) = [one for one in config.hugging_face_weights(1) if "ffn.router.selection_bias" in one.ours]
    assert list(conversion.to_theirs([bias])) == []
    assert torch.equal(conversion.to_ours([])[0], bias)
    bias[0] = 1e-3
    with pytest.raises(ConfigError, match="selection bias"):
        conversion.to_theirs([bias])


def test_settings_without_a_counterpart_are_refused():
    config = config_of("mixtral")
    for name, value in (("shared_experts", 1), ("routing", "expert_choice"), ("first_dense_layers", 1)):
        changed = config.model_copy(update={name: value})
        with pytest.raises(ConfigError, match=name):
            huggingface.to_config(changed, VOCABULARY)
