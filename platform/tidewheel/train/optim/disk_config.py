"""Sizes of optimizer state on its way between disk and memory. Nothing here imports torch."""

PIECE_BYTES = 64 << 20
"""State that is read, updated and written at once; more if one parameter has more."""
PIECES = 3
"""Pieces in memory: one is read, one updated, one written."""
