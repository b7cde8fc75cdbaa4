"""Show whether a row of a matrix product has the same bits in products of other numbers of rows on this machine.

    python -m tests.benchmarks.expert_products [--threads 1 2]

Each line is one type and one layout of the matrix. A product of 3,000 rows is compared with products of some of the
same rows; a case is a number of outputs, of columns and of rows. `silu` compares the activation of rows at another
place of a tensor. Reproducible mode relies on none of it: `tidewheel/train/reproducible/experts.py` computes each
(micro-batch, expert) by itself. The exit code is 0.
"""

from __future__ import annotations

import argparse
import itertools
import sys

import torch
import torch.nn.functional as F

from tidewheel.console import print_table

OUTPUTS, COLUMNS, ROWS = (16, 48, 256, 768), (16, 48, 256, 768, 2048, 4096), (1, 3, 4, 16, 100, 400)
TYPES = (torch.float32, torch.bfloat16)


def different_products(dtype: torch.dtype, transposed: bool) -> dict[int, list[str]]:
    """Return {rows of the smaller product: the cases in which a row has other bits}."""
    found: dict[int, list[str]] = {}
    for outputs, columns in itertools.product(OUTPUTS, COLUMNS):
        generator = torch.Generator().manual_seed(outputs * columns)
        matrix = torch.randn(outputs, columns, generator=generator).to(dtype)
        matrix = matrix.t() if transposed else matrix.t().contiguous()
        rows = torch.randn(3000, columns, generator=generator).to(dtype)
        whole = rows @ matrix
        for count in ROWS:
            if not torch.equal(whole[7:7 + count], rows[7:7 + count].clone() @ matrix):
                found.setdefault(count, []).append(f"{outputs} x {columns}")
    return found


def moved_activations(dtype: torch.dtype, width: int) -> int:
    """Return how many elements of silu have other bits when their rows are at another place of a tensor."""
    rows = torch.randn(2000, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    whole = F.silu(rows)
    return sum(int((whole[first:last] != F.silu(rows[first:last].clone())).sum())
               for first, last in itertools.pairwise((0, 3, 10, 41, 200, 777, 2000)))


def main() -> int:
    """Compare and print both tables."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    for threads in arguments.parse_args().threads:
        torch.set_num_threads(threads)
        lines = []
        for dtype, transposed in itertools.product(TYPES, (True, False)):
            found = different_products(dtype, transposed)
            lines.append({"type": str(dtype).removeprefix("torch."), "matrix": "rows" if transposed else "columns",
                          **{f"{count} rows": f"{len(found.get(count, []))} of {len(OUTPUTS) * len(COLUMNS)}"
                             for count in ROWS}})
        print_table(lines, title=f"{threads} thread(s): cases in which a row of a product has other bits")
        print_table([{"type": str(dtype).removeprefix("torch."), **{f"width {width}": moved_activations(dtype, width)
                                                                    for width in (13, 44, 48, 64)}}
                     for dtype in TYPES], title=f"{threads} thread(s): elements of silu with other bits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
