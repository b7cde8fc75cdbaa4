"""Update some of a torch optimizer's parameters alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def only(part: torch.optim.Optimizer, chosen: set[int]) -> Iterator[None]:
    """Let a torch optimizer have some of its parameters alone during the block.

    Args:
        part: the optimizer.
        chosen: `id` of each of them.
    """
    groups = part.param_groups
    whole = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in chosen]
        part.param_groups = [group for group in groups if group["params"]]
        yield
    finally:
        for group, parameters in zip(groups, whole):
            group["params"] = parameters
        part.param_groups = groups
