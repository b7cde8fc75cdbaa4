"""Which ranks hold copies of each other's part of the state: those of several replicas of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from tidewheel.checkpoint.agreement import own_box
from tidewheel.checkpoint.peers import Peers
from tidewheel.storage import content_hash


def holders_of(peers: Peers, flat: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    """Return for each rank the first that holds the same part of every tensor; all ranks call this together.

    Args:
        peers: the ranks.
        flat: this rank's tensors by path, see `staging.flatten`.
    """
    boxes = [[name, box.offsets, box.sizes] for name, box in
             ((name, own_box(tensor)) for name, tensor in sorted(flat.items()))]
    first: dict[str, int] = {}
    return tuple(first.setdefault(digest, rank)
                 for rank, digest in enumerate(peers.all(content_hash(json.dumps(boxes).encode()))))
