"""Compare the time of a block with experts with a dense block of equal active FLOPs, and with transformers' experts.

    python -m tests.benchmarks.moe [--rounds 7] [--tokens 2048] [--bf16]

Each row is one block, forward and backward, on one thread, in CPU time, the best of some rounds in turns. The dense
block has a feed-forward as wide as the experts of a token together, so it computes the same FLOPs. `of dense` is the
time with experts over that of the dense block. `of peer` compares the feed-forwards alone: ours over the block of
transformers with its `grouped_mm` back end and the same weights. The exit code is 1 when a ratio to the dense block
exceeds the goal where it is checked, with 8 experts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tidewheel.console import print_table
from tidewheel.models import families
from tidewheel.models.attention import document_mask
from tidewheel.models.rope import rope_table

GOAL = 1.25
ROWS = 8


@dataclass(frozen=True)
class Case:
    """Shape of a layer."""

    dim: int
    inner: int
    experts: int
    per_token: int
    checked: bool = True
    """Whether the ratio to the dense block must reach the goal."""


CASES = (Case(256, 512, 8, 2), Case(512, 512, 8, 2), Case(256, 128, 64, 8, checked=False))


def random_weights(module: nn.Module) -> None:
    """Set all weights to random numbers of a usual size."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


def blocks(case: Case) -> tuple[nn.Module, nn.Module]:
    """Return a block with experts and the dense block of equal active FLOPs."""
    shape = {"dim": case.dim, "num_layers": 1, "num_heads": case.dim // 64}
    sparse = families.KIND.build("mixtral", {**shape, "ffn_dim": case.inner, "num_experts": case.experts,
                                             "experts_per_token": case.per_token})
    dense = families.KIND.build("llama", {**shape, "ffn_dim": case.inner * case.per_token, "qk_norm": False})
    made = sparse.block(0), dense.block(0)
    for block in made:
        random_weights(block)
    return made


def peer(case: Case, ours: Any) -> nn.Module:
    """Return transformers' experts with the weights of ours."""
    import transformers
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = transformers.MixtralConfig(
        hidden_size=case.dim, intermediate_size=case.inner, num_local_experts=case.experts,
        num_experts_per_tok=case.per_token, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4)
    config._experts_implementation = "grouped_mm"
    block = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        block.gate.weight.copy_(ours.router.weight)
        block.experts.gate_up_proj.copy_(torch.cat((ours.experts.w1, ours.experts.w3), dim=1))
        block.experts.down_proj.copy_(ours.experts.w2)
    return block


def passes(module: nn.Module, x: torch.Tensor, *shared: Any) -> Callable[[], torch.Tensor]:
    """Return a function that runs one forward and backward pass and returns the output."""
    sent = torch.randn_like(x)

    def run() -> torch.Tensor:
        given = x.clone().requires_grad_()
        out = module(given, *shared)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(sent.to(out.dtype))
        for parameter in module.parameters():
            parameter.grad = None
        return out.detach()

    return run


def best(functions: dict[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, float]:
    """Return the least CPU seconds of each function, which run in turns."""
    seconds = dict.fromkeys(functions, float("inf"))
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.process_time()
            function()
            seconds[name] = min(seconds[name], time.process_time() - start)
    return seconds


def measure(case: Case, tokens: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Return the row of a case.

    Args:
        case: the shape.
        tokens: of the micro-batch.
        dtype: of the products, by autocast; the peer's weights have it.
        rounds: of which the best counts.
    """
    torch.manual_seed(0)
    sparse, dense = blocks(case)
    x = torch.randn(ROWS, tokens // ROWS, case.dim)
    positions = torch.arange(x.shape[1]).expand(ROWS, -1)
    rope = families.KIND.build("llama", {"dim": case.dim, "num_heads": case.dim // 64}).rope(0)
    shared = (rope_table(positions, rope), document_mask(torch.zeros_like(positions)))
    theirs = peer(case, sparse.ffn)
    lowered = dtype != torch.float32
    with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
        seconds = best({"experts": passes(sparse, x, *shared), "dense": passes(dense, x, *shared),
                        "ours": passes(sparse.ffn, x)}, rounds)
        theirs = theirs.to(dtype)
    functions = {"theirs": passes(theirs, x.to(dtype))}
    if not lowered:
        torch.testing.assert_close(passes(sparse.ffn, x)(), functions["theirs"](), rtol=1e-3, atol=1e-4)
    seconds |= best(functions, rounds)
    ratio = seconds["experts"] / seconds["dense"]
    return {"dim": case.dim, "inner": case.inner, "experts": f"{case.per_token} of {case.experts}",
            "dtype": str(dtype).removeprefix("torch."), "experts, ms": round(1e3 * seconds["experts"], 1),
            "dense, ms": round(1e3 * seconds["dense"], 1), "of dense": round(ratio, 2),
            "of peer": round(seconds["ours"] / seconds["theirs"], 2),
            "within": int(ratio <= GOAL) if case.checked else "-"}


def main() -> int:
    """Measure all shapes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--bf16", action="store_true", help="measure bf16 products as well")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dtypes = [torch.float32, torch.bfloat16] if chosen.bf16 else [torch.float32]
    table = [measure(case, chosen.tokens, dtype, chosen.rounds) for dtype in dtypes for case in CASES]
    print_table(table, title=f"one block, {chosen.tokens} tokens, one thread")
    return int(any(row["within"] == 0 for row in table))


if __name__ == "__main__":
    sys.exit(main())
