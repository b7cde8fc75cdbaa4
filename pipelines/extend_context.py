"""Extend the context of a trained model: scale RoPE, and train a little on rows with more long documents.

    python -m pipelines.extend_context my-folder my-output     # on this machine or on RAY_ADDRESS

A base model learns from rows of 128 tokens. The extended one starts from its weights with YaRN's frequencies
(https://arxiv.org/abs/2309.00071) and reads rows of 512, most of them of long documents: long rows cut from a mixture
of mostly short documents hardly contain a distance that the model has not seen (Llama 3, arXiv:2407.21783, section
3.4.2, raises their share in its long-context stage for this reason). The last step prints the loss of both models by
the position in a document.
"""

from __future__ import annotations

import json
import sys

import tidewheel as tw

BASE, EXTENDED = 128, 512
MODEL = {"dim": 96, "num_layers": 2, "num_heads": 3, "num_kv_heads": 3, "tie_embeddings": True}
LONG_WORDS = 250
"""Documents of at least as many words are long."""
tokenizer = tw.Tokenizer("bpe", "corpus/*.jsonl*", vocabulary_size=1024)


def corpus(name: str, length: int, *, min_words: int, max_words: int) -> tw.Pipeline:
    """Return the pipeline of documents of some lengths, in rows of `length` tokens."""
    words = tw.filters.gopher_quality(min_words=min_words, max_words=max_words)
    return (tw.Pipeline(name).set(max_bad_fraction=0.05, partitions=2).read("corpus/*.jsonl*").filter(words)
            .dedup_exact().tokenize(tokenizer).pack(sequence_length=length, validation_fraction=0.15))


everything = corpus("everything", BASE, min_words=20, max_words=100_000)
short = corpus("short", EXTENDED, min_words=20, max_words=LONG_WORDS)
long = corpus("long", EXTENDED, min_words=LONG_WORDS, max_words=100_000)
base = tw.Train(
    "jobs/configs/demo.yaml", data=everything, run={"id": "base"}, steps=150,
    model={**MODEL, "max_sequence_length": BASE}, batch={"global_sequences": 16})
extended = tw.Train(
    "jobs/configs/demo.yaml", data={"long": long, "short": short}, init_from=base, run={"id": "extended"}, steps=40,
    model={**MODEL, "max_sequence_length": EXTENDED,
           "rope_scaling": {"kind": "yarn", "factor": EXTENDED / BASE, "original_length": BASE}},
    reading={"mixture": {"domains": {"long": {"weight": 0.7}, "short": {"weight": 0.3}}, "max_repetitions": 0}},
    optimizer={"learning_rate": 1e-3}, batch={"global_sequences": 8})


def loss_by_position(output: str, base: str, extended: str, data: str, ends: list[int]) -> dict[str, list[float]]:
    """Return the loss of both models at the positions up to each of `ends`."""
    from tidewheel.inference.evaluate import Evaluator

    losses: dict[str, list[float]] = {}
    for name, run in (("base", base), ("extended", extended)):
        evaluator = Evaluator(run, data={"": f"{data}/validation"}, device="cpu")
        losses[name] = [score.loss or 0.0 for score in evaluator.by_position(run, ends)[""]]
    return losses


positions = tw.Call("positions", loss_by_position, inputs={"base": base, "extended": extended, "data": long},
                    ends=[BASE, 2 * BASE, 3 * BASE, EXTENDED])
flow = tw.Workflow("extend_context", base, extended, positions)

if __name__ == "__main__":
    source, target = sys.argv[1:3]
    result = flow.run(target, input=source)
    print(json.dumps(result.records["positions"].artifact, indent=1))
