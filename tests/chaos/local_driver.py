"""A disturbed run in one process, without a cluster: `python -m tests.chaos.local_driver TRAIN.yaml ""`.

It prints its progress and has the faults of `tests/chaos/driver.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from tests.chaos.driver import slowed, storage_faults


def main() -> int:
    """Train to the end and return the exit code."""
    import torch

    from tidewheel.config import load
    from tidewheel.elastic.trainer import fit_local
    from tidewheel.errors import TidewheelError
    from tidewheel.train import loop
    from tidewheel.train.config import TrainConfig

    def tell(progress: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({key: progress[key] for key in ("state", "step", "world_size") if key in progress}),
                  flush=True)

    torch.set_num_threads(1)
    slow_step = slowed(loop.start_step, float(os.environ.get("CHAOS_STEP_SECONDS", "0")), "")

    def start_step(*arguments: Any, **named: Any) -> Any:
        storage_faults()  # from now on: a run whose store is away when it is started says so and ends
        return slow_step(*arguments, **named)

    loop.start_step = start_step
    try:
        fit_local(load(TrainConfig, sys.argv[1]), on_progress=tell)
    except TidewheelError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
