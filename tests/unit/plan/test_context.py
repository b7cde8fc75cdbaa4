"""Tests of what a plan knows of the methods of context parallelism."""

from __future__ import annotations

from typing import Any

from tidewheel.config import build
from tidewheel.plan.communication import context_axis, groups
from tidewheel.plan.hardware import ClusterConfig
from tidewheel.plan.layout import Job, Layout, shares
from tidewheel.plan.memory import memory
from tidewheel.train.config import TrainConfig
from tidewheel.train.memory.config import MemoryConfig

LENGTH, CONTEXT = 131_072, 8
SMALL: dict[str, Any] = {"model": {"preset": "8b", "max_sequence_length": LENGTH}, "precision": "bf16", "compile": True,
                         "batch": {"global_sequences": 8, "micro_sequences": 1, "virtual_ranks": 8}}


def planned(method: str) -> tuple[Job, Layout]:
    """Return the job, and a layout of 8 GPUs that share each row by a method."""
    parallel = {"data": "zero3", "context": CONTEXT, "context_method": method}
    config = build(TrainConfig, SMALL | {"parallel": parallel, "elastic": {"max_workers": 64}})
    return Job(config, 128_256, LENGTH), Layout(config.parallel, MemoryConfig(), 1, data=1, micro_batches=1)


def test_a_ring_keeps_the_keys_of_its_positions_only():
    bytes_by_method = {}
    for method in ("all_gather", "all_to_all", "ring"):
        job, layout = planned(method)
        bytes_by_method[method] = memory(job, layout).activations
    keys = 2 * LENGTH * job.model.kv_heads * job.model.head_width * 2 * job.model.num_layers  # bf16, all layers
    assert bytes_by_method["all_gather"] - bytes_by_method["ring"] == keys * (1 - 1 / CONTEXT)
    assert bytes_by_method["all_to_all"] == bytes_by_method["ring"], "8 key heads for 8 ranks: none is repeated"


def test_bytes_of_a_step_by_hand():
    sent = {}
    for method in ("all_gather", "all_to_all", "ring"):
        job, layout = planned(method)
        (share,) = shares(job, layout)
        group = groups(ClusterConfig(gpus=CONTEXT), layout)["context"]
        sent[method] = context_axis(job, layout, share, group).bytes
    model, others = job.model, CONTEXT - 1
    keys = 2 * LENGTH // CONTEXT * model.kv_heads * model.head_width  # elements of a rank
    queries = LENGTH // CONTEXT * model.num_heads * model.head_width
    assert sent["all_gather"] == model.num_layers * others * keys * (2 + 4)
    assert sent["ring"] == model.num_layers * (2 * others * keys * 2 + CONTEXT * keys * 4)
    assert sent["all_to_all"] == model.num_layers * 2 * 2 * (2 * queries + keys) * others / CONTEXT
