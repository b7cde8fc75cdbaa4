"""Count what a training step of a GPU waits for and writes, on a machine without one.

    python -m tests.benchmarks.step_counters [--preset 1b] [--rows 8] [--length 4096] [--document 600]

- Attention: operators whose result the host needs (`nonzero`, `item`), in a forward and backward pass of one
  micro-batch of packed documents. The model runs on torch's meta device with the kernels that an H100 gets.
- Loss: buffers of the size of a chunk's logits in the code that inductor generates for the gradient of the logits,
  which here is C++ for the CPU. Fusion and buffers are decided before the language is.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental import _config as fx_config
from torch.utils._python_dispatch import TorchDispatchMode

from tidewheel.config import build
from tidewheel.console import print_table
from tidewheel.models.attention_kernels import Machine
from tidewheel.models.decoder import Decoder, next_tokens
from tidewheel.models.documents import Documents
from tidewheel.models.families import Llama
from tidewheel.models.loss import IGNORED, token_gradients

H100 = Machine("cuda", (9, 0))
VOCABULARY = 128_256
WAITS = {torch.ops.aten.nonzero: "nonzero", torch.ops.aten._local_scalar_dense: "item"}
"""Operators after which the host needs a value from the device."""
BUFFER = re.compile(r"empty_strided_\w+\(\((\d+), (\d+)\), \([^)]*\), torch\.(\w+)\)")
Gradients = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


def main() -> int:
    """Print both tables; return 1 if a step waits or writes a buffer that it should not."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--preset", default="1b")
    arguments.add_argument("--rows", type=int, default=8)
    arguments.add_argument("--length", type=int, default=4096)
    arguments.add_argument("--document", type=int, default=600)
    options = arguments.parse_args()
    model = build(Llama, {"preset": options.preset})
    segments = (torch.arange(options.length) // options.document).expand(options.rows, -1).contiguous()
    waits = {name: attention_waits(model, segments, layout) for name, layout in (
        ("documents found on the device", None), ("documents from the host", Documents.of(segments)))}
    print_table([{"": name, **{wait: str(counts[wait]) for wait in WAITS.values()},
                  "varlen": str(counts["_varlen_attn"])} for name, counts in waits.items()],
                title=f"{options.preset}, one micro-batch of {options.rows} x {options.length} tokens: operators")
    buffers = {"with scatter_add_": loss_buffers(scattered_gradients), "token_gradients": loss_buffers(token_gradients)}
    print_table([{"": name, "bytes a logit": f"{sum(found.values()):.0f}",
                  "buffers": ", ".join(f"{dtype} {size:.0f}" for dtype, size in found.items())}
                 for name, found in buffers.items()],
                title="compiled gradient of bf16 logits: buffers of their shape, the result included")
    clean = not any(waits["documents from the host"][wait] for wait in WAITS.values())
    return 0 if clean and set(buffers["token_gradients"]) == {"bfloat16"} else 1


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), kwargs: Any = None) -> Any:
        packet = function.overloadpacket if hasattr(function, "overloadpacket") else function
        self.counts[WAITS.get(packet, str(packet).rpartition(".")[2])] += 1
        return function(*arguments, **(kwargs or {}))


def attention_waits(model: Llama, segments: torch.Tensor, documents: Documents | None) -> Counter[str]:
    """Return the number of times that each operator runs in a forward and backward pass of one micro-batch.

    Args:
        model: the model's shape.
        segments: int64 [B, L], a value for each document of a row.
        documents: their layout, if it was computed while the batch was loaded.
    """
    with torch.device("meta"):
        decoder, tokens = Decoder(model, VOCABULARY).to(torch.bfloat16), torch.zeros(segments.shape, dtype=torch.int64)
    targets = next_tokens(tokens, segments.to("meta"))
    layout = None if documents is None else documents.to("meta")
    # on the meta device `nonzero` has as many results as elements
    with (mock.patch.object(Machine, "of", return_value=H100), Operators() as operators,
          mock.patch.object(fx_config, "meta_nonzero_assume_all_nonzero", True)):
        decoder(tokens, tokens, segments.to("meta"), targets, documents=layout).backward()
    return operators.counts


def scattered_gradients(logits_NV: torch.Tensor, targets_N: torch.Tensor,
                        z_loss: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `token_gradients` returns, with the scatter that it had before.

    Args:
        logits_NV: whole logits.
        targets_N: int64.
        z_loss: not used.
    """
    logits, known = logits_NV.float(), targets_N != IGNORED
    safe = targets_N.clamp(min=0)[:, None]
    normalisers = logits.logsumexp(dim=-1)
    loss = (normalisers - logits.gather(1, safe)[:, 0]).masked_fill(~known, 0.0).sum()
    gradient = (logits - normalisers[:, None]).exp()
    gradient.scatter_add_(1, safe, gradient.new_full((1, 1), -1.0).expand_as(safe))
    return loss, gradient.masked_fill_(~known[:, None], 0.0).to(logits_NV.dtype)


def loss_buffers(gradients: Gradients, tokens: int = 64, vocabulary: int = 1024) -> dict[str, float]:
    """Return the bytes per logit, by dtype, that compiled code allocates in buffers of the logits' shape.

    Args:
        gradients: `token_gradients`, or a function to compare with it.
        tokens: rows of the logits.
        vocabulary: columns of the logits.
    """
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, vocabulary, generator=generator).bfloat16()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    found, codes = run_and_get_code(torch.compile(gradients, fullgraph=True), logits, targets, 0.0)
    torch.testing.assert_close(found, token_gradients(logits, targets, 0.0))
    sizes: dict[str, float] = {}
    for code in codes:
        for rows, columns, dtype in BUFFER.findall(code):
            if (int(rows), int(columns)) == (tokens, vocabulary):
                sizes[dtype] = sizes.get(dtype, 0.0) + getattr(torch, dtype).itemsize
    return sizes


if __name__ == "__main__":
    sys.exit(main())
