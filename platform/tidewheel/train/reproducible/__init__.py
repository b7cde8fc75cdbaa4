"""Reproducible mode: sums over ranks and micro-batches in one fixed order, whatever the number of ranks.

`tree` is the order itself, `order` says who has which of its leaves, `exchange` brings them together, `norm` is the
gradient norm; `legal` refuses what cannot be had. See docs/reproducible.md.
"""
