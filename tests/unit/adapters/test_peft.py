"""Adapters compute what the library peft computes, read its files and are read by it; NF4 has bitsandbytes' codes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.benchmarks.adapters import compare, models, nf4_rows, peft_kinds
from tests.every import every
from tidewheel import expressions, storage
from tidewheel.errors import ConfigError
from tidewheel.models import adapters, families
from tidewheel.models.adapter import Adapter
from tidewheel.models.adapting import attach, merge, nf4, peft_experts, peft_files
from tidewheel.models.decoder import Decoder

TOKENS = torch.arange(5, 38).view(3, 11)
POSITIONS = torch.arange(11).expand(3, -1)
SEGMENTS = torch.zeros(3, 11, dtype=torch.int64)


@pytest.fixture(autouse=True, scope="module")
def _peft() -> None:
    """Skip these tests without peft. Its import takes two seconds, and each process of `make test` collects them."""
    pytest.importorskip("peft")


@every(("LoRA", "rsLoRA", "DoRA", "LoRA, ranks by pattern", "LoRA of the embedding", "LoRA of experts", "PiSSA", "IA3",
        "prefix tuning", "prompt tuning"))
def test_each_kind_agrees_with_peft(kind: str):
    row = compare(kind, peft_kinds()[kind])
    assert row.agrees, row


def test_nf4_has_the_codes_of_bitsandbytes():
    pytest.importorskip("bitsandbytes")
    rows = {row["NF4 of"]: row for row in nf4_rows()}
    assert rows["bitsandbytes, fp32 scales"]["equal codes"] == 1
    assert rows["bitsandbytes, fp32 scales"]["error"] == rows["Tidewheel, fp32 scales"]["error"]
    assert rows["torchao"]["equal codes"] > 0.999  # its table is rounded to four digits
    assert rows["Tidewheel, 8-bit scales"]["error"] < 1.001 * rows["bitsandbytes, 8-bit scales"]["error"]


def trained(model: Decoder, kind: str, seed: int, **settings: object) -> tuple[Adapter, dict[str, torch.Tensor]]:
    """Return an adapter with random values."""
    adapter = adapters.KIND.build(kind, {**settings})
    with torch.device("meta"):
        shaped = Decoder(model.config, model.vocabulary_size)
        attach.attach(shaped, adapter)
    generator = torch.Generator().manual_seed(seed)
    values = {name: 1 + 0.1 * torch.randn(parameter.shape, generator=generator)
              for name, parameter in shaped.named_parameters() if ".adapter." in name}
    return adapter, values


@every((("lora", {"rank": 4}), ("lora", {"rank": 4, "start": "pissa", "targets": ["ffn", "embedding"]}), ("ia3", {})))
def test_an_adapter_is_merged_and_taken_out_again(case: tuple[str, dict[str, object]]):
    kind, settings = case
    model, _ = models(kind="qwen2")
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            nn.init.normal_(parameter)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    adapter, values = trained(model, kind, 1, **settings)
    values = {name: value * 0.1 if kind == "lora" else value for name, value in values.items()}
    merge.add(model, adapter, values)
    expected = model(TOKENS, POSITIONS, SEGMENTS)
    weights = merge.merged(before, adapter, values)
    whole, _ = models(kind="qwen2")
    whole.load_state_dict(weights)
    assert whole(TOKENS, POSITIONS, SEGMENTS).sub(expected).abs().max() < 1e-5 * expected.abs().max()
    after = merge.unmerged(weights, adapter, values)
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.allclose(after[name], value, atol=1e-6), name
    changed = {name.rpartition(".")[2] for name, value in before.items() if not torch.equal(weights[name], value)}
    assert changed == ({"weight", "bias"} if kind == "ia3" else {"weight"})


@every((("dora", {}, "the adapter dora"), ("lora", {"base": "nf4"}, "a base in 4 bits")))
def test_what_cannot_be_taken_out_is_refused(case: tuple[str, dict[str, object], str]):
    kind, settings, message = case
    model, _ = models()
    adapter, values = trained(model, kind, 1, **settings)
    with pytest.raises(ConfigError, match=f"the base of {message} cannot be computed from the merged matrix"):
        merge.unmerged(dict(model.named_parameters()), adapter, values)


def test_each_row_is_computed_with_its_own_adapter():
    several = {"low": ("lora", {"rank": 2, "targets": ["wq", "w2"]}), "factors": ("ia3", {}),
               "lengths": ("dora", {"rank": 3, "targets": ["wv"]})}
    model, _ = models()
    chosen = {name: trained(model, kind, index, **settings) for index, (name, (kind, settings)) in
              enumerate(several.items())}
    merge.add_several(model, chosen)
    order = ["factors", "", "low"]
    with merge.rows(model, order):
        together = model(TOKENS, POSITIONS, SEGMENTS)
    for row, name in enumerate(order):
        alone, _ = models()
        if name:
            merge.add(alone, *chosen[name])
        expected = alone(TOKENS, POSITIONS, SEGMENTS)[row]
        assert (together[row] - expected).abs().max() < 2e-6 * expected.abs().max(), name
    with merge.rows(model, ["lengths"] * 3):
        assert not torch.equal(model(TOKENS, POSITIONS, SEGMENTS)[1], together[1])
    with pytest.raises(ConfigError, match="only adapters of linear layers"):
        merge.add_several(models()[0], {"a": trained(model, "prefix_tuning", 1)})


def test_bottlenecks_follow_their_formula():
    model, _ = models()
    adapter, values = trained(model, "bottleneck", 1, width=4, targets=["ffn"])
    reference, _ = models()
    for index, block in enumerate(reference.blocks):
        down, up = (values[f"blocks.{index}.ffn.adapter.{key}"] for key in ("down", "up"))
        block.ffn.register_forward_hook(  # type: ignore[union-attr]
            lambda _, inputs, y, down=down, up=up: y + nn.functional.gelu(y @ down.T) @ up.T)
    merge.add(model, adapter, values)
    expected = reference(TOKENS, POSITIONS, SEGMENTS)
    assert (model(TOKENS, POSITIONS, SEGMENTS) - expected).abs().max() < 1e-5 * expected.abs().max()
    with pytest.raises(ConfigError, match="peft has no adapter"):
        adapter.to_peft(model.config, values)


@every((("q_proj", "attention, blocks, embedding, ffn, w1, w2, w3, wk, wo, wq, wv"), ("atention", "attention"),
        ("blocks.7", "blocks"), ("output", "attention")))
def test_a_target_that_matches_nothing_is_refused_with_the_nearest_names(case: tuple[str, str]):
    pattern, near = case
    adapter = adapters.KIND.build("lora", {"targets": ["wq", pattern]})
    with pytest.raises(ConfigError, match=f"{pattern}.*nearest names: .*{near}"):
        attach.check(models()[0], adapter)


def test_a_prefix_of_an_attention_without_keys_of_its_own_is_refused():
    with torch.device("meta"):
        model = Decoder(families.of_shape({"kind": "deepseek_v3", "preset": "debug"}), 8)
    with pytest.raises(ConfigError, match="'attention' matches no module that the adapter prefix_tuning can be"):
        attach.check(model, adapters.KIND.build("prefix_tuning"))


def test_a_base_that_cannot_be_quantised_is_refused():
    model, _ = models(dim=80, num_kv_heads=4)
    adapter = adapters.KIND.build("lora", {"base": "nf4"})
    with pytest.raises(ConfigError, match="no multiple of 64"):
        attach.attach(model, adapter)


def test_files_of_another_model_or_kind_are_refused(tmp_path, monkeypatch):
    model, _ = models()
    adapter, values = trained(model, "lora", 1, targets=["wq"])
    folder = storage.store(str(tmp_path))
    peft_files.write(folder, model.config, adapter, values)
    smaller = families.KIND.build("llama", {**model.config.settings(), "num_layers": 1})
    with pytest.raises(ConfigError, match="belongs to no layer of this model"):
        peft_files.read(folder, smaller)
    written = folder.read_json(peft_files.CONFIG)
    for pattern, problem in (("(", "is not valid"), ("((a|a|[a-z._0-9])+)+!", "takes more than 0 s")):
        monkeypatch.setattr(expressions, "SECONDS", 0)
        folder.write_json(peft_files.CONFIG, {**written, "alpha_pattern": {pattern: 2}})
        with pytest.raises(ConfigError, match=problem) as error:
            peft_files.read(folder, model.config)
        assert pattern in error.value.what
    folder.write_json(peft_files.CONFIG, {**written, "peft_type": "VERA"})
    with pytest.raises(ConfigError, match="VERA is not known"):
        peft_files.read(folder, model.config)


def test_the_matrix_of_zeros_has_an_exact_code():
    codes, scales = nf4.encode(torch.zeros(2, 64))
    assert torch.equal(nf4.decode(codes, scales), torch.zeros(2, 64))


@every(("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"))
def test_updates_of_experts_are_those_of_peft_in_every_form_of_experts(family: str):
    """Compare with peft's formula of the update of a fused parameter, `ParamWrapper.get_delta_weight`."""
    config = families.of_shape({"kind": family, "preset": "debug"})
    fused = peft_experts.fused_parameters(config)
    layers = [layer for layer in range(config.num_layers) if config.has_experts(layer)]
    assert len(fused) == 2 * len(layers)
    for one in fused[:2]:
        outputs, inputs = one.shape
        factors = {name: (torch.randn(one.experts, 3, inputs), torch.randn(one.experts, outputs // len(one.ours), 3),
                          0.5 + index) for index, name in enumerate(one.ours)}
        a, b, scale = one.join(factors)
        of_a, of_b = a.reshape(one.experts, -1, inputs), b.reshape(outputs, -1, one.experts)
        their_update = scale * torch.einsum("o r e, e r i -> e o i", of_b, of_a)
        (expected,) = one.conversion.to_theirs([scale * b @ a for a, b, scale in factors.values()])
        expected = expected.transpose(1, 2) if family == "gpt_oss" else expected
        torch.testing.assert_close(their_update, expected, rtol=1e-5, atol=1e-5)
        for name, (again_a, again_b) in one.split(a, b).items():
            of_a, of_b, of_scale = factors[name]
            torch.testing.assert_close(scale * again_b @ again_a, of_scale * of_b @ of_a)
