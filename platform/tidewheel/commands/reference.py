"""`tidewheel reference`: log-probabilities of preference pairs under a reference model."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from cyclopts import Parameter

from tidewheel.commands.options import AsJson
from tidewheel.console import bars


def reference(
    model: Annotated[str, Parameter(help="URI of the reference model: a run (its newest complete checkpoint), or "
                                         "RUN/checkpoints/step_00000100.")],
    *,
    data: Annotated[list[str], Parameter(negative="", consume_multiple=False, help="Preference set, the shards/ or "
                                         "validation/ folder that a pipeline wrote; may be repeated.")],
    output: Annotated[str, Parameter(help="Folder to write to. Each reference model has a folder of its own in it.")],
    mismatched: Annotated[bool, Parameter(negative="", help="Add what objective kto needs.")] = False,
    precision: Annotated[Literal["fp32", "bf16"], Parameter(help="Type of the matrix products.")] = "fp32",
    device: Annotated[str, Parameter(help="cpu, cuda or cuda:1; default: the first GPU, or else cpu.")] = "",
    as_json: AsJson = False,
) -> int:
    """Compute the log-probabilities of preference pairs under a reference model, once, for training to read.

    The last line is the folder for `data.reference`. If the command is killed, give it again: it keeps what is there.
    """
    from tidewheel.inference.reference import ReferenceModel, make

    with bars() as group, group.bar("reference model", 1, unit="pairs") as bar:
        made = make(ReferenceModel(model, device=device, precision=precision), data, output, mismatched=mismatched,
                    on_progress=lambda done, total: bar.update(done, total=total))
    if as_json:
        print(json.dumps({"reference": made.uri, "pairs": made.rows, "computed": made.computed}))
        return 0
    print(f"{made.rows:,} pairs, {made.computed:,} computed now")
    print(made.uri)
    return 0
