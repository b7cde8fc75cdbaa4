"""`tidewheel explain`: what went wrong in a run."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from tidewheel.commands.options import AsJson


def explain(
    run: Annotated[str, Parameter(help="URI of a run.")],
    *,
    every: Annotated[bool, Parameter(name="--all", negative="", help="List every incident, not only the newest "
                                                                    "ones.")] = False,
    as_json: AsJson = False,
) -> int:
    """Say what went wrong in a run: failures by cause, on which nodes, what they cost, and what to do.

    Also says whether the run is healthy now. Works during the run and after it. Exit code 2 if the run needs attention.
    """
    from tidewheel.report.explain.account import account
    from tidewheel.report.explain.text import as_json as values
    from tidewheel.report.explain.text import lines

    told = account(run)
    if as_json:
        print(json.dumps(values(told), indent=2))
    else:
        for line in lines(told, every=every):
            print(line)
    return 0 if told.health.healthy else 2
