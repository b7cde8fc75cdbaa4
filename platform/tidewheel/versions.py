"""Versions of parts, from which the keys of finished work are computed.

A part's version is a promise: equal input and settings give equal output. Its author raises the number when the
output changes, and only then. A comment, a rename or a faster loop leaves every key as it was.
`tests/unit/test_golden.py` holds the promises: it compares the output for a fixed input with the one recorded for the
version.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Version:
    """The version of one part.

    Args:
        part: name of the part, unique in the package.
        number: version number, raised whenever equal input and settings give another output than before.
        uses: versions of the parts that the output depends on.
    """

    part: str
    number: int = 1
    uses: tuple[Version, ...] = ()

    def using(self, *others: Version) -> Version:
        """Return this version with more parts that the output depends on."""
        return replace(self, uses=(*self.uses, *others))

    def numbers(self) -> dict[str, int]:
        """Return {part: number} of this part and of all parts that it uses, sorted by name.

        Raises:
            ValueError: two parts have the same name.
        """
        numbers = {self.part: self.number}
        for other in self.uses:
            for part, version in other.numbers().items():
                if numbers.setdefault(part, version) != version:
                    raise ValueError(f"two parts are called {part!r}, with versions {numbers[part]} and {version}")
        return dict(sorted(numbers.items()))
