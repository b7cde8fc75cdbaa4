"""The files of a run: run.json at its start, metrics and batch digests meanwhile, result.json at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tidewheel import jsonlog, storage
from tidewheel.config import build
from tidewheel.errors import ShardError
from tidewheel.jsonlog import JsonLog
from tidewheel.provenance import git_commit, versions, without_secrets
from tidewheel.shards.config import MixtureConfig
from tidewheel.shards.growing import Growing
from tidewheel.shards.manifest import Manifest
from tidewheel.shards.source import Source, open_source
from tidewheel.shards.waves import Passes
from tidewheel.storage import Store
from tidewheel.train.batch_size import BatchSizes
from tidewheel.train.branching import Branch, lineage
from tidewheel.train.config import TrainConfig
from tidewheel.train.history import RunHistory, last_step, read_history
from tidewheel.train.positions import Positions, Window

PASSED_OVER = "passed_over.jsonl"
"""Log of rollbacks, see `RunRecord.pass_over`."""
WAVES = "waves.jsonl"
"""Log of the waves that a run has read from a growing shard set, see `RunRecord.take_in`."""
PACKAGES = ("tidewheel", "torch", "ray", "numpy", "pyarrow", "tokenizers", "safetensors", "pydantic")

@dataclass(frozen=True)
class TrainResult:
    """Result of a finished run; result.json holds the same."""

    steps: int
    tokens: int
    """Real tokens trained on."""
    loss: float | None
    """Loss of the last step in nats per token; None when this process had no step left to do."""
    validation_loss: float | None
    """Nats per token; None without a validation set."""
    sample: str
    seconds: float
    """Seconds from the run's first start to its end."""
    run_uri: str


class RunRecord:
    """The files of a run, written by rank 0.

    Args:
        store: the run's folder.
        generation: number of the group of workers. Readers put its lines behind those of earlier groups.
        history: the run's history before that generation; None: read it from the folder.
    """

    def __init__(self, store: Store, generation: int = 0, history: RunHistory | None = None) -> None:
        self.store, self._generation, self._history = store, generation, history
        self.metrics = JsonLog(store, "metrics.jsonl", order=generation)
        self.batches = JsonLog(store, "batches.jsonl", order=generation)
        self._waves: dict[int, str] | None = None  # hashes by number, of the waves that the run has read

    def flush(self) -> None:
        """Write out the buffered lines of all logs."""
        self.metrics.flush()
        self.batches.flush()

    def close(self) -> None:
        """Hand over the last lines and let go of the logs, without waiting for the store."""
        self.metrics.close()
        self.batches.close()

    def unwritten(self) -> dict[str, list[str]]:
        """Return the lines that only this process holds, by log. A checkpoint carries them, for `restore`."""
        logs = {"metrics": self.metrics.unwritten(), "batches": self.batches.unwritten()}
        return {name: lines for name, lines in logs.items() if lines}

    def restore(self, unwritten: Mapping[str, Sequence[str]]) -> None:
        """Write the lines that the process that saved the checkpoint may not have written."""
        self.metrics.restore(unwritten.get("metrics", ()))
        self.batches.restore(unwritten.get("batches", ()))
        self.metrics.flush_soon()
        self.batches.flush_soon()

    def evaluated(self, step: int, figure: str = "validation_loss") -> bool:
        """Return whether the model of this step has been evaluated since it was last trained.

        Args:
            step: of the model.
            figure: name that the record of an evaluation has.
        """
        for line in jsonlog.newest_first(self.store, "metrics.jsonl"):
            if line.get("step") == step and figure in line:
                return True
            if "loss" in line and int(line["step"]) <= step:  # a step's line; evaluations may come late
                return False
        return False

    def write_run(self, config: TrainConfig, source: Source, validation: Mapping[str, Manifest], *, parameters: int,
                  vocabulary_size: int) -> None:
        """Write run.json unless it exists.

        Args:
            config: the run's settings.
            source: the training data.
            validation: manifests of the validation sets by domain.
            parameters: number of the model's parameters.
            vocabulary_size: rows of the embedding.
        """
        if self.store.exists("run.json"):
            return
        sequences = BatchSizes.of(config.batch, source.manifest.sequence_length).total(config.steps)
        sequences *= 1 if config.outer is None else config.outer.groups  # of all groups: they share one order
        sets = _data(source, sequences)
        named = {name: _shard_set(uri, validation[name]) for name, uri in config.data.validation_sets.items()}
        if named:
            sets["validation"] = named.get("", named)
        self.store.write_json("run.json", {
            "id": config.run.id, "started": time.time(), "config": without_secrets(config.canonical()),
            "code": {name: code.hash for name, code in config.own_parts().items()},
            "part_versions": config.versions(), "recipe_hash": config.recipe_hash(), "data": sets,
            "parameters": parameters, "vocabulary_size": vocabulary_size, "versions": versions(PACKAGES),
            "commit": git_commit(),
            **({"branch": lineage(Branch.parse(config.run.branch))} if config.run.branch else {})})

    def started(self) -> float:
        """Return the Unix time of the run's first start."""
        return float(self.store.read_json("run.json")["started"])

    def failures(self) -> int:
        """Return the number of failures of workers and nodes before this generation."""
        return self._known_history().failures

    def last_step(self) -> int:
        """Return the furthest step that was done before this generation, 0 if none."""
        return last_step(self.store, known=self._known_history().step)

    def _known_history(self) -> RunHistory:
        if self._history is None:
            self._history = read_history(self.store)
        return self._history

    def pass_over(self, step: int, back_to: int, window: Window) -> None:
        """Record a rollback, durably, before it takes effect: after a crash the steps must take the same positions.

        Args:
            step: the step that caused it.
            back_to: step of the checkpoint that the run goes back to.
            window: positions that the run passes over.

        Raises:
            StorageError: the record cannot be written.
        """
        log = JsonLog(self.store, PASSED_OVER, order=self._generation)
        log.append({"time": time.time(), "step": step, "back_to": back_to, "start": window[0], "end": window[1]})
        log.flush()

    def take_over_rollbacks(self, parent: str, count: int) -> None:
        """Record the first rollbacks of the run that this one branches from, durably, unless that is done already.

        Args:
            parent: URI of that run.
            count: its rollbacks up to the step of the branch.
        """
        if not count or read_rollbacks(self.store):
            return
        log = JsonLog(self.store, PASSED_OVER, order=self._generation)
        for line in read_rollbacks(storage.store(parent))[:count]:
            log.append(line)
        log.flush()

    def take_in(self, waves: Sequence[Mapping[str, Any]]) -> None:
        """Record, durably, that the run reads these waves of its shard set (`shards.growing`), before it does.

        Raises:
            ShardError: the run has read a wave of this number with other content.
        """
        if self._waves is None:  # read once: a run may have a wave for each step
            self._waves = {int(line["wave"]): line["hash"] for line in jsonlog.read(self.store, WAVES)}
            self._waves_log = JsonLog(self.store, WAVES, order=self._generation)
        _same_waves(self._waves, {wave["number"]: wave["hash"] for wave in waves}, self.store.uri)
        for wave in waves:
            if wave["number"] not in self._waves:
                self._waves_log.append({"time": time.time(), "wave": wave["number"], "hash": wave["hash"]})
            self._waves[wave["number"]] = wave["hash"]
        self._waves_log.flush()

    def write_result(self, result: TrainResult) -> None:
        """Write result.json, which marks the run as finished."""
        self.store.write_json("result.json", asdict(result))


def read_rollbacks(store: Store) -> list[dict[str, int]]:
    """Return the rollbacks of a run, oldest first: "step", "back_to", and "start" and "end" of the window."""
    return jsonlog.read(store, PASSED_OVER)


def positions(run: dict[str, Any], source: Source, rollbacks: Sequence[dict[str, int]] = ()) -> Positions:
    """Return the positions of a run's steps.

    Args:
        run: content of run.json.
        source: the data that the run reads.
        rollbacks: the run's rollbacks so far.
    """
    windows = [(line["start"], line["end"]) for line in rollbacks]
    outer = run["config"].get("outer") or {}
    share = outer.get("group", 0), outer.get("groups", 1)
    return Positions(BatchSizes(run["config"]["batch"], source.manifest.sequence_length), windows, share)


def passes_of(rollouts: Mapping[str, Any] | None) -> Passes:
    """Return how a run reads the waves of its shard set.

    Args:
        rollouts: the run's `rollouts` as in run.json; None: it makes none.
    """
    if not rollouts:
        return Passes()
    one_step = rollouts.get("minibatches", 1) == 1  # it has all groups of a wave
    return Passes(rollouts.get("epochs", 1), 1 if one_step else rollouts["group"])


def read_result(store: Store) -> TrainResult | None:
    """Return the result of a finished run, or None."""
    return TrainResult(**store.read_json("result.json")) if store.exists("result.json") else None


def recorded_source(run: dict[str, Any], uri: str | None = None, store: Store | None = None) -> Source:
    """Open the data that a run has read. A set that is still being written is opened as far as it exists.

    Args:
        run: content of run.json.
        uri: where the shard set is now, if it was moved. The sets of a mixture must be where they were.
        store: the run's folder, to compare a growing set's waves with the waves that the run has read.

    Raises:
        ShardError: a set is gone, or is not the one that the run was started with.
    """
    data, seed = run["config"]["data"], run["config"]["data"]["seed"]
    recorded = run["data"].get("shards") or run["data"]["mixture"]
    if "shards" in run["data"]:
        where = uri or recorded["uri"]
        source = open_source(where, None, seed, partly=True, passes=passes_of(run["config"].get("rollouts")))
    else:
        where = ", ".join(domain["uri"] for domain in recorded["domains"].values())
        if uri is not None:
            raise ShardError("one shard set is given for a run that read a mixture", where=uri,
                             fix="leave it out: run.json says where the domains are")
        mixture = build(MixtureConfig, data["mixture"])
        domains = {name: domain.model_copy(update={"shards": recorded["domains"][name]["uri"]})
                   for name, domain in mixture.domains.items()}
        source = open_source("", mixture.model_copy(update={"domains": domains}), seed)
    if source.hash != recorded["hash"]:
        raise ShardError("this is not the data that the run read", where=where,
                         fix="give the original set; a copy elsewhere is valid too")
    if store is not None and (source.manifest.waves or source.manifest.to_come):
        _same_waves({int(line["wave"]): line["hash"] for line in jsonlog.read(store, WAVES)},
                    dict(enumerate(Growing.of(source.manifest).hashes[1:])), where)
    return source


def _same_waves(taken_in: Mapping[int, str], now: Mapping[int, str], where: str) -> None:
    other = [wave for wave, wave_hash in sorted(now.items()) if taken_in.get(wave, wave_hash) != wave_hash]
    if other:
        raise ShardError(f"wave {other[0]} of the shard set is not the one that the run read: the set was "
                         "rewritten with other content", where=where,
                         fix="give the original set, or start a new run with another run.id")


def _data(source: Source, sequences: int) -> dict[str, Any]:
    """Return "shards" of a single set, or "mixture" with its domains' shares of a run of `sequences` sequences."""
    if source.mixture is None:
        return {"shards": {**_shard_set(source.domains[0].uri, source.manifest), "hash": source.hash}}
    domains = {domain.name: _shard_set(domain.uri, domain.manifest) for domain in source.domains}
    return {"mixture": {"hash": source.hash, "domains": domains, "sequences": sequences, "spans": source.spans(),
                        "proportions": source.proportions(sequences)}}


def _shard_set(uri: str, manifest: Manifest) -> dict[str, Any]:
    return {"uri": storage.store(uri).uri, "hash": manifest.hash, "recipe_hash": manifest.recipe_hash,
            **({"waves": len(manifest.waves) + manifest.to_come} if manifest.waves or manifest.to_come else {}),
            "rows": None if manifest.to_come else manifest.rows,
            "tokens": None if manifest.to_come else manifest.tokens, "sequence_length": manifest.sequence_length}
