"""Tests of torch.compile per block: the same losses, one compilation for all blocks, a cache on disk."""

import functools
import os

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils.checkpoint import checkpoint

from tidewheel.models.decoder import Decoder, next_tokens
from tidewheel.models.families import Llama
from tidewheel.models.initial_values import init_parameter
from tidewheel.train.compile import compile_blocks, use_cache

MODEL = Llama(dim=16, num_layers=2, num_heads=2, ffn_dim=32)


def losses(model: Decoder, steps: int = 2) -> list[float]:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_parameter(name, parameter.shape, MODEL, 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    tokens = torch.arange(32).reshape(2, 16) % 24
    segments, positions = torch.zeros_like(tokens), torch.arange(16).expand(2, 16)
    results = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(tokens, positions, segments, next_tokens(tokens, segments))
        loss.backward()
        optimizer.step()
        results.append(loss.item())
    return results


@pytest.mark.parametrize("checkpointed", [False, True])
def test_one_graph_serves_all_blocks_and_gives_the_same_losses(checkpointed: bool):
    torch._dynamo.reset()
    expected = losses(Decoder(MODEL, 24))
    model, counter = Decoder(MODEL, 24), CompileCounterWithBackend("aot_eager")
    names = [name for name, _ in model.named_parameters()]
    if checkpointed:
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    compile_blocks(model.blocks, backend=counter)
    assert losses(model) == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        for length in (3, 5, 8):  # the lengths of a growing text sample
            tokens = torch.ones(1, length, dtype=torch.int64)
            model(tokens, torch.arange(length)[None], torch.zeros_like(tokens))
    assert counter.frame_count == 1, "all blocks share one compilation"
    assert [name for name, _ in model.named_parameters()] == names


def test_the_cache_is_in_the_configured_folder(tmp_path, monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "elsewhere")
    use_cache("")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    use_cache(str(tmp_path / "cache"))
    assert cache_dir() == str(tmp_path / "cache")
