"""FSDP2 with the mixed precision of CUDA, on two gloo ranks: weights are gathered in bf16.

The reference is one process in bf16 autocast, where the residual stream, the embedding and the norms are fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.gathers import as_on_cuda
from tests.ranks import on_ranks
from tests.unit.train.parallel.layouts import config, micro_batches, train
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.parallel.data_parallel import blocks
from tidewheel.train.precision import precision_context
from tidewheel.train.step import StepResult

LOSS_BOUND, NORM_BOUND = 2e-4, 1e-3
"""Relative differences in the first step, of equal parameters."""
LATER = 5e-4
"""Of the loss in the two steps after it: AdamW's first updates have the same size whatever the gradient's."""
TIED, CHUNKS = {"tie_embeddings": True}, {"chunk_tokens": 24}
LAYOUTS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"data": "zero3"}, {}), ({"data": "zero3"}, {"model": TIED, "loss": CHUNKS}),
    ({"data": "zero3", "reduce": "micro_batch"}, {"loss": CHUNKS}), ({"data": "zero2"}, {"model": TIED}),
    ({"data": "zero3", "context": 2}, {"model": TIED}), ({"tensor": 2}, {}))
"""A layout, and what the reference has too."""


def test_bf16_gathers_keep_the_loss_of_one_process():
    on_ranks(2, _every_layout)


def _every_layout() -> None:
    references: dict[str, list[StepResult]] = {}
    with as_on_cuda():
        for layout, changes in LAYOUTS:
            wanted = config(layout, precision="bf16", **changes)
            key = str(changes)
            if key not in references:
                references[key] = train(alone(wanted), 1, 3)[1]
            check(wanted, references[key])
    exactly_one_process_where_nothing_is_rounded()


def check(wanted: TrainConfig, expected: list[StepResult]) -> None:
    model, results = train(wanted, dist.get_world_size(), len(expected))
    for step, (ours, theirs) in enumerate(zip(results, expected)):
        difference = abs(ours.loss / theirs.loss - 1)
        assert difference < (LATER if step else LOSS_BOUND), f"{wanted.parallel}: step {step}: {difference:.1e}"
    norm = abs(results[0].gradient_norm / expected[0].gradient_norm - 1)
    assert norm < NORM_BOUND, f"{wanted.parallel}: norm {norm:.1e}"
    residual_stream_is_fp32(model)


def residual_stream_is_fp32(model: ParallelModel) -> None:
    """Check what the first block takes: the embedding is gathered in bf16, and the sum that starts with it is fp32."""
    seen: list[torch.dtype] = []
    hook = blocks(model.parts[0])[0].register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0].dtype))
    micro = micro_batches(0, model.mesh.data_rank, model.mesh.data_size)[0]
    model.evaluate(micro, precision_context(torch.device("cpu"), "bf16"))
    model.reshard()
    hook.remove()
    assert seen == [torch.float32]


def alone(wanted: TrainConfig) -> TrainConfig:
    return wanted.model_copy(update={"parallel": type(wanted.parallel)()})


def exactly_one_process_where_nothing_is_rounded() -> None:
    """The policy does nothing in fp32, and in reproducible mode all bits are those of one process."""
    with as_on_cuda():
        wanted = config({"data": "zero3"}, precision="bf16", reproducible=True)
        model, results = train(wanted, dist.get_world_size(), 2)
        reference, expected = train(alone(wanted), 1, 2)
    assert [result.loss for result in results] == [result.loss for result in expected]
    expected_values = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), expected_values[name]), name  # type: ignore[attr-defined]
