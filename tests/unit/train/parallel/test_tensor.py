"""Tests of tensor, sequence and loss parallelism on four gloo processes."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import on_ranks
from tests.unit.train.parallel.layouts import (
    LENGTH,
    MICRO,
    VOCABULARY,
    assert_same_training,
    config,
    micro_batches,
)
from tidewheel.inference.generate import generate
from tidewheel.train import parallel
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.runtime import Runtime

TIED = {"tie_embeddings": True}


def test_tensor_parallelism_on_four_ranks_equals_one_process():
    on_ranks(4, _all_checks)


def _all_checks() -> None:
    equal_to_one_process()
    no_rank_holds_whole_logits()
    evaluation_and_generation_agree()


def equal_to_one_process() -> None:
    """Train in layouts that `tests.benchmarks.equivalence` leaves out."""
    assert_same_training(config({"tensor": 4}, loss={"chunk_tokens": 24, "z_loss": 1e-2}), steps=2)
    assert_same_training(config({"tensor": 2, "data": "ddp"}, model={**TIED, "qk_norm": False},
                                loss={"z_loss": 1e-2}), steps=2)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest local tensor that any operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                self.elements = max(self.elements, local.numel())
        return out


def no_rank_holds_whole_logits() -> None:
    for world_size, layout in ((1, {}), (4, {"tensor": 4})):
        model = built(layout, world_size)
        with LargestTensor() as seen:
            model.forward_backward(micro_batches(0), contextlib.nullcontext())
        assert (seen.elements < MICRO * LENGTH * VOCABULARY) == (world_size > 1), f"{world_size}: {seen.elements}"


def evaluation_and_generation_agree() -> None:
    for layout in ({"tensor": 4}, {"tensor": 2, "context": 2}):
        alone, model, micro = built({}, 1), built(layout, 4), micro_batches(0)[0]
        expected, loss = alone.evaluate(micro), model.evaluate(micro).double()
        dist.all_reduce(loss)
        copies = 4 // model.mesh.size("tensor", "context")
        assert abs(loss.item() / copies / expected.item() - 1) < 1e-5, layout
        texts = [generate(m, [5, 6, 7], tokens=6, context=LENGTH, temperature=0) for m in (alone, model)]
        assert texts[0] == texts[1], layout
        model.reshard()


def built(layout: dict[str, Any], world_size: int) -> ParallelModel:
    model = parallel.build(config(layout), VOCABULARY, Runtime(dist.get_rank() % world_size, world_size))
    parallel.init_weights(model, seed=3)
    return model
