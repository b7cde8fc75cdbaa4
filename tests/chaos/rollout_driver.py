"""The driver of a disturbed run that makes rollouts: `python -m tests.chaos.rollout_driver TRAIN.yaml ADDRESS`.

As `tests.chaos.driver`, and the faults of the store also reach the generators and, once the run trains, the driver,
whose thread collects the rollouts.
"""

from __future__ import annotations

import sys
from typing import Any

from tests.chaos import driver
from tidewheel.post import generator


class Generator(generator.Generator):
    """A generator with the faults of the environment."""

    def __init__(self, *arguments: Any) -> None:
        from tests.chaos.driver import storage_faults

        storage_faults()
        super().__init__(*arguments)


def main() -> int:
    """Train to the end and return the exit code."""
    generator.Generator = Generator  # type: ignore[misc]  # the pool of generators takes it from there
    return driver.main(on_step=driver.storage_faults)


if __name__ == "__main__":
    sys.exit(main())
