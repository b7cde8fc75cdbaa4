"""Freed memory stays with the process: the second time there are no page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT = """
import resource, torch
from tidewheel.train.memory.host import keep_freed_memory
assert keep_freed_memory()
torch.set_num_threads(1)
def step():
    held = [torch.ones(6 << 20) for _ in range(4)]  # 24 MB each, all freed at the end
for _ in range(10):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's setting")
def test_no_page_faults():
    """Without the call it is 245,000 of them in most starts, none in others: it depends on where the heap begins."""
    ended = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < 1000
