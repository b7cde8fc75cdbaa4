"""The S-curve of MinHash LSH, and the choice of bands and rows for a threshold. Functions import NumPy lazily."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

_NODES = 256  # nodes of the Gauss-Legendre rule, which is exact for polynomials up to degree 511


def collision_probability(s: Any, bands: int, rows: int) -> Any:
    """Return the probability that two documents share at least one band, 1 - (1 - s^rows)^bands.

    Args:
        s: Jaccard similarity, a number or an array; the result has its shape.
        bands: number of bands.
        rows: signature values per band.
    """
    import numpy as np

    return np.asarray(1.0 - (1.0 - np.asarray(s, np.float64) ** rows) ** bands)


@lru_cache(maxsize=64)
def optimal_banding(threshold: float, permutations: int) -> tuple[int, int]:
    """Return (bands, rows) with bands x rows <= permutations and the fewest errors around `threshold`.

    They minimise the sum of two areas, weighted equally: false positives (the curve below the threshold) and false
    negatives (one minus the curve above it). datasketch's `MinHashLSH(threshold, num_perm)` makes the same choice.

    Raises:
        ValueError: the threshold is outside (0, 1), or there is no permutation.
    """
    import numpy as np

    if not 0 < threshold < 1 or permutations < 1:
        raise ValueError(f"the threshold must be between 0 and 1 and there must be a permutation, got {threshold} "
                         f"and {permutations}")
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    below = threshold * (nodes + 1) / 2
    above = threshold + (1 - threshold) * (nodes + 1) / 2
    best = (np.inf, 1, 1)
    for bands in range(1, permutations + 1):
        for rows in range(1, permutations // bands + 1):
            positives = weights @ collision_probability(below, bands, rows) * threshold / 2
            negatives = weights @ (1.0 - collision_probability(above, bands, rows)) * (1 - threshold) / 2
            best = min(best, (float(positives + negatives), bands, rows), key=lambda candidate: candidate[0])
    return best[1], best[2]
