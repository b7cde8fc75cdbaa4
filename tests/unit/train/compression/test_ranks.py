"""Compressed gradients on several ranks: bits, bytes, resharded residuals, withheld steps, and torch's PowerSGD."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import on_ranks
from tests.unit.train.parallel import layouts
from tidewheel import storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.train import compressions, parallel
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.parallel.coded import Coded
from tidewheel.train.parallel.traffic import Traffic
from tidewheel.train.runtime import Runtime

STEPS = 2
KINDS = {"topk": {"density": 0.1}, "randomk": {"density": 0.1}, "quantised": {}, "quantised 4": {"bits": 4},
         "one_bit": {}, "power_sgd": {"rank": 2}, "topk off": {"density": 0.1, "error_feedback": False},
         "topk late": {"density": 0.1, "warmup_steps": 1, "only": ["blocks.*"]}}


def config(name: str, data: str = "ddp", **changes: Any) -> TrainConfig:
    settings = {"kind": name.split()[0], "smallest": 512, **KINDS[name]}
    return layouts.config({"data": data}, compression=settings, **changes)


def digest(model: ParallelModel) -> str:
    """Return a hash of all parameters; all ranks call it together."""
    whole = hashlib.sha256()
    for _, value in sorted(layouts.whole_values(model).items()):
        whole.update(value.numpy().tobytes())
    return whole.hexdigest()


def in_order() -> dict[str, str]:
    """Return the digest of each kind after a few steps in reproducible mode."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    digests = {}
    for name in KINDS:
        wanted = config(name, "zero1" if size == 4 else "ddp", reproducible=True)
        digests[name] = digest(layouts.train(wanted, size, STEPS)[0])
    return digests


def residuals(model: ParallelModel) -> dict[str, torch.Tensor]:
    """Return the sum of residuals over all ranks by parameter."""
    coded = model.data[0].coded
    assert coded is not None
    sums = {name: value.sum(dim=0) for name, value in coded.residuals().items()}
    for value in sums.values():
        if dist.is_initialized():
            dist.all_reduce(value)
    return sums


def built(name: str) -> ParallelModel:
    size = dist.get_world_size() if dist.is_initialized() else 1
    return parallel.build(config(name), layouts.VOCABULARY, Runtime(dist.get_rank() if size > 1 else 0, size))


def saved(folder: Path) -> None:
    """Train on two ranks, and save; the same ranks then load bit for bit what they had."""
    for name in ("topk", "power_sgd"):
        model, _ = layouts.train(config(name), 2, STEPS)
        manager = CheckpointManager(storage.store(folder / name), asynchronous=False)
        manager.save(STEPS, {"compression": model.compression_state()}, {})
        sums = residuals(model)
        if dist.get_rank() == 0:
            np.savez(folder / f"{name}.npz", **{key: value.numpy() for key, value in sums.items()})
        again = built(name)
        manager.load_latest({"compression": again.compression_state()})
        mine, theirs = model.data[0].coded, again.data[0].coded
        assert mine is not None
        assert theirs is not None
        for key, value in mine.residuals().items():
            assert value.any()
            assert torch.equal(theirs.residuals()[key], value), key
        assert int(again.compression_state()["count"]) == STEPS


def loaded(folder: Path) -> None:
    """Load what two ranks saved; the sums of the residuals must be the same."""
    for name in ("topk", "power_sgd"):
        model = built(name)
        CheckpointManager(storage.store(folder / name)).load_latest({"compression": model.compression_state()})
        with np.load(folder / f"{name}.npz") as sums:
            for key, value in residuals(model).items():
                np.testing.assert_allclose(value.numpy(), sums[key], rtol=1e-6, atol=1e-6)


@contextmanager
def counted() -> Iterator[list[float]]:
    """Count what goes into torch.distributed's collectives in a block, as a ring or pairs send it."""
    sent = [0.0]
    size = dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        def count(name: str, module: Any, which: int, factor: float) -> None:
            real = getattr(module, name)

            def call(*arguments: Any, **named: Any) -> Any:
                if arguments[which].dtype != torch.float64:  # the report of the step
                    sent[0] += factor * arguments[which].nbytes
                return real(*arguments, **named)

            patch.setattr(module, name, call)

        from tidewheel.train.parallel import traffic

        count("all_reduce", dist, 0, 2 * (size - 1) / size)
        count("all_to_all_single", dist, 1, (size - 1) / size)
        count("_all_gather", traffic, 1, size - 1)
        yield sent


def few_bytes() -> None:
    """Compare the counter with the collectives themselves, and with what the part promises."""
    size = dist.get_world_size()
    whole = layouts.config({"data": "ddp"})
    with counted() as sent:
        model, _ = layouts.train(whole, size, 1)
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert sent[0] == pytest.approx(2 * (size - 1) / size * 4 * elements)
    for name in ("topk", "randomk", "quantised", "quantised 4", "one_bit", "power_sgd"):
        wanted = config(name)
        part = wanted.compression
        assert part is not None
        runtime = Runtime(dist.get_rank(), size)
        model = parallel.build(wanted, layouts.VOCABULARY, runtime)
        parallel.init_weights(model, seed=3)
        taken = {key: value for key, value in model.named_parameters() if part.takes(key, value.shape)}
        others = sum(value.numel() for key, value in model.named_parameters() if key not in taken)
        promised = sum(part.sent_bytes(value.shape, size) for value in taken.values())
        with counted() as compressed:
            model.forward_backward(layouts.micro_batches(0, model.mesh.data_rank, size), torch.enable_grad())
        rest = 2 * (size - 1) / size * 4 * others
        assert compressed[0] == model.gradient_bytes()
        padding = 16 * len(taken) * size  # messages are cut at multiples of 8 bytes
        assert promised + rest <= compressed[0] + 1 <= promised + rest + padding + 1, name
        if name not in ("randomk", "power_sgd", "topk"):  # the elements of a piece
            assert compressed[0] < sent[0] / 2.5, name


def withheld() -> None:
    """A step whose update is withheld leaves residuals and factors as they were."""
    model, _ = layouts.train(config("power_sgd"), 2, STEPS)
    before = {name: value.clone() for name, value in model.compression_state().items()}
    batches = layouts.micro_batches(9, model.mesh.data_rank, 2)
    for skip, same in ((torch.tensor(1.0), True), (torch.tensor(0.0), False), (None, False)):
        model.zero_grad()
        model.forward_backward(batches, torch.enable_grad())
        model.keep_unsent(skip)
        changed = {name for name, value in model.compression_state().items()
                   if not torch.equal(layouts.whole(value), layouts.whole(before[name]))}
        assert changed == ({"count"} if same else set(before))


def buckets() -> None:
    """Smaller buckets give the same sums: parameters travel in other messages, in the same order on all ranks."""
    losses = set()
    for size in (1024, 20_000, 25 * 2**20):
        for compression in (None, {"kind": "quantised", "smallest": 512, "only": ["blocks.1.*", "output.*"]}):
            wanted = layouts.config({"data": "ddp", "bucket_bytes": size}, compression=compression)
            model, results = layouts.train(wanted, dist.get_world_size(), STEPS)
            losses.add((compression is None, round(results[-1].loss, 5), round(results[-1].gradient_norm, 4)))
            assert len(model.data[0]._buckets) > (10 if size == 1024 else 0)  # type: ignore[attr-defined]
    assert len(losses) == 2


def as_torch() -> None:
    """Compare sums and residuals over several steps with torch's PowerSGD hook of DistributedDataParallel."""
    rank, size, steps, columns = 3, dist.get_world_size(), 6, 40
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    generator = torch.Generator().manual_seed(dist.get_rank())
    gradients = torch.randn(steps, 30, columns, generator=generator)
    part = compressions.KIND.build("power_sgd", {"rank": rank, "warmup_steps": 2, "smallest": 1})
    parameter = nn.Parameter(torch.zeros(30, columns))
    ours = Coded(part, [("w", parameter)], mesh, seed=0, traffic=Traffic())

    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(30, columns))
    module.forward = lambda gradient: (module.w * gradient).sum()  # type: ignore[method-assign]
    theirs = nn.parallel.DistributedDataParallel(module)
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2, random_seed=11)
    theirs.register_comm_hook(state, powerSGD_hook)
    with torch.random.fork_rng(devices=[]):  # torch's first factor
        torch.manual_seed(np.random.RandomState(11).randint(1_000_000_000))
        ours.state()["factor/w"].copy_(torch.randn(1, columns, rank)[0])
    for gradient in gradients:
        module.w.grad = None
        theirs(gradient).backward()
        parameter.grad = gradient.clone()
        ours.begin()
        ours.send([parameter])
        [[total]] = list(ours.totals())
        ours.keep(None)
        assert module.w.grad is not None
        torch.testing.assert_close(total.view(30, columns) / size, module.w.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.residuals()["w"].flatten(), state.error_dict[0], rtol=1e-4, atol=1e-5)


def two(folder: Path) -> None:
    digests = in_order()
    if dist.get_rank() == 0:
        (folder / "two.json").write_text(json.dumps(digests))
    saved(folder)
    few_bytes()
    buckets()
    withheld()
    as_torch()


def four(folder: Path) -> None:
    digests = in_order()
    if dist.get_rank() == 0:
        (folder / "four.json").write_text(json.dumps(digests))
    loaded(folder)


def test_compressed_gradients_on_several_ranks(tmp_path: Path):
    on_ranks(2, two, tmp_path)
    on_ranks(4, four, tmp_path)
    alone = in_order()
    assert len(set(alone.values())) == len(KINDS)
    assert json.loads((tmp_path / "two.json").read_text()) == alone
    assert json.loads((tmp_path / "four.json").read_text()) == alone
    loaded(tmp_path)
