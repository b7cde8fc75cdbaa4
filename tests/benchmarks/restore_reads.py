"""Load one checkpoint into four workers of a node, and count what they read from storage.

    python -m tests.benchmarks.restore_reads [--megabytes N] [--rate MB_PER_SECOND]

A folder stands in for an object store: objects are read by ranges, every byte is counted, and all workers of the node
share a bandwidth of `--rate`. The checkpoint is that of two sharded workers. `read` is the bytes read by all workers
over those of the checkpoint, `memory` the peak of a worker above its state. The exit code is 1 when a loaded bit
differs from the saved one, or `shared_reads: all` reads anything twice.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.counting_store import CountingStore
from tests.ranks import on_ranks
from tidewheel import storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.manifest import read_manifest
from tidewheel.checkpoint.shared_reading import Sharing
from tidewheel.console import print_table

WORKERS, SAVERS, TENSORS = 4, 2, 12
NAME = "step_00000001"
LAYOUTS = {"ddp": (4, 1), "hsdp": (2, 2), "fsdp": (1, 4)}
"""By name: replicas and shards."""


class SlowStore(CountingStore):
    """A counting folder with a bandwidth that all workers share.

    Args:
        root: the folder.
        rate: bytes per second.
        free_at: when the link is free again, in monotonic seconds, shared by the workers.
    """

    def __init__(self, root: str, rate: float, free_at: Any) -> None:
        super().__init__(root)
        self._rate, self._free_at = rate, free_at

    def count(self, number: int) -> None:
        super().count(number)
        with self._free_at.get_lock():
            until = self._free_at.value = max(self._free_at.value, time.monotonic()) + number / self._rate
        time.sleep(max(0.0, until - time.monotonic()))


def state(megabytes: int, seed: int, replicas: int, shards: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return random tensors of fp32 on a mesh of replicas and shards; seed 0: zeros."""
    generator = torch.Generator().manual_seed(seed)
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    rows = megabytes * 10**6 // 4 // 1024 // TENSORS
    tensors: dict[str, torch.Tensor] = {}
    for number in range(TENSORS):
        whole = torch.randn(rows, 1024, generator=generator) if seed else torch.zeros(rows, 1024)
        placed = distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None)
        tensors[f"layer.{number}"] = placed if shards > 1 else placed.to_local()
    return {"model": tensors}


def save(folder: str, megabytes: int) -> None:
    """Save the state of seed 1."""
    saver = CheckpointManager(storage.store(folder), asynchronous=False)
    saver.save(1, state(megabytes, 1, 1, dist.get_world_size()), {"step": 1})


def load(folder: str, megabytes: int, layout: str, scope: Any, rate: float, free_at: Any, rows: Any) -> None:
    """Load, and let rank 0 put a row of the table into `rows`."""
    target = SlowStore(folder, rate, free_at)
    values, expected = state(megabytes, 0, *LAYOUTS[layout]), state(megabytes, 1, *LAYOUTS[layout])
    manager = CheckpointManager(target, sharing=Sharing(scope))
    _ = manager.peers
    dist.barrier()
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    manager.load_latest(values)
    seconds = time.monotonic() - began
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    differ = sum(not torch.equal(_local(tensor), _local(expected["model"][name]))
                 for name, tensor in values["model"].items())
    sums = torch.tensor([target.bytes, target.requests, differ], dtype=torch.float64)
    most = torch.tensor([seconds, memory], dtype=torch.float64)
    dist.all_reduce(sums)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        rows.put((layout, scope, *sums.tolist(), *most.tolist()))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def main() -> int:
    """Run all layouts and print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=240, help="size of the checkpoint")
    parser.add_argument("--rate", type=float, default=200.0, help="MB per second of the node's link to storage")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    table: list[dict[str, Any]] = []
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(SAVERS, save, folder, arguments.megabytes)
        size = read_manifest(storage.store(folder), NAME).total_bytes
        for layout in LAYOUTS:
            for scope in ("off", "all"):
                rows = context.SimpleQueue()
                on_ranks(WORKERS, load, folder, arguments.megabytes, layout, scope, arguments.rate * 1e6,
                         context.Value("d", 0.0), rows)
                _, _, read, requests, differ, seconds, memory = rows.get()
                failed = failed or bool(differ) or (scope == "all" and read != size)
                table.append({"layout": layout, "shared_reads": scope, "read": round(read / size, 2),
                              "requests": int(requests), "seconds": round(seconds, 2),
                              "memory": f"{memory / 1e6:.0f} MB", "equal bits": "no" if differ else "yes"})
    print_table(table, title=f"a checkpoint of {size / 1e6:.0f} MB, {WORKERS} workers of one node, "
                             f"{arguments.rate:g} MB/s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
