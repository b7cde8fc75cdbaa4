"""`pipelines/pretrain_web.yaml`, composed in Python: the same steps, the same recipe hash.

    python -m pipelines.pretrain_web my-crawl my-shards     # on this machine or on RAY_ADDRESS
"""

from __future__ import annotations

import sys

import tidewheel as tw

corpus = (
    tw.Pipeline("pretrain_web")
    .set(seed=0, max_bad_fraction=0.01)
    .read("corpus/*.jsonl*")
    .filter(
        tw.filters.language(allow=("en",), min_score=0.65),
        tw.filters.gopher_repetition(),
        tw.filters.gopher_quality(),
        tw.filters.c4(terminal_punctuation=False),
        tw.filters.fineweb(),
    )
    .dedup_exact()
    .dedup_near(ngram=5, bands=14, rows=8, min_jaccard=0.75)
    .decontaminate("evals/*.jsonl")
    .filter(tw.filters.pii())
    .tokenize("tokenizer/tokenizer.json")
    .pack(sequence_length=4096, validation_fraction=0.005, rows_per_shard=4096)
)

if __name__ == "__main__":
    source, output = sys.argv[1:3]
    summary = corpus.run(output, input=source)
    print(f"{summary.documents} documents, {summary.tokens} tokens in {summary.output}/shards")
