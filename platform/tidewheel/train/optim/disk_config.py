"""Sizes of optimizer state on its way between disk and memory. Nothing here imports torch."""

PIECE_BYTES = 16 << 20
"""State that is read, updated and written at once; more if one parameter has more."""
PIECES = 4
"""Pieces in memory: one is read, one updated, two written."""
