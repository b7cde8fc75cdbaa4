"""Prepare a process for training on NVIDIA GPUs. torch reads these variables when it starts CUDA and NCCL.

Nothing here imports torch at the top: the variables must be set before CUDA starts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping

logger = logging.getLogger(__name__)

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""By default, NCCL's watchdog ends the process when a collective fails or takes too long. A worker outlives its groups:
it aborts them and joins the next generation. So the watchdog must only watch, as torch asks for in
`torch.distributed.distributed_c10d._abort_process_group`."""
ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""Segments that grow leave less unusable memory when shapes differ between steps or generations
(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf)."""
OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""Former name, which torch still reads."""

SHARED_INDEX = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Ray shows each worker its own GPU only, so all of them are device 0, which torch's symmetric memory takes for one GPU
and refuses. 1 turns that check off, and with it NVLS multicast, which async tensor parallelism does not use."""


def prepare_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that training on GPUs needs.

    The allocator's settings are the user's if there are any. NCCL's error handling is not a choice: recovery in place
    does not work with another value, so a warning tells of a value that is replaced.
    """
    handling = environment.get(ERROR_HANDLING, "0")
    if handling != "0":
        logger.warning("%s=%s is replaced by 0: otherwise NCCL ends the workers that survive a lost one",
                       ERROR_HANDLING, handling)
    environment[ERROR_HANDLING] = "0"
    if ALLOCATOR not in environment and OLD_ALLOCATOR not in environment:
        environment[ALLOCATOR] = "expandable_segments:True"
    environment.setdefault(SHARED_INDEX, "1")


def release_memory() -> None:
    """Give cached device memory back. The next generation cuts the model differently, and needs other segments."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
