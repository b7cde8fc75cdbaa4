"""Settings for every test."""

from __future__ import annotations

import os

from hypothesis import settings

# tests with their own home folder still find the machine code of kernels that are compiled here
os.environ.setdefault("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))

# There is no deadline, since a kernel compiles in its first example and CI machines are busy. `make test` draws the
# same examples each time, so that only a change can make it fail. HYPOTHESIS_PROFILE=explore draws new ones.
settings.register_profile("tidewheel", deadline=None, max_examples=50, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tidewheel"))
