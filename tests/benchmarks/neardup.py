"""Measure near-deduplication on labelled pairs: recall of the bands against the S-curve, and the removed documents.

    python -m tests.benchmarks.neardup [--labels FOLDER] [--corpus FOLDER] [--seeds 16] [--json FILE]

Candidates are counted over several seeds of the permutations, since a bin of the labels has few pairs. Removals come
from the stages of the pipeline, executed in this process. A pair is `settled` if at most one of the two is kept.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import tempfile
import time
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.plain_execution import without_ray
from tidewheel.config import build
from tidewheel.data import verdicts
from tidewheel.data.config import DedupNearStep, PipelineConfig
from tidewheel.data.dedup import minhash
from tidewheel.data.dedup.banding import collision_probability
from tidewheel.data.stage import read_file
from tidewheel.data.stages import dedup_near, ingest, keys, near_edges, partition
from tidewheel.data.stages.execute import Runner
from tidewheel.data.stages.resolve import resolve

SHARED = Path(__file__).resolve().parents[3] / "shared"
MARGIN = 0.03  # recall may be this much below the curve
TRUE_DUPLICATE, PRECISION = 0.70, 0.99
MODES: dict[str, dict[str, Any]] = {"default": {}, "exact": {"verify": "exact"}, "estimate alone": {"doubt": 0}}
NAME, ALONE = "labels/neardup", "estimate alone"  # the set with a precision limit, and the mode without one


@dataclass(frozen=True)
class Labels:
    """Documents, their files, and the similarity of every pair of ids (smaller first) with at least `least`."""

    name: str
    folder: Path
    pattern: str
    documents: list[dict[str, Any]]
    pairs: dict[tuple[str, str], float]
    least: float


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the records of gzipped JSONL files."""
    records = []
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            records += [json.loads(line) for line in lines]
    return records


def labelled(name: str, folder: Path, pattern: str, pairs: Path, least: float) -> Labels:
    """Return the labelled set in `folder`."""
    truth = {(min(row["a"], row["b"]), max(row["a"], row["b"])): row["jaccard"] for row in read([pairs])}
    return Labels(name, folder, pattern, read(sorted(folder.glob(pattern))), truth, least)


def step_of(**settings: Any) -> DedupNearStep:
    """Return the near-deduplication step with these settings."""
    return build(DedupNearStep, settings)


def candidates(labels: Labels, seed: int) -> tuple[set[tuple[str, str]], np.ndarray]:
    """Return the pairs that the buckets give, and whether each labelled pair shares a bucket."""
    step = step_of(seed=seed)
    texts = pa.array([row["text"] for row in labels.documents], pa.large_string())
    columns = keys.columns(texts, {"unit": step.unit, "ngram": step.ngram, "seed": step.seed,
                                   "num_permutations": step.num_permutations})
    count = len(texts)
    ids = [row["id"] for row in labels.documents]
    table = pa.table({"id": pa.array(ids), "priority": pa.array(np.zeros(count, np.int64)),
                      "quality": pa.array(np.zeros(count, np.float32)), **columns})
    bands = pa.concat_tables(rows.cast(near_edges.BANDS) for rows in near_edges.band_rows(table, step, 1, 0))
    matches = near_edges.candidates(step.bands, 1, 0, bands)
    hashes = minhash.band_hashes(near_edges.signatures(table), bands=step.bands, rows=step.rows)
    index_of = {identity: index for index, identity in enumerate(ids)}
    pairs = np.array([(index_of[a], index_of[b]) for a, b in labels.pairs])
    met = (hashes[pairs[:, 0]] == hashes[pairs[:, 1]]).any(axis=1)
    return {(min(a, b), max(a, b)) for a, b in zip(matches["a"].to_pylist(), matches["b"].to_pylist())}, met


def removals(labels: Labels, **near: Any) -> tuple[dict[str, tuple[str, float]], Mapping[str, Any]]:
    """Run the stages of a pipeline that only deduplicates; return {id: (survivor, score)} and its report."""
    config = build(PipelineConfig, {"read": {"paths": [labels.pattern]}, "steps": [
        {"dedup_near": near}, {"tokenize": {"train": {}}}, "pack"]})
    with tempfile.TemporaryDirectory(prefix="tw-neardup-") as output, without_ray():
        job = resolve(config, input=str(labels.folder), output=output)
        runner = Runner(job.output)
        _, parts = partition.run(job, runner, ingest.run(job, runner).units)
        result, _ = dedup_near.run(job, runner, parts)
        dropped = [verdicts.decode(read_file(job.store, unit.files["verdicts"])).to_pylist() for unit in result.units
                   if "verdicts" in unit.files]
        return ({row["id"]: (row["survivor"], row["score"]) for rows in dropped for row in rows},
                dedup_near.report(job, result.units))


def settled(pair: tuple[str, str], gone: Mapping[str, Any]) -> bool:
    """Return whether at most one of a pair is kept."""
    return pair[0] in gone or pair[1] in gone


def true_similarities(labels: Labels, gone: Mapping[str, tuple[str, float]]) -> np.ndarray:
    """Return the labelled similarity of each removed document to its survivor, 0 for unlabelled pairs."""
    return np.array([labels.pairs.get((min(a, b), max(a, b)), 0.0) for a, (b, _) in sorted(gone.items())])


def with_numbers_alike(labels: Labels, gone: Mapping[str, tuple[str, float]], true: np.ndarray) -> np.ndarray:
    """Return the larger similarity with every run of digits as "0", as in the shingles of FineWeb and Tidewheel."""
    texts = {row["id"]: row["text"] for row in labels.documents}

    def shingles(identity: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", unicodedata.normalize("NFC", re.sub(r"\d+", "0", texts[identity])).lower())
        return {tuple(words[i : i + 5]) for i in range(max(len(words) - 4, 1))}

    result = true.copy()
    for index, (a, (b, _)) in enumerate(sorted(gone.items())):
        if true[index] < TRUE_DUPLICATE:
            one, other = shingles(a), shingles(b)
            result[index] = max(true[index], len(one & other) / len(one | other))
    return result


def score(labels: Labels, seeds: int) -> dict[str, Any]:
    """Return all figures of one labelled set."""
    similar = np.array(list(labels.pairs.values()))
    names = list(labels.pairs)
    met, paired = np.zeros(len(names)), np.zeros(len(names))
    for seed in range(1, seeds + 1):
        matches, together = candidates(labels, seed)
        met += together / seeds
        paired += np.array([pair in matches for pair in names]) / seeds
    modes = {}
    share = {}
    for mode, near in MODES.items():
        began = time.process_time()
        dropped, report = removals(labels, **near)
        true = true_similarities(labels, dropped)
        share[mode] = np.array([settled(pair, dropped) for pair in names], np.float64)
        modes[mode] = {"removed": len(dropped), "candidates": report["candidates"], "edges": report["edges"],
                       "compared": report["compared_exactly"],
                       "seconds": round(time.process_time() - began, 1), "report": report,
                       "numbers_alike": float((with_numbers_alike(labels, dropped, true) >= TRUE_DUPLICATE).mean()),
                       "precision": float((true >= TRUE_DUPLICATE).mean()) if len(true) else 1.0}
    curve = collision_probability(similar, 14, 8)
    bins = []
    for low in np.arange(round(labels.least * 20), 20) / 20:
        chosen = (similar >= low - 1e-9) & ((similar < low + 0.05 - 1e-9) | (low > 0.94))
        if chosen.any():
            bins.append({"from": float(low), "pairs": int(chosen.sum()), "curve": float(curve[chosen].mean()),
                         "recall": float(met[chosen].mean()), "paired": float(paired[chosen].mean()),
                         "settled": {mode: float(share[mode][chosen].mean()) for mode in MODES}})
    return {"name": labels.name, "documents": len(labels.documents), "seeds": seeds, "bins": bins, "modes": modes}


def show(result: Mapping[str, Any]) -> bool:
    """Print one set's tables and return whether it reaches the limits."""
    good = True
    print(f"\n{result['name']}: {result['documents']:,} documents, {result['seeds']} seeds")
    print("  true Jaccard   pairs   S-curve   found   as pair   settled: " + "   ".join(MODES))
    for row in result["bins"]:
        fine = row["recall"] >= row["curve"] - MARGIN
        good &= fine
        shares = "   ".join(f"{row['settled'][mode]:>{len(mode)}.3f}" for mode in MODES)
        print(f"  {row['from']:.2f} - {row['from'] + 0.05:.2f} {row['pairs']:7,} {row['curve']:9.3f} "
              f"{row['recall']:7.3f} {row['paired']:9.3f} {shares}{'' if fine else '   BELOW THE CURVE'}")
    for mode, figures in result["modes"].items():
        fine = figures["precision"] >= PRECISION or mode == ALONE or result["name"] != NAME
        good &= fine
        print(f"  {mode}: {figures['removed']:,} removed, {figures['precision']:.2%} of them with a true Jaccard >= "
              f"{TRUE_DUPLICATE:.2f} to their survivor, {figures['numbers_alike']:.2%} with numbers alike"
              f"{'' if fine else '   TOO FEW'}\n    ({figures['candidates']:,} candidates, {figures['compared']:,} "
              f"compared exactly, {figures['edges']:,} edges, {figures['seconds']} CPU seconds)")
    return good


def main() -> int:
    """Score both sets and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--labels", type=Path, default=SHARED / "labels")
    parser.add_argument("--corpus", type=Path, default=SHARED / "corpus")
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    sets = [labelled(NAME, options.labels / "neardup", "docs.jsonl.gz",
                     options.labels / "neardup" / "pairs.jsonl.gz", 0.2)]
    if options.corpus.is_dir():
        sets.append(labelled("corpus_pairs", options.corpus, "dev-*.jsonl.gz",
                             options.labels / "corpus_pairs.jsonl.gz", 0.5))
    results = [score(labels, options.seeds) for labels in sets]
    shown = [show(result) for result in results]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0 if all(shown) else 1


if __name__ == "__main__":
    sys.exit(main())
