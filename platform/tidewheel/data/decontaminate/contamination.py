"""Handling of contaminated documents: the matches to report, and the text that is left when they are cut out."""

from __future__ import annotations

from collections.abc import Sequence

from tidewheel.data.decontaminate import EvalIndex, Match, Rules, find

MARGIN = 200
"""Characters removed on each side of a match, and the minimum length of a remaining piece (GPT-3, appendix C)."""
MAX_PIECES = 10
"""A document that is cut into more pieces is dropped (GPT-3, appendix C)."""
_ROUNDS = 3


def primary(matches: Sequence[Match]) -> list[Match]:
    """Return the matches that do not overlap a better one, best first; ties are ordered by benchmark and id.

    Items made from one template all match at the same position, and only the best of them is likely to be there.
    """
    primaries: list[Match] = []
    for match in sorted(matches, key=lambda match: (-match.score, match.benchmark, match.item, match.start)):
        if all(match.end <= other.start or match.start >= other.end for other in primaries):
            primaries.append(match)
    return primaries


def cut(index: EvalIndex, text: str, matches: Sequence[Match], rules: Rules) -> str:
    """Return a text without its matches and `MARGIN` characters on each side of them (Brown et al. 2020, appendix C).

    A blank line separates the remaining pieces; pieces shorter than `MARGIN` are removed. The result is searched again.
    It is empty, and the document should be dropped, if nothing is left or there are more than `MAX_PIECES` pieces.

    Args:
        index: the items.
        text: the text.
        matches: its matches.
        rules: thresholds of a match.
    """
    for _ in range(_ROUNDS):
        pieces = _pieces(text, matches)
        if len(pieces) > MAX_PIECES:
            return ""
        stripped = [piece.strip() for piece in pieces]
        text = "\n\n".join(piece for piece in stripped if len(piece) >= MARGIN)
        matches = find(index, [text], rules)[0] if text else []
        if not matches:
            return text
    return ""


def _pieces(text: str, matches: Sequence[Match]) -> list[str]:
    """Return the pieces between the removed stretches, in order, without those of white space only."""
    raw = text.encode()
    pieces = []
    position = 0
    for match in sorted(matches, key=lambda match: match.start):
        begin = max(len(raw[: match.start].decode()) - MARGIN, 0)
        end = len(raw[: match.end].decode()) + MARGIN
        if begin > position:
            pieces.append(text[position:begin])
        position = max(position, end)
    pieces.append(text[position:])
    return [piece for piece in pieces if piece.strip()]
