"""CPU offload in a plan: the traffic of the update, the copies, host memory, and a speed as published ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.unit.plan.test_recipes import job_of
from tidewheel.cli import run_command
from tidewheel.config import build, load
from tidewheel.plan.hardware import GPUS, ClusterConfig
from tidewheel.plan.held import held
from tidewheel.plan.layout import Job, Layout, shares
from tidewheel.plan.layouts import own, rank
from tidewheel.plan.offload import HOST_SHARE, host_bytes, transfers, update_seconds
from tidewheel.plan.step_time import step_time
from tidewheel.train.config import TrainConfig
from tidewheel.train.memory.config import MemoryConfig
from tidewheel.train.optim.base import Optimizer
from tidewheel.train.parallel.config import ParallelConfig

CLUSTER = ClusterConfig(gpus=2, gpu="rtx4090", nodes_of=2)


class Traffic(TorchDispatchMode):
    """Bytes that operations on large tensors read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        in_place = func.__name__.split(".")[0].endswith("_")
        for values in (args, args[0] if in_place and args else out):
            self.bytes += sum(item.nbytes for item in tree_leaves(values)
                              if isinstance(item, torch.Tensor) and item.numel() > 1)
        return out


def test_the_traffic_of_an_update_on_a_cpu():
    parameter = torch.nn.Parameter(torch.randn(1000))
    parameter.grad = torch.randn(1000)
    optimizer = torch.optim.AdamW([parameter], foreach=True)
    optimizer.step()  # allocates the state
    with Traffic() as counted:
        optimizer.step()
    assert counted.bytes == Optimizer.HOST_TRAFFIC * parameter.numel()


def test_published_update_times():
    """PyTorch's Adam on a DGX-2 takes 1.39, 2.75, 5.71 and 11.93 s for 1, 2, 4 and 8 billion parameters
    (arXiv:2101.06840, table 4)."""
    host = GPUS["h100"].model_copy(update={"host_bandwidth": 256e9})
    unfused, fused = (Job(build(TrainConfig, {"optimizer": {"kind": kind}}), 512, 64) for kind in ("lion", "adamw"))
    for billions, seconds in ((1, 1.39), (2, 2.75), (4, 5.71), (8, 11.93)):
        assert update_seconds(unfused, billions * 1e9, host) == pytest.approx(seconds, rel=0.2)
        assert update_seconds(fused, billions * 1e9, host) < seconds / 2


def test_8b_on_eight_a100_with_offload_takes_20_to_40_percent_longer():
    """As published for ZeRO-Offload and ZeRO-3 offload: the same layout, without and with offload."""
    changes = ["parallel.data=zero3", "batch.global_sequences=64", "batch.virtual_ranks=8", "batch.micro_sequences=4",
               "memory.activation_checkpointing=full"]
    times = {}
    for offload in (False, True):
        config = load(TrainConfig, "jobs/configs/llama_8b.yaml", [*changes, f"parallel.offload={offload}"])
        planned, reason = own(Job(config, 128_256, 8192), ClusterConfig(gpus=8, gpu="a100"))
        assert planned is not None
        assert not reason
        times[offload] = planned.time.seconds
    assert 1.2 < times[True] / times[False] < 1.4


def alone(**settings: Any) -> Job:
    values = {"model": {"preset": "1b"}, "precision": "bf16", "compile": True,
              "checkpoint": {"memory_tier": {"every_steps": 0}},
              "parallel": {"data": "zero3", "offload": True}, "elastic": {"max_workers": 1},
              "batch": {"global_sequences": 8, "micro_sequences": 4, "virtual_ranks": 1}, **settings}
    return Job(build(TrainConfig, values), 128_256, 4096)


ONE = ClusterConfig(gpus=1, gpu="rtx4090", nodes_of=1)


def test_one_gpu_offloads_and_waits_for_its_copies():
    """FSDP2 of one rank copies a unit when it is needed: nothing hides that."""
    job = alone()
    planned, reason = own(job, ONE)
    assert planned is not None, reason
    assert planned.layout.sharded
    assert planned.host == 16 * job.parameters
    copies = 2 * (job.parameters + job.model.num_layers * job.block_matrices) * 4 / 25e9
    assert planned.time.axes[-1].exposed > copies


def test_state_on_disk_is_counted_in_bytes_and_time():
    disk = {"optimizer_disk": "/local_nvme", "activation_checkpointing": "full"}
    planned, reason = own(alone(memory=disk), ONE)
    without, _ = own(alone(memory={"activation_checkpointing": "full"}), ONE)
    assert planned is not None, reason
    assert without is not None
    parameters = alone().parameters
    assert planned.disk == 2 * 8 * parameters, "a save has a copy"
    assert without.disk == 0
    # four pieces are in memory, of the state of the embedding, the largest parameter
    assert planned.host == pytest.approx(without.host - 8 * parameters + 4 * 8 * alone().vocabulary_matrix)
    assert planned.time.optimizer == pytest.approx(max(without.time.optimizer, 2 * 8 * parameters / 3e9))
    assert {item.layout.memory.optimizer_disk for item in rank(alone(memory=disk), ONE).fitting} == {"/local_nvme"}
    _, reason = own(alone(memory=disk), ONE.model_copy(update={"disk_gb": 5.0}))
    assert "GB of local disk for each GPU, which has 5.0 (--assume disk_gb=...)" in reason


def test_inputs_of_blocks_on_disk_are_counted_in_bytes_and_time():
    """Four of them are in host memory; a slow disk takes longer than the passes."""
    values = {"activation_checkpointing": "offload"}
    plans = {}
    for name, memory, disk in (("host", values, 3.0), ("disk", {**values, "activation_disk": "/local_nvme"}, 3.0),
                               ("slow disk", {**values, "activation_disk": "/local_nvme"}, 0.2)):
        planned, reason = own(alone(memory=memory), ONE.model_copy(update={"disk_gbytes": disk}))
        assert planned is not None, reason
        plans[name] = planned
    job = alone()
    of_one = 4 * 4096 * job.model.dim * 4
    assert plans["disk"].disk == job.model.num_layers * of_one
    assert plans["host"].disk == 0
    assert plans["host"].host - plans["disk"].host == (job.model.num_layers - 4) * of_one
    assert plans["disk"].memory.total - plans["host"].memory.total == of_one, "two are fetched ahead, not one"
    passes = 2 * plans["slow disk"].layout.micro_batches * job.model.num_layers * of_one / 0.2e9
    assert plans["disk"].time.compute < passes < plans["slow disk"].time.compute


def layout(micro_batches: int = 1, data: str = "zero3", offload: bool = True) -> Layout:
    parallel = ParallelConfig(data=data, reduce="micro_batch", offload=offload)  # type: ignore[arg-type]
    return Layout(parallel, MemoryConfig(activation_checkpointing="full"), 4, 2, micro_batches)


def test_what_passes_the_link_to_the_host():
    job, gpu = job_of("pretrain_10b_2x24gb"), CLUSTER.kind
    parts = held(job, layout(), shares(job, layout())[0])
    copies = transfers(job, layout(), parts.whole, parts.blocks, gpu)
    rows = job.parameters / 2
    assert copies.forward == pytest.approx(rows * 4 / 25e9)
    assert copies.backward == pytest.approx(job.model.num_layers * parts.block / 2 * 4 / 25e9)
    assert copies.gradients == pytest.approx(rows * 4 / 25e9)
    assert copies.added == pytest.approx(rows * 12 / (HOST_SHARE * 44.8e9))
    assert transfers(job, layout(offload=False), parts.whole, parts.blocks, gpu).forward == 0


def test_each_further_micro_batch_waits_for_the_host():
    job = job_of("pretrain_10b_2x24gb")
    data = {count: step_time(job, layout(count), CLUSTER).axes[-1].exposed for count in (1, 2, 3)}
    without = {count: step_time(job, layout(count, offload=False), CLUSTER).axes[-1].exposed for count in (1, 2, 3)}
    added = job.parameters / 2 * 12 / (HOST_SHARE * 44.8e9)
    assert data[2] - data[1] == pytest.approx(data[3] - data[2])
    assert data[2] - data[1] > added
    assert without[2] - without[1] < added


def test_offload_takes_the_time_that_it_takes():
    """10B on one V100 reached 40 of 125 TFLOP/s (arXiv:2101.06840, abstract): 32 %, and a roofline is above it."""
    job = job_of("pretrain_10b_2x24gb")
    planned, reason = own(job, CLUSTER)
    assert planned is not None, reason
    assert 0.2 < planned.time.mfu < 0.45
    assert planned.time.optimizer > 0.1 * planned.time.seconds, "the update on the host is not free"


def test_host_memory_is_counted_and_can_be_too_little():
    job = job_of("pretrain_10b_2x24gb")
    planned, _ = own(job, CLUSTER)
    assert planned is not None
    inputs = job.model.num_layers * 16 * 2048 * job.model.dim * 4
    assert planned.host == host_bytes(job, planned.layout) == pytest.approx(job.parameters / 2 * 16 + inputs)
    small = ClusterConfig(gpus=2, gpu="rtx4090", nodes_of=2, host_memory_gb=64)
    _, reason = own(job, small)
    assert "needs 109.9 GB of host memory for each GPU, which has 64.0" in reason
    assert not rank(job, small).fitting


def test_layouts_of_an_offloaded_run_are_offloaded():
    ranking = rank(job_of("pretrain_10b_2x24gb"), CLUSTER)
    assert {item.layout.parallel.offload for item in ranking.fitting} == {True}
    assert {item.layout.parallel.data for item in ranking.fitting} <= {"zero2", "zero3"}


def test_the_command_says_what_the_update_takes(capsys: pytest.CaptureFixture[str]):
    command = ["plan", "jobs/configs/recipes/pretrain_10b_2x24gb.yaml", "--gpus", "2", "--gpu", "rtx4090",
               "--nodes-of", "2"]
    assert run_command(command) == 0
    shown = capsys.readouterr().out
    assert "offload: the update on the CPU takes 19.3 of 129.3 s in each step" in shown
    assert "in host memory" in shown
