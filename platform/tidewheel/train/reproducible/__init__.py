"""Reproducible mode: sums over ranks and micro-batches in one fixed order for any number of ranks.

`tree` defines the order, `gradient_order` assigns its leaves to ranks, `exchange` moves and adds the tensors, `norm` is
the gradient norm. `legal` refuses configurations that cannot be reproducible. See docs/reproducible.md.
"""
