"""Tests of every pipeline schedule against the whole decoder in one process."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.ranks import on_ranks
from tidewheel.config import build
from tidewheel.models.decoder import Decoder, next_tokens
from tidewheel.models.initial_values import init_parameter
from tidewheel.train import parallel
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.parallel.stages import SCHEDULES
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import MicroBatch

VOCABULARY, LENGTH, SEED, SCALE = 64, 16, 3, 0.5


def config(layout: dict[str, Any], layers: int = 2, tied: bool = True, **more: Any) -> TrainConfig:
    model = {"dim": 16, "num_layers": layers, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 32, "tie_embeddings": tied}
    batch = {"global_sequences": 16, "micro_sequences": 2, "virtual_ranks": 2}
    return build(TrainConfig, {"model": model, "parallel": layout, "batch": batch, "elastic": {"max_workers": 4},
                               **more})


def micro_batches(data_rank: int, number: int = 4) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(data_rank)
    batches = []
    for index in range(number):
        tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
        segments = (torch.arange(LENGTH) >= 5 + index).long().expand(2, -1)
        positions = torch.where(segments == 1, torch.arange(LENGTH) - 5 - index, torch.arange(LENGTH))
        targets = next_tokens(tokens, segments)
        batches.append(MicroBatch(tokens, positions, segments, targets, data_rank, tokens.numel(),
                                  int((targets >= 0).sum())))
    return batches


def alone(wanted: TrainConfig) -> Decoder:
    model = Decoder(wanted.model, VOCABULARY)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_parameter(name, parameter.shape, wanted.model, SEED))
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(wanted: TrainConfig) -> ParallelModel:
    """Check that losses, gradients, evaluation and logits equal those of one process with all rows."""
    model = parallel.build(wanted, VOCABULARY, Runtime(dist.get_rank(), dist.get_world_size()))
    parallel.init_weights(model, SEED)
    mesh, reference, where = model.mesh, alone(wanted), str(wanted.parallel)
    losses: list[list[torch.Tensor]] = []
    for rank in range(mesh.data_size):
        sums = [reference(m.tokens, m.positions, m.segment_ids, m.targets) for m in micro_batches(rank)]
        (torch.stack(sums).sum() * SCALE).backward()
        losses.append([value.detach() for value in sums])
    mine, expected = micro_batches(mesh.data_rank), torch.stack(losses[mesh.data_rank])

    evaluated = torch.stack([model.evaluate(micro) for micro in mine])
    model.reshard()
    torch.testing.assert_close(of_all(model, evaluated), expected, rtol=1e-5, atol=0, msg=where)
    for step in range(2):  # buffers of the schedule are used again
        model.zero_grad()
        reported = model.forward_backward(mine, nullcontext(), SCALE)
        torch.testing.assert_close(of_all(model, reported), expected, rtol=1e-5, atol=0, msg=f"{where} {step}")
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(whole(parameter.grad), reference.get_parameter(name).grad, rtol=1e-4, atol=1e-5,
                                       msg=f"{where} {step} {name}")
    first = mine[0]
    logits = model(first.tokens, first.positions, first.segment_ids)
    model.reshard()
    expected = reference(first.tokens, first.positions, first.segment_ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5, msg=where)
    held: list[list[str]] = [[] for _ in range(mesh.world_size)]
    dist.all_gather_object(held, [name for name, _ in model.named_parameters()] if mesh.coordinate(
        "replicate", "shard", "context", "tensor") == 0 else [])
    assert sorted(name for names in held for name in names) == sorted(dict(reference.named_parameters())), where
    return model


def of_all(model: ParallelModel, values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the values that ranks with the same rows report."""
    total = values.clone()
    for dim in ("pipeline", "context", "tensor"):
        if (group := model.mesh.group(dim)) is not None:
            dist.all_reduce(total, group=group)
    return total


def every_schedule() -> None:
    for schedule in SCHEDULES:
        layout = {"pipeline": 2, "pipeline_schedule": schedule}
        check(config({**layout, "data": "zero2"}, loss={"chunk_tokens": 8}))
        check(config({**layout, "data": "zero1"}, tied=False, memory={"activation_checkpointing": "full"}))
        check(config({**layout, "pipeline": 4}, layers=6))


def test_every_schedule_gives_the_losses_and_gradients_of_one_process():
    on_ranks(4, every_schedule)
