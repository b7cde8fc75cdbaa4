"""Decide which worker computed wrongly, from the values that several workers found for the same thing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidewheel.errors import TidewheelError

Found = tuple[int, int]
"""(rank, value): what a rank found."""


@dataclass(frozen=True)
class Finding:
    """What is wrong, and on which ranks."""

    place: str
    """data, gradient, reduction, weights or optimizer."""
    ranks: tuple[int, ...]
    """Ranks that computed or hold something wrong."""
    certain: bool
    """Whether all of `ranks` are wrong; False: at least one of them is."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """The values that were compared, JSON values."""

    @property
    def text(self) -> str:
        """Return the finding in words."""
        listed = ", ".join(map(str, self.ranks))
        return f"rank {listed}" if self.certain else f"one of the ranks {listed}"


class SilentCorruptionError(TidewheelError):
    """Two computations of the same thing have different bits, so a worker has faulty hardware.

    Args:
        what: what was found.
        where: the run.
        fix: what the user can do.
        ranks: the ranks that are to blame; if it is not known which of several, all of them.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "", ranks: Iterable[int] = ()) -> None:
        super().__init__(what, where=where, fix=fix)
        self.ranks = tuple(ranks)


def of_values(found: Sequence[Found]) -> tuple[tuple[int, ...], bool]:
    """Return the ranks with wrong values, and whether all of them are wrong; ((), True) if all values are equal.

    The right value is the one that most ranks have found, at least two. Whoever ever found another one is wrong. If no
    two ranks agree, those that found different values in two computations are wrong. If there are none, it is not known
    which of the ranks is.

    Args:
        found: values of one thing, several of some ranks.
    """
    of_rank: dict[int, set[int]] = {}
    for rank, value in found:
        of_rank.setdefault(rank, set()).add(value)
    votes = Counter(value for values in of_rank.values() for value in values)
    if len(votes) < 2:
        return (), True
    (right, most), (_, second) = votes.most_common(2)
    if most > second and most > 1:
        return tuple(sorted(rank for rank, values in of_rank.items() if values != {right})), True
    unsteady = tuple(sorted(rank for rank, values in of_rank.items() if len(values) > 1))
    if unsteady:
        return unsteady, True
    return tuple(sorted(of_rank)), False


def of_replicas(place: str, found: Sequence[Found]) -> Finding | None:
    """Return the ranks whose copy of the state differs from that of most; None if all copies are equal.

    Args:
        place: what the copies are of.
        found: the digest of each rank's copy.
    """
    votes = Counter(value for _, value in found)
    if len(votes) < 2:
        return None
    right, most = votes.most_common(1)[0]
    evidence = {str(rank): _hexadecimal(value) for rank, value in found}
    if 2 * most > len(found):
        return Finding(place, tuple(rank for rank, value in found if value != right), True, evidence)
    return Finding(place, tuple(rank for rank, _ in found), False, evidence)


def of_computations(place: str, computed: Mapping[Any, Sequence[Found]]) -> Finding | None:
    """Return the ranks that computed wrongly; None if all computations agree.

    Args:
        place: what was computed.
        computed: by micro-batch, what was found in all computations of it.
    """
    certain: set[int] = set()
    possible: set[int] = set()
    evidence: dict[str, Any] = {}
    for key, found in sorted(computed.items()):
        ranks, sure = of_values(found)
        (certain if sure else possible).update(ranks)
        if ranks:
            evidence[str(key)] = [[rank, _hexadecimal(value)] for rank, value in found]
    if not evidence:
        return None
    return Finding(place, tuple(sorted(certain or possible)), bool(certain), evidence)


def _hexadecimal(value: int) -> str:
    return f"{value % (1 << 64):016x}"
