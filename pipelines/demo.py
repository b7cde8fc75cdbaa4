"""`pipelines/demo.yaml`, composed in Python: the same steps, the same recipe hash.

    python -m pipelines.demo my-folder my-output     # pipeline and training, on this machine or on RAY_ADDRESS
"""

from __future__ import annotations

import sys

import tidewheel as tw

corpus = (
    tw.Pipeline("demo")
    .set(seed=0, max_bad_fraction=0.05, partitions=4)
    .read("corpus/*.jsonl*", text="text", id="id")
    .filter(tw.filters.gopher_quality())
    .dedup_exact()
    .dedup_near(ngram=5, bands=14, rows=8, min_jaccard=0.75)
    .decontaminate("evals/*.jsonl", ngram=13)
    .tokenize(train={"vocabulary_size": 2048, "sample_bytes": 4_000_000})
    .pack(sequence_length=256, validation_fraction=0.03, rows_per_shard=1024)
)

if __name__ == "__main__":
    source, output = sys.argv[1:3]
    run = tw.Train("jobs/configs/demo.yaml", data=corpus)
    result = tw.Workflow("demo", corpus, run).run(output, input=source)
    for name, trained in result.runs.items():
        print(f"{name}: {trained.steps} steps, validation loss {trained.validation_loss}, in {trained.run_uri}")
