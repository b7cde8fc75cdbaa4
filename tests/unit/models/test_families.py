"""Tests of a user's model family: loading, planning, layouts, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.every import every
from tests.own_parts import write_parts
from tests.ranks import on_ranks
from tests.unit.plan.test_memory import FLATTENED, NORM, saved_bytes
from tests.unit.train.helpers import config as training
from tests.unit.train.helpers import write_shards
from tests.unit.train.parallel.layouts import assert_same_training, config
from tidewheel.checkpoint import conversion
from tidewheel.config import build
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import ConfigError
from tidewheel.models import families, huggingface
from tidewheel.models.blocks import RMSNorm
from tidewheel.models.costs import LayerCosts
from tidewheel.models.decoder import Decoder
from tidewheel.models.families import Llama
from tidewheel.models.family import Model
from tidewheel.models.initial_values import init_parameter
from tidewheel.plan.layout import Job, Layout
from tidewheel.plan.memory import kept_per_token
from tidewheel.train.config import TrainConfig
from tidewheel.train.memory.config import MemoryConfig
from tidewheel.train.parallel.config import ParallelConfig

LENGTH = 1100  # as in `test_memory`


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"{write_parts(tmp_path)}:Gelu"


def test_settings_without_a_kind_belong_to_the_default_family_and_are_saved_without_one():
    made = build(TrainConfig, {"model": {"preset": "debug"}})
    assert isinstance(made.model, Llama)
    assert "kind" not in made.model.shape()
    assert families.of_shape(made.model.shape()).shape() == made.model.shape()


def test_a_users_family_is_loaded_by_its_name(family: str):
    made = build(TrainConfig, {"model": {"kind": family, "preset": "tiny", "num_layers": 3}})
    assert (made.model.dim, made.model.num_layers, made.model.ffn_width) == (32, 3, 128)
    assert made.model.shape()["kind"] == family
    assert families.of_shape(made.model.shape()).shape() == made.model.shape()
    assert list(made.own_parts()) == ["model"]
    assert build(TrainConfig, made.canonical()).canonical() == made.canonical()


@pytest.mark.parametrize(("values", "said"), [
    ({"kind": "lama"}, "did you mean 'llama'"), ({"kind": "llama", "qk_nrm": False}, "did you mean 'qk_norm'"),
    ({"preset": "125"}, "did you mean '125m'"), ({"num_heads": 3, "dim": 64}, "not a multiple")])
def test_wrong_settings_are_refused_with_a_reason(values: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        build(TrainConfig, {"model": values})


@pytest.mark.parametrize("missing", ["FEED_FORWARD", "block"])
def test_an_incomplete_family_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str):
    monkeypatch.chdir(tmp_path)
    module = f"half_{missing}"
    attributes = {"FEED_FORWARD": "FEED_FORWARD = tw.FeedForwardShape(inputs=1, kept=2, kept_compiled=1)",
                  "block": "def block(self, layer): return None"}
    kept = "".join(f"    {line}\n" for name, line in attributes.items() if name != missing)
    (tmp_path / f"{module}.py").write_text(f"import tidewheel as tw\n\n\nclass Half(tw.Model):\n{kept}")
    with pytest.raises(ConfigError, match=r"FEED_FORWARD = .* and a method block"):
        build(TrainConfig, {"model": {"kind": f"{module}:Half"}})


def test_an_error_in_a_block_is_reported_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong_block.py").write_text(
        "import tidewheel as tw\n\n\nclass Wrong(tw.Model):\n"
        "    FEED_FORWARD = tw.FeedForwardShape(inputs=1, kept=2, kept_compiled=1)\n"
        "    def block(self, layer):\n        return self.no_such_width\n")
    made = build(TrainConfig, {"model": {"kind": "wrong_block:Wrong"}})
    with pytest.raises(ConfigError, match="no_such_width") as refused:
        Decoder(made.model, 128)
    assert str(refused.value.where).endswith("wrong_block.py:7")


def decoder(family: str, **settings: Any) -> tuple[Decoder, TrainConfig]:
    made = build(TrainConfig, {"model": {"kind": family, "preset": "tiny", **settings}, "precision": "bf16"})
    model = Decoder(made.model, 128)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_parameter(name, parameter.shape, made.model, 0))
    return model, made


def test_initial_biases_are_zero_and_projections_into_the_residual_stream_are_small(family: str):
    model, made = decoder(family, dim=256, ffn_dim=512)
    held = model.state_dict()
    assert held["blocks.0.ffn.up.bias"].abs().max() == 0
    std = made.model.weight_std
    assert held["blocks.0.ffn.up.weight"].std() == pytest.approx(std, rel=0.05)
    assert held["blocks.0.ffn.down.weight"].std() == pytest.approx(std / 2, rel=0.05)  # / sqrt(2 x 2 layers)


def test_a_plan_counts_parameters_and_activations_of_a_users_family(family: str):
    model, made = decoder(family, dim=64, num_layers=1, ffn_dim=192)
    job = Job(made, 128, LENGTH)
    assert job.parameters == sum(parameter.numel() for parameter in model.parameters())
    x = torch.randn(1, LENGTH, 64, requires_grad=True)
    arguments = x, model.rope(torch.arange(LENGTH)[None]), model.mask(torch.zeros(1, LENGTH, dtype=torch.int64), x)
    layout = Layout(ParallelConfig(data="ddp"), MemoryConfig(), 1, 1, 1)
    normalised = 2 * 4 * 64  # a CPU's RMSNorm keeps x / rms(x) as well
    assert saved_bytes(model, arguments) == kept_per_token(job, layout) + NORM + FLATTENED + normalised


def test_a_family_without_hugging_face_names_cannot_be_exported(family: str):
    made = build(TrainConfig, {"model": {"kind": family}}).model
    with pytest.raises(ConfigError, match="no counterpart at Hugging Face"):
        huggingface.to_config(made, 128)


def test_an_export_that_is_refused_writes_nothing(family: str, tmp_path: Path):
    write_shards(tmp_path / "shards")
    write_shards(tmp_path / "validation", rows=4, seed=1)
    run = training(tmp_path, "gelu", "steps=1", "evaluation.sample_tokens=0", f"model.kind={family}")
    fit_local(run)
    with pytest.raises(ConfigError, match="no counterpart"):
        conversion.export(run.run_uri, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def _in_every_layout(folder: str, family: str) -> None:
    import sys

    sys.path.insert(0, folder)
    for parallel in ({"data": "zero3"}, {"tensor": 2}, {"pipeline": 2}, {"context": 2}):
        assert_same_training(config(parallel, model={"kind": family}))


def test_a_users_family_learns_the_same_in_every_layout(family: str, tmp_path: Path):
    on_ranks(2, _in_every_layout, str(tmp_path), family)


def test_tensor_parallelism_of_a_missing_module_is_refused(family: str):
    from tidewheel.train.parallel.tensor import _block_plan

    model, made = decoder(family)
    with pytest.raises(ConfigError, match=r"'ffn\.w1'"):
        _block_plan(model.blocks[0], {**made.model.tensor_parallel(0), "ffn.w1": "columns"})


SHARED = {"columns", "rows"}
PER_HEAD = {"width", "per_head"}


def declared(model: Model, layer: int) -> LayerCosts:
    """Return the costs of a dense layer, counted in its block by how tensor parallelism cuts each parameter."""
    with torch.device("meta"):
        block = model.block(layer)
    cuts = model.tensor_parallel(layer)
    matrices = cut = whole = 0
    for name, parameter in block.named_parameters():
        module, _, kind = name.rpartition(".")
        how = cuts.get(module)
        if how in SHARED and kind == "weight":
            matrices += parameter.numel()
        elif how in PER_HEAD or (how == "columns" and kind == "bias"):
            cut += parameter.numel()
        else:
            whole += parameter.numel()
    return LayerCosts(matrices, matrices, cut=cut, whole=whole, inner=model.ffn_width)


@every([(family, {}) for family in families.KIND.built_in()] + [
    ("llama", {"qk_norm": False}), ("gemma", {"preset": "gemma3_1b"}), ("gpt2", {"tie_embeddings": False})])
def test_costs_that_a_family_declares_are_those_of_its_blocks(case: tuple[str, dict[str, Any]]):
    family, changes = case
    model = families.KIND.build(family, {"num_layers": 3, "dim": 64, "num_heads": 4, "num_kv_heads": 2, **changes})
    counted = sum(shape.numel() for shape in huggingface.parameter_shapes(model, 128).values())
    assert model.parameters(128) == counted
    for layer in range(model.num_layers):
        costs = model.layer_costs(layer)
        if not costs.experts:
            assert costs == declared(model, layer)


@every([("gpt2", "gpt2_124m", 50257, 124_439_808), ("gpt2", "gpt2_1.5b", 50257, 1_557_611_200),
        ("llama", "llama2_7b", 32000, 6_738_415_616), ("llama", "llama3_8b", 128256, 8_030_261_248),
        ("llama", "llama3_405b", 128256, 405_853_388_800), ("llama", "llama3_3b", 128256, 3_212_749_824),
        ("mistral", "mistral_7b", 32000, 7_241_732_096), ("mistral", "mistral_nemo_12b", 131072, 12_247_782_400),
        ("qwen2", "qwen2.5_0.5b", 151936, 494_032_768), ("qwen2", "qwen2.5_7b", 152064, 7_615_616_512),
        ("gemma", "gemma2_2b", 256000, 2_614_341_888), ("gemma", "gemma2_9b", 256000, 9_241_705_984),
        ("gemma", "gemma2_27b", 256000, 27_227_128_320), ("gemma", "gemma3_1b", 262144, 999_885_952),
        ("gemma", "gemma3_270m", 262144, 268_098_176), ("olmo2", "olmo2_7b", 100352, 7_298_617_344),
        ("olmo2", "olmo2_13b", 100352, 13_716_198_400), ("olmo2", "olmo2_1b", 100352, 1_484_916_736),
        ("mixtral", "mixtral_8x7b", 32000, 46_702_792_704), ("qwen3_moe", "qwen3_30b_a3b", 151_936, 30_532_122_624),
        ("qwen3_moe", "qwen3_235b_a22b", 151_936, 235_093_634_560), ("olmoe", "olmoe_1b_7b", 50_304, 6_919_161_856),
        # 671,026,419,200 with the selection biases, which are no parameters here
        ("deepseek_v3", "deepseek_v3", 129_280, 671_026_404_352),
        ("gpt_oss", "gpt_oss_20b", 201_088, 20_914_757_184), ("gpt_oss", "gpt_oss_120b", 201_088, 116_829_156_672)])
def test_presets_have_the_published_number_of_parameters(case: tuple[str, str, int, int]):
    """Compare with the sizes that Hugging Face's hub shows for the safetensors files of each model."""
    family, preset, vocabulary, published = case
    assert families.KIND.build(family, {"preset": preset}).parameters(vocabulary) == published


def test_a_family_is_one_small_file():
    for family in families.KIND.built_in():
        file = Path(families.__file__).with_name(f"{family}.py")
        assert len(file.read_text().splitlines()) <= 200, family


UNCAPPED = {"attention_soft_cap": None}  # a CPU keeps capped scores, flex does not


@every([(family, {}) for family in families.KIND.built_in() if family != "gemma"] + [
    ("gemma", UNCAPPED), ("gemma", {**UNCAPPED, "qk_norm": True})])
def test_a_plan_counts_activations_of_every_family(case: tuple[str, dict[str, Any]]):
    """The plan is for a GPU: of a CPU's memory, copies that only it keeps are taken off."""
    family, changes = case
    shape = {"dim": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 192, "max_sequence_length": 2048}
    made = build(TrainConfig, {"model": {"kind": family, **shape, **changes}, "precision": "bf16"})
    if made.model.layer_costs(0).experts:
        return
    model = Decoder(made.model, 128)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_parameter(name, parameter.shape, made.model, 0))
    x = torch.randn(1, LENGTH, 64, requires_grad=True)
    arguments = x, model.rope(torch.arange(LENGTH)[None]), model.mask(torch.zeros(1, LENGTH, dtype=torch.int64), x)
    normalised = 4 * (made.model.stream_norms * 64 + made.model.normed_heads * 16)
    copies = FLATTENED + (normalised if isinstance(model.norm, RMSNorm) else 0)
    layout = Layout(ParallelConfig(data="ddp"), MemoryConfig(), 1, 1, 1)
    assert kept_per_token(Job(made, 128, LENGTH), layout) == pytest.approx(
        saved_bytes(model, arguments) - copies, rel=0.1)
