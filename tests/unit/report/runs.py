"""Makes the files of a run and of a pipeline as the real ones look, with a node lost and one joined on the way."""

from __future__ import annotations

import math
import random
from typing import Any

from tidewheel.jsonlog import JsonLog
from tidewheel.storage import Store

NODES = ("f3c1" + "a" * 52, "09be" + "b" * 52, "77d2" + "c" * 52)
BEGAN = 1_760_000_000.0


def write_pipeline(place: Store) -> None:
    """The summary.json of a small pipeline."""
    sample = {"id": "docstrings/python/asyncio.events", "text": "Event loop and event loop policy. <script>alert(1)"
              "</script> " * 4}
    stages: list[dict[str, Any]] = [
        _stage("read", 1555, 1550, {}, quarantined=5, seconds=2.1),
        _stage("gopher_quality", 1550, 1196, {"gopher_too_few_words": 289, "gopher_mean_word_length": 33,
               "gopher_too_few_alphabetic_words": 22, "gopher_too_many_hashes": 8, "gopher_stop_words": 2},
               seconds=3.4),
        _stage("dedup_exact", 1196, 1102, {"exact_duplicate": 94}, seconds=1.2),
        _stage("dedup_near", 1102, 1013, {"near_duplicate": 89}, seconds=4.8),
        _stage("decontaminate", 1013, 979, {"contaminated": 34}, seconds=1.6),
        _stage("tokenize", 979, 979, {}, seconds=9.7, reused=3),
        _stage("pack", 979, 979, {}, seconds=1.1)]
    stages[1] |= {"edited": 41, "edits": {"pii_replaced": 41}, "would_drop": {"fineweb_duplicate_lines": 77}}
    rng = random.Random(0)
    words = [0] * 40
    for _ in range(1500):
        words[min(39, int(rng.lognormvariate(6, 1.2) / 100))] += 1
    place.write_json("summary.json", {
        "name": "demo", "recipe_hash": "3f9a1c22d07be451", "input": "/tmp/demo/raw", "stages": stages,
        "tokens": 2_104_331, "rows": 8231, "utilisation": 0.9987, "documents": 979, "bytes_per_token": 3.02,
        "quarantine": {"invalid_json": 2, "missing_text": 1, "text_not_a_string": 1, "not_utf8": 1},
        "samples": {"gopher_quality": {"gopher_too_few_words": [sample, sample], "pii_replaced": [
            {**sample, "text": "write to jane@host.org", "after": "write to email@example.com"}]},
                    "dedup_near": {"near_duplicate": [{**sample, "survivor": "licences/aiohttp/LICENSE.txt",
                                                       "score": 0.9375}] * 3},
                    "decontaminate": {"contaminated": [{**sample, "score": 1.0, "survivor": None}]}},
        "histograms": {
            "words": {"edges": [100 * i for i in range(41)], "counts": words, "threshold": [50, 100000]},
            "mean_word_length": {"edges": [i / 2 for i in range(31)], "threshold": [3, 10],
                                 "counts": [int(900 * math.exp(-((i / 2 - 6) ** 2))) for i in range(30)]},
            "alphabetic_fraction": {"edges": [i / 20 for i in range(21)], "threshold": 0.8,
                                    "counts": [int(4 * 1.4 ** i) for i in range(20)]}},
        "sources": _sources(stages),
        "near_dedup": {
            "unit": "words", "ngram": 5, "bands": 14, "rows": 8, "min_jaccard": 0.75, "documents": 1102, "dropped": 89,
            "candidates": 412, "edges": 201, "largest_cluster": 17, "clusters_counted_one_in": 1,
            "cluster_sizes": [{"from": 2, "to": 2, "clusters": 31}, {"from": 3, "to": 4, "clusters": 9},
                              {"from": 9, "to": None, "clusters": 1}],
            "estimated_jaccard": {"edges": [i / 20 for i in range(21)], "counts": [0] * 8 + [3, 9, 20, 31, 40, 50, 44,
                                  60, 51, 40, 30, 34], "threshold": 0.75, "limits": [0.75, None]},
            "sample": {"precision": 0.994, "accepted": 180, "bins": [
                {"from": i / 20, "to": (i + 1) / 20, "curve": 1 - (1 - (i / 20 + 0.025) ** 8) ** 14, "pairs": 5 * i,
                 "recall": min(1.0, 1.02 - (1 - (i / 20 + 0.025) ** 8) ** 14) if i > 8 else None}
                for i in range(20)]}},
        "contamination": {
            "action": "drop", "documents": 34, "documents_in": 1013,
            "sets": [{"name": "gsm8k", "hash": "blake3-0", "items": 1319}],
            "benchmarks": {"gsm8k": {"items": 1319, "items_found": 31, "documents": 33},
                           "piqa": {"items": 1838, "items_found": 1, "documents": 1}},
            "top": [{"benchmark": "gsm8k", "item": "gsm8k-17", "documents": 2, "id": "a", "score": 0.97,
                     "match": "Natalia sold <b>clips</b> to 48 of her friends"}],
            "packed": {"segments": 12_034, "found": 0, "matches": []}},
        "ngram_entropy": {"unigram": 6.012, "bigram": 2.874, "unigram_model": 6.147, "bigram_model": 4.713}})


def _sources(stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Three sources in fixed shares, of which filters take one almost whole."""
    results: list[dict[str, Any]] = []
    for at, stage in enumerate(stages):
        kept = stage["documents_out"]
        scraped = 300 if at == 0 else 12
        left = {"docs.python.org": [(kept - scraped) * 2 // 3, 4000 * (kept - scraped) * 2 // 3],
                "licences": [(kept - scraped) // 3, 2000 * (kept - scraped) // 3],
                "a-very-long-name/of-a-folder/that-was/scraped.jsonl.gz": [scraped, 900 * scraped]}
        results.append({"stage": stage["name"], "left": left})
    return results


def _stage(name: str, came: int, kept: int, dropped: dict[str, int], *, seconds: float, quarantined: int = 0,
           reused: int = 0) -> dict[str, Any]:
    return {"name": name, "documents_in": came, "documents_out": kept, "dropped": dropped, "edited": 0,
            "quarantined": quarantined, "bytes_out": 4300 * kept,
            "units": 16, "units_reused": reused, "seconds": seconds}


class FakeRun:
    """Writes a run step by step; times are seconds since it began."""

    def __init__(self, place: Store, pipeline_uri: str, *, seed: int = 0) -> None:
        self.place, self.rng, self.now, self.tokens = place, random.Random(seed), 0.0, 0
        self.logs = {name: JsonLog(place, f"{name}.jsonl", flush_seconds=3600)
                     for name in ("metrics", "batches", "events", "ledger")}
        place.write_json("run.json", {
            "id": "demo-20260301-101500", "started": BEGAN, "recipe_hash": "aa04be19c5d6f721", "parameters": 3_412_992,
            "vocabulary_size": 2048, "commit": "6cca932" + "0" * 33, "versions": {"torch": "2.13.0", "ray": "2.60.0"},
            "config": {"steps": 300, "run": {"uri": "s3://user:hunter2@host/runs"}, "model": {"dim": 192},
                       "tracking": {"api_key": "hunter2", "tokens_per_step": 8192},
                       "data": {"uri": f"{pipeline_uri}/shards"}}})

    def step(self, step: int, generation: int, world: int, nodes: tuple[str, ...], redone: bool = False) -> None:
        length = 0.42 / world * self.rng.uniform(0.9, 1.2)
        for rank, node in enumerate(nodes):
            self._spent(rank, generation, node, "data_wait", 0.012)
            self._spent(rank, generation, node, "redone" if redone else "productive", length - 0.012, 0.012)
        self.now += length
        self.tokens += 8170
        loss = 4.45 + 3.1 * math.exp(-step / 60) + self.rng.gauss(0, 0.06)
        self.log("metrics", generation=generation, step=step, tokens=self.tokens, loss=loss, gradient_norm=1.1,
                 learning_rate=1e-3, tokens_per_second=8170 / length, world_size=world, step_seconds=length,
                 data_wait_seconds=0.012)
        if step % 25 == 0:
            losses = {"web": 4.3 + 3.1 * math.exp(-step / 60), "code": 4.7 + 3.1 * math.exp(-step / 60)}
            self.log("metrics", step=step, validation_loss=4.5 + 3.1 * math.exp(-step / 60), validation={
                name: {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2) / 3.1,
                       "tokens": 9000} for name, loss in losses.items()})
            self.log("metrics", step=step, sample=f"The function returns <b>{step}</b>")
            self.event("save", step=step, stall_seconds=0.03)
            for rank, node in enumerate(nodes):
                self._spent(rank, generation, node, "save_stall", 0.06)
            self.now += 0.06

    def pause(self, generation: int, nodes: tuple[str, ...], **parts: float) -> None:
        for category, amount in parts.items():
            for rank, node in enumerate(nodes):
                self._spent(rank, generation, node, category, amount)
            self.now += amount

    def event(self, kind: str, **detail: Any) -> None:
        self.log("events", kind=kind, detail=detail)

    def log(self, name: str, **record: Any) -> None:
        self.logs[name].append({"time": BEGAN + self.now, **record})

    def _spent(self, rank: int, generation: int, node: str, category: str, amount: float, after: float = 0.0) -> None:
        start = BEGAN + self.now + after
        self.logs["ledger"].append({"time": start + amount, "rank": rank, "generation": generation, "node": node,
                                    "category": category, "start": start, "end": start + amount})

    def flush(self) -> None:
        for log in self.logs.values():
            log.flush()


def write_run(place: Store, pipeline_uri: str, *, finished: bool = True) -> None:
    """300 steps on two workers; a node is lost at 123, one joins at 212."""
    run = FakeRun(place, pipeline_uri)
    both, alone, again = NODES[:2], NODES[:1], (NODES[0], NODES[2])
    run.pause(0, both, restart=4.2)
    run.event("start", step=0, world_size=2, generation=0, redo=0)
    for step in range(1, 124):
        run.step(step, 0, 2, both)
    if finished:
        run.pause(0, alone, detection=3.1)
        run.event("node_lost", node=NODES[1], reason="raylet died")
        run.pause(1, alone, restart=6.4)
        run.event("resize", to=1, generation=1, **{"from": 2})
        run.event("checkpoint_refused", name="step_00000125", problem="rank_00000.safetensors: hash differs")
        run.event("resume", step=100, world_size=1, generation=1, redo=23)
        for step in range(101, 213):
            run.step(step, 1, 1, alone, redone=step <= 123)
        run.event("node_joined", node=NODES[2])
        run.pause(1, alone, save_stall=0.3)
        run.event("resize", to=2, generation=2, **{"from": 1})
        run.pause(2, again, restart=5.1)
        run.event("resume", step=212, world_size=2, generation=2, redo=0)
        for step in range(213, 301):
            run.step(step, 2, 2, again)
        run.event("finish", step=300, loss=4.46, validation_loss=4.521)
        place.write_json("result.json", {
            "steps": 300, "tokens": run.tokens, "loss": 4.46, "validation_loss": 4.521, "seconds": run.now,
            "sample": "Return the number of elements in the list.\n\n    <b>If</b> the argument is not found, the "
            "default value is returned as a string of the same type.", "run_uri": place.uri})
        for step in (250, 275, 300):
            place.write_json(f"checkpoints/step_{step:08d}/manifest.json", {})
    run.flush()
