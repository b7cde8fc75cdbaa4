"""Measure what each kind of activation checkpointing keeps and computes again.

    python -m tests.benchmarks.activation_table [--layers 16] [--length 1024]

A decoder with Llama 2 7B's blocks runs a forward and a backward pass on torch's fake tensors, with the real
checkpointing code: shapes, lifetimes of tensors and FLOPs are real, values are not. The table counts the bytes that are
alive between the passes, and the FLOPs of matrix products in the backward pass beyond those without checkpointing. Up
to 1,024 tokens the attention of a CPU is batched products, so its scores are kept as in the formulas of
https://arxiv.org/abs/2205.05198 (section 4), which are beside: s b h (34 + 5 a s / h) bytes a layer, and s b h 34 with
attention recomputed. They are of a GPT block with dropout masks; ours has SwiGLU and no dropout.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tidewheel.models.decoder import Decoder
from tidewheel.models.families import Llama
from tidewheel.train.memory import MemoryConfig, apply

KINDS: dict[str, dict[str, Any]] = {
    "none": {}, "attention": {"activation_checkpointing": "attention"},
    "feed_forward": {"activation_checkpointing": "feed_forward"},
    "selective": {"activation_checkpointing": "selective"},
    "selective, all products kept": {"activation_checkpointing": "selective", "recompute_products": 0},
    "every_nth, every: 2": {"activation_checkpointing": "every_nth"},
    "every_nth, every: 4": {"activation_checkpointing": "every_nth", "every": 4},
    "every_nth, every: sqrt": {"activation_checkpointing": "every_nth", "every": "sqrt"},
    "full": {"activation_checkpointing": "full"}}
"""The rows, and the settings of `memory` in each."""
HEADS, DIM, VOCABULARY = 32, 4096, 1024


class Living(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that are still alive.

    Args:
        others: tensors whose views do not count.
    """

    def __init__(self, others: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._others = {tensor.untyped_storage()._cdata for tensor in others}
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in tree_leaves(result):
            if isinstance(item, torch.Tensor):
                storage = item.untyped_storage()
                if storage._cdata not in self._others:
                    self._seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def bytes(self) -> int:
        """Return the bytes that are alive now."""
        gc.collect()
        return sum(size for reference, size in self._seen.values() if not reference.expired())


def measure(memory: dict[str, Any], layers: int, length: int) -> tuple[float, float, float]:
    """Return bytes per token alive between the passes, and the FLOPs of the forward and the backward pass.

    Args:
        memory: settings of activation checkpointing.
        layers: blocks of the decoder.
        length: tokens of a row.
    """
    shape = Llama(dim=DIM, num_layers=layers, num_heads=HEADS, ffn_dim=11008, qk_norm=False)
    with torch.device("meta"):
        decoder = Decoder(shape, VOCABULARY).to(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in decoder.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype)))
        apply(decoder, MemoryConfig.model_validate(memory))
        tokens = torch.zeros(1, length, dtype=torch.int64)
        with FlopCounterMode(display=False) as forward, Living(decoder.parameters()) as living:
            loss = decoder(tokens, tokens, tokens, tokens)
        kept = living.bytes()
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    return kept / length, forward.get_total_flops(), backward.get_total_flops()


def table(layers: int, length: int) -> list[dict[str, float | str]]:
    """Return a row of figures for each kind: bytes per token and layer, its share of none, shares of FLOPs."""
    one, two = (measure({}, count, length)[0] for count in (1, 2))
    ends = 2 * one - two  # embedding, final norm and logits, whatever is checkpointed
    rows: list[dict[str, float | str]] = []
    base: tuple[float, float, float] | None = None
    for name, memory in KINDS.items():
        kept, forward, backward = measure(memory, layers, length)
        if base is None:
            base = kept - ends, forward, backward
        again = (backward - base[2]) / base[1]
        rows.append({"kind": name, "bytes": (kept - ends) / layers, "kept": (kept - ends) / base[0], "again": again,
                     "more": (backward - base[2]) / (base[1] + base[2])})
    return rows


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--layers", type=int, default=16)
    arguments.add_argument("--length", type=int, default=1024)
    options = arguments.parse_args()
    print("| activation_checkpointing | KB a token and layer | kept | forward pass computed again | more FLOPs |")
    print("|---|---|---|---|---|")
    for row in table(options.layers, options.length):
        print(f"| {row['kind']} | {row['bytes'] / 1e3:.1f} | {row['kept']:.1%} | {row['again']:.1%} | "  # type: ignore[operator]
              f"{row['more']:.1%} |")
    scores = 5 * HEADS * options.length / DIM
    print(f"\nformulas of arXiv:2205.05198: {DIM * (34 + scores) / 1e3:.1f} KB with everything kept, "
          f"{DIM * 34 / 1e3:.1f} ({34 / (34 + scores):.1%}) with attention recomputed, {2 * DIM / 1e3:.1f} with inputs "
          "alone and a third more FLOPs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
