"""States of a run that may hold silent corruption, and are therefore never loaded. No torch.

Each time corruption is found, `checkpoints/suspects/GENERATION.json` says after which step the states of this
generation and of earlier ones are suspect. A later generation repeats these steps, so what it saves is good again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tidewheel.storage import Store

FOLDER = "suspects"
KEY = re.compile(rf"{FOLDER}/(\d{{1,18}})\.json")


@dataclass(frozen=True)
class Suspects:
    """Which states of a run are suspect.

    Args:
        after: (generation, step): states of this generation and earlier ones after the step are.
    """

    after: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, store: Store) -> Suspects:
        """Return those of a run; costs one listing of their own folder.

        Args:
            store: the run's `checkpoints` folder.

        Raises:
            StorageError: the store does not answer.
        """
        return cls.among(store, (entry.key for entry in store.list(FOLDER)))

    @classmethod
    def among(cls, store: Store, keys: Iterable[str]) -> Suspects:
        """Return those that a listing names.

        Args:
            store: the run's `checkpoints` folder.
            keys: of its objects.

        Raises:
            StorageError: the store does not answer, or a record is damaged.
        """
        named = [match for match in map(KEY.fullmatch, keys) if match is not None]
        return cls(tuple((int(match[1]), int(store.read_json(match[0])["after"])) for match in named))

    def cover(self, step: int, generation: int) -> bool:
        """Return whether a state is suspect.

        Args:
            step: of the state.
            generation: the worker group that saved it.
        """
        return any(generation <= last and step > after for last, after in self.after)


def write(store: Store, generation: int, after: int, detail: dict[str, Any]) -> None:
    """Record that states are suspect.

    Args:
        store: the run's `checkpoints` folder.
        generation: that found it.
        after: the last step that is known good.
        detail: what was found, JSON values.

    Raises:
        StorageError: it cannot be written.
    """
    store.write_json(f"{FOLDER}/{generation}.json", {"after": after, "generation": generation, "detail": detail})
