"""Tiny models of transformers, one or more for each model family, with random weights: oracles of logits and formats.

A new family appears in the tests of import and export, in the table of logits and in the table of equivalence as soon
as it has an entry here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from tidewheel.models import huggingface
from tidewheel.models.decoder import Decoder
from tidewheel.storage import store

VOCABULARY = 96
WIDTHS = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
          "rms_norm_eps": 1e-5, "initializer_range": 0.1}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@dataclass(frozen=True)
class Oracle:
    """A model of transformers.

    Args:
        family: name of our family.
        configuration: name of its configuration class in transformers.
        model: name of its model class.
        settings: of its configuration, beside the widths.
        widths: of its configuration, in its own names.
    """

    family: str
    configuration: str
    model: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    widths: dict[str, Any] = dataclasses.field(default_factory=lambda: WIDTHS)

    def build(self, seed: int = 0) -> transformers.PreTrainedModel:
        """Return the model with random weights, and random norms and biases, which are 1 and 0 at first."""
        torch.manual_seed(seed)
        configuration = getattr(transformers, self.configuration)(**{**self.widths, **self.settings})
        kind = getattr(transformers, self.model)
        model = kind._from_config(configuration, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.uniform_(0.5, 1.5)
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if name.endswith(("proj_bias", "correction_bias")):  # of experts
                    tensor.uniform_(-0.1, 0.1)
        return model


GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.1,
        "bos_token_id": 0, "eos_token_id": 0}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7, "num_hidden_layers": 3,
         "initializer_range": 0.05}
GEMMA3_ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
               "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def _llama(**settings: Any) -> Oracle:
    return Oracle("llama", "LlamaConfig", "LlamaForCausalLM", settings)


def _qwen3(**settings: Any) -> Oracle:
    return Oracle("llama", "Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16, **settings})


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}
DEEPSEEK = {"num_hidden_layers": 3, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3,
            "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16,
            "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "num_mtp_layers": 0}


ORACLES: dict[str, Oracle] = {
    "llama": _llama(head_dim=16),
    "llama, tied": _llama(tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "llama, rope llama3": _llama(head_dim=16, rope_parameters={**LLAMA3, "rope_theta": 1000.0}),
    "llama, rope linear": _llama(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
    "llama, rope dynamic": _llama(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}),
    "llama, rope yarn": _llama(rope_parameters={**YARN, "rope_theta": 1e4}),
    "qwen3": _qwen3(),
    "qwen3, tied": _qwen3(tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "gpt2": Oracle("gpt2", "GPT2Config", "GPT2LMHeadModel", widths=GPT2),
    "gpt2, untied": Oracle("gpt2", "GPT2Config", "GPT2LMHeadModel", {"tie_word_embeddings": False, "n_inner": 80},
                           GPT2),
    "mistral": Oracle("mistral", "MistralConfig", "MistralForCausalLM", {"sliding_window": 7}),
    "qwen2": Oracle("qwen2", "Qwen2Config", "Qwen2ForCausalLM"),
    "gemma2": Oracle("gemma", "Gemma2Config", "Gemma2ForCausalLM", {
        **GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "gemma3": Oracle("gemma", "Gemma3TextConfig", "Gemma3ForCausalLM", {
        **GEMMA, "rope_parameters": GEMMA3_ROPE, "layer_types": [LOCAL, LOCAL, GLOBAL]}),
    "mixtral": Oracle("mixtral", "MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen3_moe": Oracle("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", {
        **EXPERTS, "moe_intermediate_size": 24, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "olmoe": Oracle("olmoe", "OlmoeConfig", "OlmoeForCausalLM", {**EXPERTS, "norm_topk_prob": False,
                                                                 "eos_token_id": 0, "pad_token_id": 0}),
    "deepseek_v3": Oracle("deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", DEEPSEEK),
    "deepseek_v3, yarn": Oracle("deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", {
        **DEEPSEEK, "q_lora_rank": None, "rope_parameters": {
            **YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.7}}),
    "gpt_oss": Oracle("gpt_oss", "GptOssConfig", "GptOssForCausalLM", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7, "head_dim": 16, "rope_parameters": {
            **YARN, "truncate": False, "rope_theta": 1.5e5}}),
    "olmo2": Oracle("olmo2", "Olmo2Config", "Olmo2ForCausalLM", {"eos_token_id": 0}),
}


def imported(folder: Path) -> Decoder:
    """Return our model of a folder that transformers wrote."""
    source = store(folder)
    config, vocabulary_size = huggingface.read_config(source)
    model = Decoder(config, vocabulary_size)
    model.load_state_dict(dict(huggingface.read_weights(source, config, vocabulary_size)), strict=True)
    return model.eval()


def packed(rows: int = 2, length: int = 48, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, positions and segment ids [rows, length] of three documents a row."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    cuts = torch.randint(1, length, (rows, 2), generator=generator).sort(dim=1).values
    places = torch.arange(length).expand(rows, length)
    segments = (places >= cuts[:, :1]).long() + (places >= cuts[:, 1:])
    begins = torch.stack((torch.zeros_like(cuts[:, 0]), cuts[:, 0], cuts[:, 1]), dim=1).gather(1, segments)
    return tokens, places - begins, segments


@torch.no_grad()
def largest_difference(ours: Decoder, oracle: transformers.PreTrainedModel) -> float:
    """Return the largest difference of a logit on packed rows; transformers computes each document alone."""
    tokens, positions, segments = packed()
    logits = ours(tokens, positions, segments)
    worst = 0.0
    for row in range(len(tokens)):
        for segment in segments[row].unique():
            document = segments[row] == segment
            expected = oracle(tokens[row, document][None]).logits[0]
            worst = max(worst, float((logits[row, document] - expected).abs().max()))
    return worst
