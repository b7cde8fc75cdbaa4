"""Measure what generators read of each version of the policy: whole, and as the delta to the version before.

    python -m tests.benchmarks.policy_deltas [--rates 1e-6 1e-5 1e-4] [--steps 8]

GRPO trains a random Llama of 4 million parameters for some steps, with each learning rate and both settings of
`rollouts.weights`. Bytes are those that the generator read in the second half of the run, from rollouts.jsonl.
Milliseconds are of one processor, between two of the last versions. The exit code is 1 if a bf16 delta at a learning
rate of 1e-6 has more than 5 % of the bytes of its version, or if a generator read a whole version besides the first.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.unit.post.runs import inline, logged, rollout_run
from tidewheel.console import print_table
from tidewheel.elastic import trainer
from tidewheel.post.policy import newest
from tidewheel.storage import store
from tidewheel.train.policy import deltas

SHAPE = ("model={dim: 256, num_layers: 4, num_heads: 4, num_kv_heads: 2, ffn_dim: 704, vocabulary_size: 2048, "
         "tie_embeddings: true, max_sequence_length: 64, attention: exact, init_std: 0.05}")
MOST = 0.05
"""Largest share of a bf16 delta at a learning rate of 1e-6."""


def measure(folder: Path, rate: float, weights: str, steps: int) -> dict[str, Any]:
    """Train, and return the row of a learning rate and a setting."""
    run = f"{weights}-{rate:g}"
    opened = store(folder / "runs" / run)
    earlier: list[bytes] = []

    def on_progress(progress: dict[str, Any]) -> None:
        if progress.get("step") == steps - 2 and not earlier:
            version = newest(opened, 1)
            assert version is not None
            earlier.append(opened.read(version.files[0].whole.key))

    trainer.fit_local(rollout_run(
        folder, run, SHAPE, f"optimizer.learning_rate={rate!r}", f"steps={steps}", f"rollouts.weights={weights}",
        "rollouts.answer_tokens=32", "checkpoint.every_steps=100", "schedule.warmup_steps=0"), on_progress=on_progress)
    fetched = [line["fetched"] for line in logged(folder, run, "rollouts.jsonl") if line["kind"] == "step"]
    later = [line["deltas"] for line in fetched[steps // 2:]]
    gaps = [line["objective"]["gap"] for line in logged(folder, run, "metrics.jsonl") if "objective" in line]
    now = newest(opened, 1)
    assert now is not None
    old, new = earlier[0], opened.read(now.files[0].whole.key)
    began = time.process_time()
    delta = deltas.encode(old, new)
    encoded = time.process_time()
    assert delta is not None
    assert deltas.decode(old, delta) == new
    decoded = time.process_time()
    whole = now.files[0].whole.bytes
    return {"weights": weights, "learning rate": f"{rate:g}", "whole, kB": round(whole / 1e3),
            "delta, kB": round(sum(later) / len(later) / 1e3), "share": f"{sum(later) / len(later) / whole:.1%}",
            "encode, ms": round(1e3 * (encoded - began)), "decode, ms": round(1e3 * (decoded - encoded)),
            "read whole": sum(line["whole"] > 0 for line in fetched), "largest gap": f"{max(gaps):.1e}"}


def main() -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    vars(trainer)["_local_pool"] = inline  # the generator shares this process, so that nothing else is measured
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for weights in ("trained", "bf16"):
            rows += [measure(Path(folder), rate, weights, options.steps) for rate in options.rates]
    print_table(rows, title="bytes that a generator reads of a version of the policy")
    small = all(float(row["share"].rstrip("%")) <= 100 * MOST for row in rows
                if row["weights"] == "bf16" and float(row["learning rate"]) <= 1e-6)
    return 0 if small and all(row["read whole"] == 1 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
