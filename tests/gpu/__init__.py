"""Tests that need a CUDA device, and the command that runs all tests marked gpu: `python -m tests.gpu`.

Tests of one part on both devices stay beside the part's other tests; they have the mark too. The files that contain the
mark are collected by name, so that no other file of the tests is imported: a machine with a GPU may lack Ray and other
packages.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidewheel.train.step import MicroBatch

TESTS = Path(__file__).parents[1]
MARK = "mark.gpu"
WORKERS = 6
"""Processes that share the GPU: most of a test's time is start, compilation and work on the host."""


def files() -> list[Path]:
    """Return the files with tests marked gpu."""
    return sorted(file for file in TESTS.rglob("test_*.py") if MARK in file.read_text())


def command() -> list[str]:
    """Return the arguments of Python that run these tests alone, in several processes if pytest-xdist is there."""
    paths = [str(file) for file in files()]
    parallel = ["-n", str(WORKERS)] if importlib.util.find_spec("xdist") else []
    return ["-m", "pytest", "-m", "gpu", "-rfE", "-v", "--tb=short", "--show-capture=no", "--durations=10",
            "-p", "no:cacheprovider", *parallel, *paths]


def on_gpu(micro: MicroBatch) -> MicroBatch:
    """Return a micro-batch with its tensors on the GPU."""
    import torch

    tensors = {name: value.cuda() for name, value in vars(micro).items() if isinstance(value, torch.Tensor)}
    return dataclasses.replace(micro, **tensors)
