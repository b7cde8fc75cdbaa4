"""`tidewheel teacher`: the most likely tokens of a teacher, for distillation."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from cyclopts import Parameter

from tidewheel.commands.options import AsJson
from tidewheel.console import bars


def teacher(
    model: Annotated[str, Parameter(help="URI of the teacher: a run (its newest complete checkpoint), or "
                                         "RUN/checkpoints/step_00000100.")],
    *,
    data: Annotated[list[str], Parameter(negative="", consume_multiple=False, help="Set of packed sequences, the "
                                         "shards/ folder that a pipeline wrote; may be repeated.")],
    output: Annotated[str, Parameter(help="Folder to write to. Each teacher has a folder of its own in it.")],
    top_k: Annotated[int, Parameter(help="Most likely tokens to keep of each position.")] = 32,
    temperature: Annotated[float, Parameter(help="Divide the logits by this; training takes the same "
                                                 "objective.temperature.")] = 1.0,
    precision: Annotated[Literal["fp32", "bf16"], Parameter(help="Type of the matrix products.")] = "fp32",
    device: Annotated[str, Parameter(help="cpu, cuda or cuda:1; default: the first GPU, or else cpu.")] = "",
    as_json: AsJson = False,
) -> int:
    """Compute the most likely tokens of a teacher at each position, once, for objective distillation to read.

    The last line is the folder for `data.teacher`. If the command is killed, give it again: it keeps what is there.
    """
    from tidewheel.errors import ConfigError
    from tidewheel.inference.columns import FrozenModel
    from tidewheel.inference.teacher import make

    if not 0 < temperature < float("inf"):
        raise ConfigError(f"{temperature:g} is not a temperature", where="--temperature",
                          fix="give a number above 0, such as 2")
    with bars() as group, group.bar("teacher", 1, unit="rows") as bar:
        made = make(FrozenModel(model, device=device, precision=precision), data, output, top_k=top_k,
                    temperature=temperature, on_progress=lambda done, total: bar.update(done, total=total))
    if as_json:
        print(json.dumps({"teacher": made.uri, "rows": made.rows, "computed": made.computed}))
        return 0
    print(f"{made.rows:,} rows, {made.computed:,} computed now")
    print(made.uri)
    return 0
