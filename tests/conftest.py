"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# a kernel compiles in the first example, and CI machines are busy: time is no property of a kernel
settings.register_profile("tidewheel", deadline=None, max_examples=50)
settings.load_profile("tidewheel")
