"""Make `summary.json` from the counts of a run's units; it is deterministic except for seconds and reused units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidewheel.data import verdicts
from tidewheel.data.stage import Published, counts, read_table, summed
from tidewheel.data.stages import by_source, histograms, kept, ngrams
from tidewheel.data.stages.execute import Finished
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.pack import TRAINING, VALIDATION
from tidewheel.shards.manifest import Manifest


@dataclass
class Ledger:
    """Collector of the counts of a run's stages.

    It asserts that documents balance: each stage passes on, drops or quarantines exactly the documents that it got
    from the stage before.
    """

    stages: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[str, Any] = field(default_factory=dict)
    histograms: dict[str, Any] = field(default_factory=dict)
    quarantine: Counter[str] = field(default_factory=Counter)
    verdict_files: dict[str, list[str]] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    near_index: list[Published] = field(default_factory=list)
    annotating: list[Published] = field(default_factory=list)
    left: list[tuple[str, by_source.BySource]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    """Files of source trees skipped for their content, by reason; `Job.skipped` has those skipped for their name."""

    def stage(self, name: str, done: Finished, *, documents_in: int, documents_out: int,
              dropped: Mapping[str, int] | None = None, quarantined: Mapping[str, int] | None = None,
              judged: Sequence[Published] = (), left: by_source.BySource | None = None) -> None:
        """Add a stage.

        Args:
            name: name of the stage.
            done: its units.
            documents_in: documents that it got.
            documents_out: documents that it passed on.
            dropped: dropped documents, by reason.
            quarantined: quarantined records, by reason.
            judged: units with edits and annotations to report.
            left: documents and bytes that it passed on, by source; None if the texts are those of the stage before.
        """
        dropped = dict(dropped or {})
        quarantined = dict(quarantined or {})
        num_removed = sum(dropped.values()) + sum(quarantined.values())
        assert documents_in == documents_out + num_removed, (
            f"{name}: got {documents_in} documents, passed on {documents_out}, dropped or quarantined {num_removed}")
        if self.stages:
            before = self.stages[-1]
            assert before["documents_out"] == documents_in, (
                f"{before['name']} passed on {before['documents_out']} documents, {name} got {documents_in}")
        self.quarantine.update(quarantined)
        if left is not None:
            assert by_source.total(left)[0] == documents_out, f"{name}: the sources do not add up"
            self.left.append((name, left))
        size = by_source.total(self.left[-1][1])[1] if self.left else 0
        self.stages.append({
            "name": name, "documents_in": documents_in, "documents_out": documents_out, "dropped": dropped,
            "edited": sum(unit.summary.get("edited", 0) for unit in judged), "edits": counts(judged, "edits"),
            "would_drop": counts(judged, "would_drop"), "quarantined": sum(quarantined.values()),
            "bytes_out": size,
            "units": len(done.units), "units_reused": done.reused, "seconds": round(done.seconds, 3)})

    def judged(self, name: str, units: Sequence[Published]) -> None:
        """Add samples, histograms, verdict files and costs of the units of a stage that `stage` has added."""
        samples = verdicts.merge_samples([unit.summary.get("samples", {}) for unit in units])
        if samples:
            self.samples[name] = samples
        measured = histograms.merge([unit.summary.get("histograms", {}) for unit in units])
        for statistic, value in measured.items():
            self.histograms[statistic if statistic not in self.histograms else f"{name}.{statistic}"] = value
        if costs := summed(unit.costs for unit in units):
            entry = next(entry for entry in self.stages if entry["name"] == name)
            entry["filters"] = [{"name": filter, "documents": cost.documents, "seconds": round(cost.seconds, 6)}
                                for filter, cost in costs.items()]
        self.annotating += [unit for unit in units if "annotations" in unit.files]
        self.verdict_files[name] = [unit.files["verdicts"].key for unit in units if "verdicts" in unit.files]

    def parts(self, name: str, done: Finished) -> None:
        """Add a stage over partitions, from the counts `documents_in`, `documents` and `dropped` of its units."""
        units = [unit for unit in done.units if "documents_in" in unit.summary]
        self.stage(name, done, documents_in=_sum(units, "documents_in"), documents_out=_sum(units, "documents"),
                   dropped=counts(units, "dropped"), quarantined=counts(units, "quarantined"),
                   judged=units, left=by_source.merge(unit.summary["left"] for unit in units))
        self.judged(name, done.units)

    def publish_verdicts(self, job: Job) -> None:
        """Write `verdicts/<stage>/summary.json` of each stage that judged, and delete verdicts of earlier recipes."""
        output = job.store
        kept: set[str] = set()
        for entry in self.stages:
            name = entry["name"]
            if name in self.verdict_files:
                value = {key: entry[key] for key in ("name", "documents_in", "documents_out", "dropped", "edited",
                                                     "edits", "would_drop", "quarantined")}
                output.write_json(f"verdicts/{name}/summary.json", {**value, "samples": self.samples.get(name, {})})
                kept |= {f"verdicts/{name}/summary.json", *self.verdict_files[name]}
        for file in output.list("verdicts"):
            if file.key not in kept:
                output.delete(file.key)


def _sum(units: Sequence[Published], name: str) -> int:
    return sum(unit.summary[name] for unit in units)


def write(job: Job, ledger: Ledger, packed: Sequence[Published], manifests: Mapping[str, Manifest] | None,
          made: Mapping[str, Any], product: Mapping[str, Any] | None = None,
          written: Sequence[Published] = ()) -> dict[str, Any]:
    """Write `summary.json` and return its content.

    Args:
        job: what the stages work on.
        ledger: counts of the stages.
        packed: units of the pack stage.
        manifests: manifests of the packed sets; None if nothing is packed.
        made: content of `recipe.json`, from `origin.write`.
        product: manifest of the product; None if the recipe writes none.
        written: units of the write stage.
    """
    skipped = ledger.skipped + Counter(job.skipped)
    value = {
        "name": job.config.name, "recipe_hash": job.config.recipe_hash(), "input": job.input,
        "files": sum(len(file.members) or 1 for file in job.files),
        "input_bytes": sum(file.bytes for file in job.files), "partitions": job.partitions,
        **({"skipped": dict(sorted(skipped.items()))} if skipped else {}),
        "stages": ledger.stages, "quarantine": dict(sorted(ledger.quarantine.items())),
        "samples": ledger.samples, "histograms": ledger.histograms, **ledger.more,
        "sources": by_source.by_stage(ledger.left), "kind": job.config.read.kind, "tokens": 0,
        "kept": kept.merge(unit.summary.get("kept", []) for unit in packed or written),
        "made": {name: made[name] for name in ("recipe", "input", "read_besides", "versions", "commit")},
    }
    if product is not None:
        value["documents"] = product["documents"]
        value["dataset"] = {name: product[name] for name in (
            "formats", "documents", "bytes", "splits", "languages", "licenses")}
        value["dataset"]["files"] = len(product["files"])
    if manifests is not None:
        value |= _sets(job, packed, manifests)
    job.store.write_json("summary.json", value)
    return value


def _sets(job: Job, packed: Sequence[Published], manifests: Mapping[str, Manifest]) -> dict[str, Any]:
    """Return the entries on the training and the validation set."""
    training = manifests[TRAINING]
    validation = manifests[VALIDATION]
    vocabulary = training.vocabulary_size
    tokens = training.tokens + validation.tokens
    return {
        "loss_tokens": _loss_tokens(packed),
        "source_tokens": by_source.largest(by_source.merge(unit.summary["source_tokens"] for unit in packed),
                                           by_source.REPORT_SOURCES),
        "tokens": training.tokens, "rows": training.rows, "documents": training.documents,
        "utilisation": round(training.utilisation, 6), "vocabulary_size": vocabulary,
        "sequence_length": training.sequence_length, "evaluation_sets": list(training.evaluation_sets),
        "validation": {"tokens": validation.tokens, "rows": validation.rows, "documents": validation.documents,
                       "utilisation": round(validation.utilisation, 6)},
        "bytes_per_token": round(_sum(packed, "bytes") / tokens, 6) if tokens else None,
        "ngram_entropy": ngrams.entropies(_counts(job, packed, VALIDATION, vocabulary),
                                          _counts(job, packed, TRAINING, vocabulary)),
    }


def _loss_tokens(packed: Sequence[Published]) -> int | None:
    """Return the number of tokens of the training set that count for the loss; None if all do."""
    counts = [unit.summary[TRAINING].get("loss_tokens") for unit in packed]
    return None if None in counts else sum(counts)


def _counts(job: Job, units: Sequence[Published], name: str, vocabulary: int) -> ngrams.Counts:
    return ngrams.merge((read_table(job.store, unit.files[f"{name}-unigrams"]) for unit in units),
                        (read_table(job.store, unit.files[f"{name}-bigrams"]) for unit in units), vocabulary)
