"""Run mosaicml-streaming for `tests.benchmarks.loader` in its interpreter: read a JSON request, print a JSON answer.

The request has "rows" (an .npy file of tokens [n, L] uint16), "folder" for the converted data, "batch", "rounds",
"workers" (numbers of DataLoader processes to try) and "resumes" (batches already read when a loader is resumed).
"""

import json
import os
import sys
import time
import uuid

import numpy as np
import torch

# streaming imports torchvision for its vision sets, which needs these definitions with a CPU-only torch
_library = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402


def collate(samples):
    """Return the tokens as [B, L] int64."""
    return torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))


def loader(request, workers):
    dataset = StreamingDataset(local=request["folder"], batch_size=request["batch"], shuffle=True, shuffle_seed=0)
    return StreamingDataLoader(dataset, batch_size=request["batch"], num_workers=workers, collate_fn=collate,
                               prefetch_factor=4 if workers else None, persistent_workers=False)


def cpu_seconds():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def read(request, workers):
    """Return the wall seconds, CPU seconds and tokens of one epoch without its first batch."""
    source = loader(request, workers)
    batches = iter(source)
    next(batches)
    tokens, wall, cpu = 0, time.perf_counter(), cpu_seconds()
    for batch in batches:
        tokens += batch.numel()
    wall = time.perf_counter() - wall
    del batches, source
    return wall, cpu_seconds() - cpu, tokens


def main():
    with open(sys.argv[1]) as given:
        request = json.load(given)
    torch.set_num_threads(1)
    rows = np.load(request["rows"], mmap_mode="r")
    request["folder"] = os.path.join(request["folder"], uuid.uuid4().hex)
    with MDSWriter(out=request["folder"], columns={"tokens": f"ndarray:uint16:{rows.shape[1]}"}) as writer:
        for row in rows:
            writer.write({"tokens": np.ascontiguousarray(row)})
    answer = {"read": {}, "resume": []}
    for workers in request["workers"]:
        answer["read"][str(workers)] = [read(request, workers) for _ in range(request["rounds"])]
    for done in request["resumes"]:
        began = time.perf_counter()
        source = loader(request, 0)
        source.load_state_dict({"epoch": 0, "sample_in_epoch": done * request["batch"], "num_canonical_nodes": 1,
                                "shuffle_seed": 0, "initial_physical_nodes": 1})
        next(iter(source))
        answer["resume"].append(time.perf_counter() - began)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
