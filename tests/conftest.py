"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import settings

# machine code of kernels that did not come with the package is found also where a test has a home of its own
os.environ.setdefault("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))

# A kernel compiles in its first example, and CI machines are busy: time is no property of a kernel. `make test` draws
# the same examples each time, so that it fails for what changed. HYPOTHESIS_PROFILE=explore draws new ones.
settings.register_profile("tidewheel", deadline=None, max_examples=50, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tidewheel"))
