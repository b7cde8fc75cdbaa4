"""The driver of a disturbed run, as a program: `python -m tests.chaos.driver TRAIN.yaml ADDRESS`.

It prints its progress as JSON lines. Its workers train as those of `tidewheel train` do, with faults that environment
variables request:

CHAOS_STEP_SECONDS      seconds added to each step, as if the model were larger
CHAOS_HURRY             path of a file; once it exists, no seconds are added
CHAOS_NETWORK           path of a file that says which node's network to the coordinator fails, see `tests.chaos.cut`
CHAOS_GATE              path of a file with the number of a step; no later step starts until the file has a greater one,
                        or that of CHAOS_HURRY exists
CHAOS_SLOW              path of a file with {"node": first 12 digits of a node's id, "factor": f}; while it exists, a
                        step's own work takes f times as long on that node
CHAOS_FLIP              path of a file with {"node": first 12 digits of a node's id, "seed": n}; the next step on that
                        node begins with a flipped bit in a weight, and the file is renamed to *.done
CHAOS_STORAGE_AWAY      path of a file; while it exists, reading, writing and listing objects fails
CHAOS_STORAGE_SILENT    path of a file; while it exists, such calls hang, and fail after 30 s

With CHAOS_TAKE_OVER=1 the driver takes the run over from another one, as `tidewheel train --take-over` does.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tidewheel.errors import StorageAwayError

REQUEST_SECONDS = 30.0
"""Longest time of a request to an object store with all its retries, see `tidewheel.retry`."""


def worker(settings: dict[str, Any]) -> Any:
    """Call `run_worker` with the faults of the environment."""
    import ray

    from tests.chaos.cut import behind_a_network
    from tidewheel.elastic import worker as process
    from tidewheel.train import loop

    node = ray.get_runtime_context().get_node_id()[:12]
    if not hasattr(loop, "chaos"):
        loop.chaos = loop.start_step  # type: ignore[attr-defined]
    loop.start_step = slowed(loop.chaos, float(os.environ.get("CHAOS_STEP_SECONDS", "0")), node)  # type: ignore
    storage_faults()
    behind_a_network(process, node)
    return process.run_worker(settings)


def slowed(step: Callable[..., Any], seconds: float, node: str) -> Callable[..., Any]:
    """Return a step that takes `seconds` longer, and more CPU time on the node that CHAOS_SLOW names."""
    from tidewheel.train.logs.line import HERE

    file, hurry, gate, flip_file = (Path(os.environ.get(f"CHAOS_{name}", "/nowhere"))
                                    for name in ("SLOW", "HURRY", "GATE", "FLIP"))

    def start_step(*arguments: Any, **named: Any) -> Any:
        while gate.exists() and not hurry.exists() and HERE.step > int(gate.read_text()):
            time.sleep(0.02)
        flip_if_asked(flip_file, node, arguments[0])
        began = time.thread_time()
        result = step(*arguments, **named)
        slow = json.loads(file.read_text()) if file.exists() else {}
        factor = slow["factor"] if slow.get("node") == node else 1.0
        until = time.thread_time() + (factor - 1) * (time.thread_time() - began)
        while time.thread_time() < until:
            pass
        time.sleep(0.0 if hurry.exists() else seconds)
        return result

    return start_step


def flip_if_asked(file: Path, node: str, model: Any) -> None:
    """Flip a bit of a weight if the file names this node, and rename the file."""
    if not file.exists():
        return
    asked = json.loads(file.read_text())
    if asked["node"] != node:
        return
    from tests.bit_flips import flip
    from tidewheel.train.parallel import local

    chance = random.Random(asked["seed"])
    weights = [local(weight.detach()) for weight in model.parameters()]
    flip(chance.choice([weight for weight in weights if weight.numel()]), chance)
    file.rename(file.with_suffix(".done"))


def storage_faults() -> None:
    """Make this process's stores fail or hang while the files that the environment names exist."""
    from tidewheel.storage import LocalStore

    away, silent = (os.environ.get(f"CHAOS_STORAGE_{fault}", "/nowhere") for fault in ("AWAY", "SILENT"))
    if hasattr(LocalStore, "chaos"):
        return
    LocalStore.chaos = True  # type: ignore[attr-defined]
    for name in ("open", "writer", "create", "list", "check", "size", "delete"):
        setattr(LocalStore, name, _unless_away(getattr(LocalStore, name), Path(away), Path(silent)))


def _unless_away(method: Callable[..., Any], away: Path, silent: Path) -> Callable[..., Any]:
    def guarded(self: Any, *arguments: Any, **named: Any) -> Any:
        if away.exists():
            raise StorageAwayError("the store does not answer", where=self.uri, fix="wait until it is back")
        until = time.monotonic() + REQUEST_SECONDS
        while silent.exists():
            if time.monotonic() > until:
                raise StorageAwayError("the store does not answer", where=self.uri, fix="wait until it is back")
            time.sleep(0.05)
        return method(self, *arguments, **named)

    return guarded


def main(on_step: Callable[[], None] | None = None) -> int:
    """Train to the end and return the exit code.

    Args:
        on_step: called each time a step is reported.
    """
    import ray

    from tidewheel.config import load
    from tidewheel.elastic.trainer import run_workers
    from tidewheel.errors import TidewheelError, root_cause
    from tidewheel.train.config import TrainConfig

    def tell(progress: dict[str, Any]) -> None:
        if on_step is not None and "step" in progress:
            on_step()
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({key: progress[key] for key in ("state", "step", "world_size") if key in progress}),
                  flush=True)

    ray.init(address=sys.argv[2], log_to_driver=False, logging_level="ERROR")
    try:
        run_workers(load(TrainConfig, sys.argv[1]), worker, tell, take_over=os.environ.get("CHAOS_TAKE_OVER") == "1")
    except Exception as error:
        cause = root_cause(error)
        print(f"{type(cause).__name__}: {cause}", file=sys.stderr, flush=True)
        return cause.exit_code if isinstance(cause, TidewheelError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
