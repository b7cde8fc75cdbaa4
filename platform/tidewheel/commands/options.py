"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

Overrides = Annotated[
    list[str] | None,
    Parameter(name=["--set", "-s"], negative="", consume_multiple=False,
              help="Change one setting: key=value, the key dotted, the value in YAML. May be given again."),
]
Address = Annotated[
    str | None,
    Parameter(help="Ray cluster to use: auto, host:port. Without it RAY_ADDRESS counts, else this machine alone."),
]
DryRun = Annotated[bool, Parameter(negative="", help="Show what would happen, then stop. Starts and writes nothing.")]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON instead of a table.")]
