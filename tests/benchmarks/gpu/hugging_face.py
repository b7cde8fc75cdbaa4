"""transformers' side: `LlamaForCausalLM` in the loop of its examples, compiled, with flash attention if it is there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import torch

from tests.benchmarks.gpu.case import SHAPES, Case, batches
from tests.benchmarks.gpu.timing import measure
from tidewheel.config import build
from tidewheel.models.families import Llama


def attention() -> str:
    """Return transformers' name of the fastest attention that can be imported here."""
    for module, name in (("flash_attn_interface", "flash_attention_3"), ("flash_attn", "flash_attention_2")):
        if torch.cuda.is_available() and importlib.util.find_spec(module) is not None:
            return name
    return "sdpa"


def train(case: Case) -> dict[str, Any]:
    """Measure the step."""
    import transformers

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    shape, kernel = build(Llama, SHAPES[case.shape]), attention()
    with torch.device(case.device):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=case.vocabulary, hidden_size=shape.dim, intermediate_size=shape.ffn_width,
            num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.kv_heads, head_dim=shape.head_width, rms_norm_eps=shape.norm_epsilon,
            max_position_embeddings=case.length, tie_word_embeddings=False, use_cache=False,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta}, attn_implementation=kernel))
    model.float().train()
    forward: Any = torch.compile(model) if case.compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.learning_rate, betas=(0.9, 0.95), weight_decay=0.1,
                                  fused=True)
    data = [[torch.from_numpy(array.copy()).to(case.device) for array in (documents.tokens, documents.following)]
            for documents in batches(case)]

    def step(index: int) -> torch.Tensor:
        tokens, targets = data[index % len(data)]
        with torch.autocast(case.device, torch.bfloat16):
            loss = forward(input_ids=tokens, labels=targets, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    note = f"transformers {importlib.metadata.version('transformers')}, {kernel}"
    return {**measure(step, case), "note": note if kernel != "sdpa" else f"{note} (flash-attn is not installed)"}
