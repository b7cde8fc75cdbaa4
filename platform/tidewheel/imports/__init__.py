"""Configurations of other tools, one table of keys for each tool, and their conversion to ours."""

from __future__ import annotations

from tidewheel.imports import accelerate, deepspeed, megatron, torchtitan, transformers
from tidewheel.imports.table import Table

TABLES: dict[str, Table] = {module.TABLE.tool: module.TABLE
                            for module in (deepspeed, transformers, accelerate, torchtitan, megatron)}
"""The table of each tool, by its name on the command line."""
