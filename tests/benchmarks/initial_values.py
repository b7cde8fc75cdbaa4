"""Measure how long a rank draws its rows of the initial values of a wide layer.

    python -m tests.benchmarks.initial_values [--preset 70b] [--ranks 256]

The layer is one block of the preset, sharded by rows over N ranks. `whole` draws every matrix and keeps the rows of the
middle rank, `rows` draws these rows alone. The values are compared. Figures are CPU seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import torch

from tidewheel.console import print_table
from tidewheel.models import random_jump
from tidewheel.models.families import Llama
from tidewheel.models.initial_values import init_parameter, init_rows


def matrices(model: Llama) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of the matrices of a block."""
    with torch.device("meta"):
        block = model.block(0)
    for name, parameter in block.named_parameters():
        if parameter.ndim > 1:
            yield f"blocks.0.{name}", tuple(parameter.shape)


def main() -> int:
    """Draw the matrices in both ways and print a row for each."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--preset", default="70b")
    arguments.add_argument("--ranks", type=int, default=256)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    model = Llama.model_validate({"preset": options.preset})
    random_jump.can_jump()
    table = []
    for name, shape in matrices(model):
        share = shape[0] // options.ranks
        rows = range(options.ranks // 2 * share, (options.ranks // 2 + 1) * share)
        began = time.process_time()
        whole = init_parameter(name, shape, model, 0)[rows.start:rows.stop].clone()
        middle = time.process_time()
        first = init_rows(name, shape, model, 0, rows)
        end = time.process_time()
        again = init_rows(name.replace("blocks.0", "blocks.1"), shape, model, 0, rows)
        last = time.process_time()
        assert torch.equal(first, whole)
        assert again.shape == first.shape
        table.append({"matrix": name.removeprefix("blocks.0."), "shape": " x ".join(map(str, shape)),
                      "whole": round(middle - began, 3), "rows, first of its shape": round(end - middle, 4),
                      "rows, later layers": round(last - end, 4)})
    print_table(table, title=f"{options.preset}, rows over {options.ranks} ranks: CPU seconds of a rank for a block")
    whole, later = sum(row["whole"] for row in table), sum(row["rows, later layers"] for row in table)
    layers = model.num_layers
    print(f"{layers} layers: {layers * whole:,.0f} s whole, {layers * later:,.1f} s rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
