"""Inputs of blocks of a GPU in pinned host memory and on disk: the gradients of recomputation alone, in less memory.

Gradients are compared up to the order of sums, which attention's backward pass does not fix on a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu import on_gpu
from tests.unit.train.test_step import VOCABULARY, micro, rows
from tidewheel.models.decoder import Decoder
from tidewheel.models.families import Llama
from tidewheel.models.initial_values import init_parameter
from tidewheel.train import memory
from tidewheel.train.compile import compile_blocks
from tidewheel.train.memory import MemoryConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYERS = 12
MODEL = Llama(dim=256, num_layers=LAYERS, num_heads=4, num_kv_heads=2, ffn_dim=512, init_std=0.05)


def decoder(kind: str, disk: Path | None, compiled: bool) -> Decoder:
    config = MemoryConfig(activation_checkpointing=kind, activation_disk=str(disk or ""))  # type: ignore[arg-type]
    model = Decoder(MODEL, VOCABULARY)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_parameter(name, parameter.shape, MODEL, 0))
    memory.apply(model, config)
    if compiled:
        compile_blocks(model.blocks)
    memory.offload_inputs(model, config, torch.device("cuda"))
    return model.cuda()


def gradients(model: Decoder, repeats: int = 64) -> tuple[list[torch.Tensor], int]:
    """Return the gradients of three passes, and the bytes that the forward pass of the last one left on the GPU."""
    batch = on_gpu(micro(rows(4), 0, 4, 0))
    tensors = [tensor.repeat(repeats, 1) for tensor in (batch.tokens, batch.positions, batch.segment_ids,
                                                        batch.targets)]
    for _ in range(3):
        before = torch.cuda.memory_allocated()
        loss = model(*tensors)
        left = torch.cuda.memory_allocated() - before
        loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], left


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("disk", [False, True])
def test_gradients_and_memory(disk: bool, compiled: bool, tmp_path: Path):
    """The same inputs stay on the GPU for recomputation alone; the difference is all but two of them."""
    expected, all_here = gradients(decoder("full", None, compiled))
    found, left = gradients(decoder("offload", tmp_path if disk else None, compiled))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    size = 64 * rows(4)[0].numel() * MODEL.dim * 4
    assert all_here - left >= (LAYERS - 3) * size


def test_a_slow_gpu_changes_nothing(tmp_path: Path):
    """The host runs ahead while the GPU sleeps: no copy may be made before its input is there."""
    expected, _ = gradients(decoder("full", None, compiled=False))
    for disk in (None, tmp_path):
        model = decoder("offload", disk, compiled=False)
        for _, block in model.layers():
            block.register_forward_pre_hook(lambda *_: torch.cuda._sleep(5_000_000))
        for ours, theirs in zip(gradients(model)[0], expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
