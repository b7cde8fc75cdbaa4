"""Compare the logits of every model family with those of transformers.

    python -m tests.benchmarks.logits [--only TEXT]

Each row is a tiny model of transformers with random weights (`tests/oracles.py`), imported and computed in fp32 on rows
of three packed documents; transformers computes each document alone. `difference` is the largest difference of a logit,
`largest` the largest logit. Then the model is exported and imported again: `same` says whether all weights came back
unchanged. The exit code is 1 when a difference exceeds the bound or a weight changed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.oracles import ORACLES, VOCABULARY, imported, largest_difference, packed
from tidewheel.console import print_table
from tidewheel.models import huggingface
from tidewheel.storage import store

BOUND = 1e-5


def compare(name: str, folder: Path) -> dict[str, Any]:
    """Return the row of an oracle.

    Args:
        name: of the oracle.
        folder: for the files of the model.
    """
    oracle = ORACLES[name].build()
    oracle.save_pretrained(folder / "theirs")
    model = imported(folder / "theirs")
    difference = largest_difference(model, oracle)
    weights = model.state_dict()
    huggingface.write(store(folder / "ours"), model.config, VOCABULARY,
                      lambda names: {key: weights[key] for key in names})
    back = imported(folder / "ours").state_dict()
    same = weights.keys() == back.keys() and all(torch.equal(weights[key], back[key]) for key in weights)
    with torch.no_grad():
        largest = float(model(*packed()).abs().max())
    return {"model": name, "family": ORACLES[name].family, "difference": f"{difference:.1e}",
            "largest": f"{largest:.1f}", "same": int(same), "within": int(difference < BOUND and same)}


def main() -> int:
    """Compare the models and print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", default="", help="models whose name contains this")
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    table = []
    for name in ORACLES:
        if chosen.only in name:
            with tempfile.TemporaryDirectory(prefix="tidewheel-logits-") as folder:
                table.append(compare(name, Path(folder)))
    print_table(table, title=f"fp32 logits beside transformers {transformers.__version__}: within {BOUND:g}")
    broken = [row["model"] for row in table if not row["within"]]
    print(f"{len(table) - len(broken)} of {len(table)} within the bound" + (f"; not: {broken}" if broken else ""))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
