"""Optimizers for study and comparison, one module each."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Decay = Annotated[float, Field(ge=0, lt=1)]
"""Share of a moving average that an update keeps."""
