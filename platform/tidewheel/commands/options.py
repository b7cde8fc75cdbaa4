"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

Overrides = Annotated[
    list[str] | None,
    Parameter(name=["--set", "-s"], negative="", consume_multiple=False,
              help="Change one setting: dotted.key=value, with the value in YAML. May be repeated."),
]
Address = Annotated[
    str | None,
    Parameter(help="Ray cluster to use: auto or host:port. Default: RAY_ADDRESS, or else this machine alone."),
]
DryRun = Annotated[bool, Parameter(negative="", help="Show what would happen, then stop. Starts and writes nothing.")]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON instead of a table.")]
