"""The mixture-of-experts layer: against the blocks of transformers, and what it promises by itself."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from tests.every import every
from tidewheel.errors import ConfigError
from tidewheel.models.moe.config import MixtureOfExperts
from tidewheel.models.moe.layer import MoE
from tidewheel.models.moe.router import choose

SHAPE = {"dim": 64, "num_layers": 2, "num_heads": 4, "expert_ffn_dim": 48, "num_experts": 8, "experts_per_token": 2}
TOKENS = 57


class Plain(MixtureOfExperts):
    """A family for tests."""

    def block(self, layer: int) -> Any:
        raise AssertionError("not built here")


class Sigmoid(Plain):
    """A family whose scores are sigmoids, as in DeepSeek-V3."""

    SCORES: ClassVar = "sigmoid"
    SCORE_EPSILON: ClassVar = 1e-20


class Chosen(Plain):
    """A family with biases and a softmax over the chosen experts, as GPT-OSS."""

    SCORES: ClassVar = "chosen_softmax"
    EXPERT_BIAS: ClassVar = True
    ACTIVATION: ClassVar = "clamped"


def layer(kind: type[MixtureOfExperts] = Plain, **settings) -> MoE:
    torch.manual_seed(1)
    module = MoE(kind(**{**SHAPE, **settings}))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return module


def inputs() -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(3, TOKENS // 3, 64)


def slowly(module: MoE, x: torch.Tensor) -> torch.Tensor:
    """Compute every expert for every token and weigh the chosen ones."""
    flat = x.flatten(0, 1)
    choice, _ = module.router(flat)
    number = len(module.experts.w1)
    out = torch.zeros_like(flat)
    for expert in range(number):
        counts = torch.zeros(1, number, dtype=torch.int64)
        counts[0, expert] = len(flat)
        weight = choice.weights.masked_fill(choice.experts != expert, 0.0).sum(dim=1)
        out = out + weight[:, None] * module.experts(flat, counts)
    if module.shared is not None:
        out = out + module.shared(flat)
    return out.view_as(x)


VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {}, "not normalised": {"normalise_weights": False}, "all experts": {"experts_per_token": 8},
    "one expert": {"experts_per_token": 1, "normalise_weights": False}, "shared": {"shared_experts": 2},
    "groups": {"kind": Sigmoid, "expert_groups": 4, "groups_per_token": 2, "weight_scale": 2.5},
    "chosen": {"kind": Chosen}, "experts choose": {"routing": "expert_choice"},
    "losses": {"balancing": "auxiliary", "router_z_loss": 0.1}}


@every(VARIANTS)
def test_output_and_gradients_are_those_of_all_experts_computed_densely(name: str) -> None:
    module = layer(**VARIANTS[name])
    x = inputs().requires_grad_()
    sent = torch.randn_like(x)
    held = [x, *module.parameters()]
    wanted = slowly(module, x)
    reference = torch.autograd.grad(wanted, held, sent)
    out, routing = module(x)
    gradients = torch.autograd.grad(out, held, sent)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    for gradient, expected in zip(gradients, reference):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=2e-5)
    if name != "experts choose":
        assert int(routing.counts.sum()) == TOKENS * module.router.config.experts_per_token
        assert int(routing.dropped) == 0


def theirs(name: str) -> tuple[torch.nn.Module, MoE]:
    """Return a random block of transformers and our layer with its weights."""
    import transformers

    common = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "mixtral":
        config = transformers.MixtralConfig(**common, num_key_value_heads=2, intermediate_size=48,
                                            num_local_experts=8, num_experts_per_tok=2)
        ours = layer()
    elif name == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**common, num_key_value_heads=2, moe_intermediate_size=48, num_experts=8,
                                             num_experts_per_tok=4, norm_topk_prob=True, head_dim=16)
        ours = layer(experts_per_token=4)
    elif name == "olmoe":
        config = transformers.OlmoeConfig(**common, num_key_value_heads=4, intermediate_size=48, num_experts=8,
                                          num_experts_per_tok=4, norm_topk_prob=False)
        ours = layer(experts_per_token=4, normalise_weights=False)
    elif name == "gpt_oss":
        config = transformers.GptOssConfig(**common, num_key_value_heads=2, intermediate_size=48, num_local_experts=8,
                                           num_experts_per_tok=2, head_dim=16)
        ours = layer(Chosen)
    else:
        config = transformers.DeepseekV3Config(
            **common, num_key_value_heads=4, moe_intermediate_size=48, n_routed_experts=8, num_experts_per_tok=3,
            n_group=4, topk_group=2, n_shared_experts=1, first_k_dense_replace=0, kv_lora_rank=16, q_lora_rank=24,
            qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, routed_scaling_factor=2.5, norm_topk_prob=True)
        ours = layer(Sigmoid, experts_per_token=3, expert_groups=4, groups_per_token=2, weight_scale=2.5,
                     shared_experts=1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    mlp = model.model.layers[1].mlp
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
        _copy(mlp, ours)
    return mlp, ours


def _copy(mlp: torch.nn.Module, ours: MoE) -> None:
    experts = mlp.experts
    if ours.experts.w1_bias is not None:  # GPT-OSS interleaves gate and up, and does not transpose
        ours.router.weight.copy_(mlp.router.weight)
        ours.router.bias.copy_(mlp.router.bias)
        ours.experts.w1.copy_(experts.gate_up_proj[..., ::2].transpose(1, 2))
        ours.experts.w3.copy_(experts.gate_up_proj[..., 1::2].transpose(1, 2))
        ours.experts.w2.copy_(experts.down_proj.transpose(1, 2))
        ours.experts.w1_bias.copy_(experts.gate_up_proj_bias[..., ::2])
        ours.experts.w3_bias.copy_(experts.gate_up_proj_bias[..., 1::2])
        ours.experts.w2_bias.copy_(experts.down_proj_bias)
        return
    ours.router.weight.copy_(mlp.gate.weight)
    gate, up = experts.gate_up_proj.chunk(2, dim=1)
    ours.experts.w1.copy_(gate)
    ours.experts.w3.copy_(up)
    ours.experts.w2.copy_(experts.down_proj)
    if ours.shared is not None:
        mlp.gate.e_score_correction_bias.copy_(torch.randn(8) * 0.1)
        ours.router.selection_bias.copy_(mlp.gate.e_score_correction_bias)
        ours.shared.w1.weight.copy_(mlp.shared_experts.gate_proj.weight)
        ours.shared.w3.weight.copy_(mlp.shared_experts.up_proj.weight)
        ours.shared.w2.weight.copy_(mlp.shared_experts.down_proj.weight)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"])
def test_blocks_of_transformers(name):
    mlp, ours = theirs(name)
    x = inputs()
    with torch.no_grad():
        wanted = mlp(x)
        out, _ = ours(x)
    torch.testing.assert_close(out, wanted[0] if isinstance(wanted, tuple) else wanted, rtol=1e-5, atol=1e-5)


def test_the_order_of_experts_in_a_token_and_the_sum_do_not_depend_on_other_tokens():
    module = layer()
    x = inputs()
    whole, _ = module(x)
    part, _ = module(x[1:2])
    torch.testing.assert_close(part, whole[1:2], rtol=0, atol=1e-6)


def test_counts_are_exact_integers_and_the_entropy_is_that_of_the_scores():
    module = layer()
    x = inputs()
    _, routing = module(x)
    logits = x.flatten(0, 1) @ module.router.weight.t()
    chosen = logits.topk(2).indices.flatten()
    assert routing.counts.dtype == torch.int64
    assert torch.equal(routing.counts, torch.bincount(chosen, minlength=8))
    entropy = torch.distributions.Categorical(logits=logits).entropy().sum()
    torch.testing.assert_close(routing.entropy, entropy)
    assert not routing.entropy.requires_grad


def test_the_selection_bias_chooses_but_does_not_weigh():
    module = layer(normalise_weights=False)
    x = inputs().flatten(0, 1)
    before, _ = module.router(x)
    module.router.selection_bias[3] = 10.0
    after, routing = module.router(x)
    assert int(routing.counts[3]) == len(x)
    scores = (x @ module.router.weight.t()).softmax(dim=-1)
    torch.testing.assert_close(after.weights, scores.gather(1, after.experts))
    assert not torch.equal(before.experts, after.experts)


def test_a_token_uses_experts_of_its_groups_only():
    config = Sigmoid(**{**SHAPE, "num_experts": 12, "experts_per_token": 3, "expert_groups": 4, "groups_per_token": 2})
    scores = torch.rand(50, 12) - 0.5
    for row, experts in zip(scores, choose(scores, config)):
        best = sorted(range(4), key=lambda group: -row[3 * group:3 * group + 3].topk(2).values.sum())[:2]
        allowed = [expert for group in best for expert in range(3 * group, 3 * group + 3)]
        wanted = sorted(allowed, key=lambda expert: -row[expert])[:3]
        assert experts.tolist() == wanted


def test_experts_that_choose_have_equal_loads_and_may_drop_tokens():
    module = layer(routing="expert_choice")
    choice, routing = module.router(inputs().flatten(0, 1))
    assert routing.counts.tolist() == [TOKENS * 2 // 8] * 8
    assert int(routing.dropped) == int((choice.weights == 0).all(dim=1).sum())


def test_16_bit_parameters_keep_the_selection_bias_in_fp32():
    module = layer().to(torch.bfloat16)
    assert module.experts.w1.dtype == torch.bfloat16
    assert module.router.selection_bias.dtype == torch.float32


@every([{"experts_per_token": 9}, {"expert_groups": 3}, {"groups_per_token": 2}, {"first_dense_layers": 2},
        {"expert_groups": 8, "experts_per_token": 1}, {"expert_groups": 4, "experts_per_token": 3}])
def test_impossible_settings_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"experts_per_token|group|dense"):
        Plain(**{**SHAPE, **settings})
