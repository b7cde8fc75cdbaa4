"""Compare a small decoder trained on ../shared/corpus with n-gram models of the same split.

    python -m tests.benchmarks.learning [--output FOLDER] [--steps 1200] [--cpus 2]

Real text goes through a pipeline (quality, exact and near duplicates, a BPE of 4,096 tokens), and
`jobs/configs/small.yaml`, a debug-size version of the 125m configuration, trains on it on CPU. Its validation loss must
be below that of the interpolated bigram model (Witten-Bell) counted on the training split, which the pipeline writes to
its summary; otherwise the exit code is 1. A second run continues the first one. The report page has the curves.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import tidewheel as tw
from tidewheel.cluster.session import session
from tidewheel.report.run import write_run_report

SHARED = Path(__file__).resolve().parents[2] / "../shared"
CONFIG = Path(__file__).resolve().parents[2] / "jobs/configs/small.yaml"


def pipeline() -> tw.Pipeline:
    """Return the pipeline, in which Gopher's rules drop most text that is not prose."""
    return (
        tw.Pipeline("learning").set(max_bad_fraction=0.01)
        .read("*.jsonl.gz")
        .filter(tw.filters.gopher_quality(), tw.filters.gopher_repetition())
        .dedup_exact()
        .dedup_near()
        .tokenize(train={"vocabulary_size": 4096})
        .pack(sequence_length=512, validation_fraction=0.02)
    )


def main() -> None:
    """Run the workflow and print the losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="learning-output")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--cpus", type=int, default=2)
    options = parser.parse_args()
    if not (SHARED / "corpus").is_dir():
        raise SystemExit(f"no documents in {SHARED}/corpus")
    corpus, output = pipeline(), str(Path(options.output).resolve())
    run = tw.Train(str(CONFIG), data=corpus, steps=options.steps, elastic={"cpus_per_worker": options.cpus})
    began = time.monotonic()
    with session(None) as address:
        published = tw.Workflow("learning", corpus, run).run(output, input=str(SHARED / "corpus"), address=address)
    summary, result = published.pipelines["learning"].value, next(iter(published.runs.values()))
    models = summary["ngram_entropy"]
    assert result.validation_loss is not None
    print(f"{summary['documents']:,} documents, {result.tokens:,} tokens trained on, {result.seconds / 60:.1f} minutes "
          f"of training, {(time.monotonic() - began) / 60:.1f} in all")
    print("| model | validation loss, nats a token |\n|---|---|")
    print(f"| unigram, counted on the training split | {models['unigram_model']:.3f} |")
    print(f"| interpolated bigram, counted on the training split | {models['bigram_model']:.3f} |")
    print(f"| decoder after {result.steps:,} steps | {result.validation_loss:.3f} |")
    print(write_run_report(result.run_uri, published.records["learning"].place))
    if result.validation_loss >= models["bigram_model"]:
        raise SystemExit("the decoder is not below the bigram model")


if __name__ == "__main__":
    main()
