"""Run datatrove for `tests.benchmarks.datatrove` in datatrove's interpreter: read a JSON request, print a JSON answer.

The request has texts, rounds and timed (number of texts to measure), and words (the tokens of each text) and sentences
(their number by line), with which datatrove judges a second time.
"""

import json
import statistics
import sys
import tempfile
import time

import xxhash
from datatrove.data import Document
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    c4_filters,
    fineweb_quality_filter,
    gopher_quality_filter,
    gopher_repetition_filter,
)

FILTERS = {"gopher_quality": GopherQualityFilter(), "gopher_repetition": GopherRepetitionFilter(),
           "c4": C4QualityFilter(), "fineweb": FineWebQualityFilter()}


def verdict(judge, text):
    """Return the reason for which the text is dropped or "", and the text after the filter."""
    document = Document(text=text, id="0")
    try:
        outcome = judge.filter(document)
    except ZeroDivisionError:  # a text without words
        outcome = (False, "empty")
    return ("" if outcome is True else outcome[1]), document.text


def seconds(work, texts, rounds):
    times = []
    for _ in range(rounds):
        began = time.process_time()
        for text in texts:
            work(text)
        times.append(time.process_time() - began)
    return statistics.median(times)


def main():
    with open(sys.argv[1]) as given:
        request = json.load(given)
    texts, rounds, answer = request["texts"], request["rounds"], {"seconds": {}}
    answer["shipped"] = {name: [verdict(judge, text) for text in texts] for name, judge in FILTERS.items()}
    timed = texts[:: max(len(texts) // request["timed"], 1)]
    signer = MinhashDedupSignature(tempfile.mkdtemp(), MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8))

    def sign(text):
        shingles = signer.get_shingles(text)
        return signer.get_signature(shingles) if len(shingles) else None

    def everything(text):
        for judge in FILTERS.values():
            verdict(judge, text)
        xxhash.xxh3_128_digest(text)
        sign(text)

    for name, judge in FILTERS.items():
        answer["seconds"][name] = seconds(lambda text, judge=judge: verdict(judge, text), timed, rounds)
    answer["seconds"]["minhash"] = seconds(sign, timed, rounds)
    answer["seconds"]["everything"] = seconds(everything, timed, rounds)
    answer["timed"] = [len(timed), sum(len(text.encode()) for text in timed) / 1e6]

    words, sentences = dict(zip(texts, request["words"])), request["sentences"]
    for module in (gopher_quality_filter, gopher_repetition_filter, fineweb_quality_filter):
        module.split_into_words = lambda text, language: words[text]
    c4_filters.split_into_sentences = lambda line, language: range(sentences[line])
    answer["ours"] = {name: [verdict(judge, text) for text in texts] for name, judge in FILTERS.items()}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
