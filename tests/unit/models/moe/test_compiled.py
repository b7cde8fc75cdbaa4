"""A compiled bf16 block with experts is one graph, and computes what the plain one does."""

from __future__ import annotations

from typing import Any

import torch

from tidewheel.models import families
from tidewheel.models.attention import document_mask
from tidewheel.models.rope import rope_table


def test_a_compiled_block_is_one_graph_and_equals_the_plain_one():
    torch.manual_seed(0)
    config = families.KIND.build("mixtral", {"preset": "debug", "balancing": "auxiliary", "router_z_loss": 0.1})
    block = config.block(1)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    x = torch.randn(2, 32, 64)
    positions = torch.arange(32).expand(2, -1)
    shared = (rope_table(positions, config.rope(1)), document_mask(torch.zeros_like(positions)))

    def step(function: Any) -> list[torch.Tensor]:
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out, routing = function(given, *shared)
        out.sum().backward()
        gradients = [parameter.grad for parameter in block.parameters()]
        block.zero_grad()
        return [out, routing.counts, given.grad, *gradients]

    compiled = step(torch.compile(block, backend="aot_eager", fullgraph=True))
    for ours, plain in zip(compiled, step(block), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0.02, atol=0.005)
