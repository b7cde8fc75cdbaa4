"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import settings

# machine code of kernels that did not come with the package is found also where a test has a home of its own
os.environ.setdefault("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))

# a kernel compiles in the first example, and CI machines are busy: time is no property of a kernel
settings.register_profile("tidewheel", deadline=None, max_examples=50)
settings.load_profile("tidewheel")
