"""What a run writes about itself: run.json once, metrics and batch digests as it goes, result.json at the end."""

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
from tidewheel.storage import Store
from tidewheel.train.batch_size import BatchSizes
from tidewheel.train.config import TrainConfig
from tidewheel.train.history import RunHistory, last_step, read_history
from tidewheel.train.positions import Positions, Window

PASSED_OVER = "passed_over.jsonl"
"""Log of rollbacks, see `RunRecord.pass_over`."""
WAVES = "waves.jsonl"
"""Log of the waves that a run took in, see `RunRecord.take_in`."""
PACKAGES = ("tidewheel", "torch", "ray", "numpy", "pyarrow", "tokenizers", "safetensors", "pydantic")

@dataclass(frozen=True)
class TrainResult:
    """How a run ended; the same in result.json."""

    steps: int
    tokens: int
    """Real tokens trained on."""
    loss: float | None
    """Of the last step, nats per token; None when this process had no step left to run."""
    validation_loss: float | None
    """Nats per token; None without a validation set."""
    sample: str
    seconds: float
    """From the run's first start to its end."""
    run_uri: str


class RunRecord:
    """The files of a run, written by rank 0.

    Args:
        generation: of the workers; what a later one writes is read behind it.
        history: the run's history before that generation; None: read it from the folder.
    """

    def __init__(self, store: Store, generation: int = 0, history: RunHistory | None = None) -> None:
        self.store, self._generation, self._history = store, generation, history
        self.metrics = JsonLog(store, "metrics.jsonl", order=generation)
        self.batches = JsonLog(store, "batches.jsonl", order=generation)

    def flush(self) -> None:
        """Write out what the logs still hold."""
        self.metrics.flush()
        self.batches.flush()

    def close(self) -> None:
        """The last call, which waits for no store."""
        self.metrics.close()
        self.batches.close()

    def unwritten(self) -> dict[str, list[str]]:
        """What only this process knows, by log; a checkpoint takes it along, for `restore`."""
        logs = {"metrics": self.metrics.unwritten(), "batches": self.batches.unwritten()}
        return {name: lines for name, lines in logs.items() if lines}

    def restore(self, unwritten: Mapping[str, Sequence[str]]) -> None:
        """Write what the process that took the checkpoint may not have come to write."""
        self.metrics.restore(unwritten.get("metrics", ()))
        self.batches.restore(unwritten.get("batches", ()))
        self.metrics.flush_soon()
        self.batches.flush_soon()

    def evaluated(self, step: int) -> bool:
        """Whether the model of this step has been evaluated, since it was last trained."""
        for line in jsonlog.newest_first(self.store, "metrics.jsonl"):
            if line.get("step") == step and "validation_loss" in line:
                return True
            if "loss" in line and int(line["step"]) <= step:  # not an evaluation, which may come late
                return False
        return False

    def write_run(self, config: TrainConfig, source: Source, validation: Mapping[str, Manifest], *, parameters: int,
                  vocabulary_size: int) -> None:
        """Write run.json unless it is there."""
        if self.store.exists("run.json"):
            return
        sequences = BatchSizes.of(config.batch, source.manifest.sequence_length).total(config.steps)
        sets = _data(source, sequences)
        named = {name: _shard_set(uri, validation[name]) for name, uri in config.data.validation_sets.items()}
        if named:
            sets["validation"] = named.get("", named)
        self.store.write_json("run.json", {
            "id": config.run.id, "started": time.time(), "config": without_secrets(config.canonical()),
            "code": {name: code.hash for name, code in config.own_parts().items()},
            "part_versions": config.versions(), "recipe_hash": config.recipe_hash(), "data": sets,
            "parameters": parameters, "vocabulary_size": vocabulary_size, "versions": versions(PACKAGES),
            "commit": git_commit()})

    def started(self) -> float:
        """Unix time of the run's first start."""
        return float(self.store.read_json("run.json")["started"])

    def failures(self) -> int:
        """How often a worker or node failed before."""
        return self._known_history().failures

    def last_step(self) -> int:
        """The furthest step that was done before, 0 when none was."""
        return last_step(self.store, known=self._known_history().step)

    def _known_history(self) -> RunHistory:
        if self._history is None:
            self._history = read_history(self.store)
        return self._history

    def pass_over(self, step: int, back_to: int, window: Window) -> None:
        """Record for good that the run goes back from `step` to the checkpoint of `back_to` and passes over `window`.

        Written out before anything else happens: after a crash the steps must take the same positions.
        """
        log = JsonLog(self.store, PASSED_OVER, order=self._generation)
        log.append({"time": time.time(), "step": step, "back_to": back_to, "start": window[0], "end": window[1]})
        log.flush()

    def take_in(self, waves: Sequence[Mapping[str, Any]]) -> None:
        """Record for good that the run reads these waves of its shard set (`shards.growing`), before it does.

        Raises:
            ShardError: it has read another one in the place of one of them.
        """
        known = {int(line["wave"]): line["hash"] for line in jsonlog.read(self.store, WAVES)}
        _same_waves(known, {wave["number"]: wave["hash"] for wave in waves}, self.store.uri)
        log = JsonLog(self.store, WAVES, order=self._generation)
        for wave in waves:
            if wave["number"] not in known:
                log.append({"time": time.time(), "wave": wave["number"], "hash": wave["hash"]})
        log.flush()

    def write_result(self, result: TrainResult) -> None:
        """Write result.json, the sign that the run is over."""
        self.store.write_json("result.json", asdict(result))


def read_rollbacks(store: Store) -> list[dict[str, int]]:
    """Rollbacks of a run, oldest first: "step" that made it, "back_to", "start" and "end" of what is passed over."""
    return jsonlog.read(store, PASSED_OVER)


def positions(run: dict[str, Any], source: Source, rollbacks: Sequence[dict[str, int]] = ()) -> Positions:
    """The positions of the steps of the run of this run.json, which reads `source`, as they are after `rollbacks`."""
    windows = [(line["start"], line["end"]) for line in rollbacks]
    return Positions(BatchSizes(run["config"]["batch"], source.manifest.sequence_length), windows)


def read_result(store: Store) -> TrainResult | None:
    """The result of a finished run, or None."""
    return TrainResult(**store.read_json("result.json")) if store.exists("result.json") else None


def recorded_source(run: dict[str, Any], uri: str | None = None, store: Store | None = None) -> Source:
    """What the run of this run.json read; of a set that is still being written, as far as it is there.

    Args:
        run: content of run.json.
        uri: where its shard set is now; of a mixture, the sets must be where they were.
        store: the run's folder, to compare the waves of a set in waves with those that it took in.

    Raises:
        ShardError: a set is gone, or is not the one the run was started with.
    """
    data, seed = run["config"]["data"], run["config"]["data"]["seed"]
    recorded = run["data"].get("shards") or run["data"]["mixture"]
    if "shards" in run["data"]:
        where = uri or recorded["uri"]
        source = open_source(where, None, seed, partly=True)
    else:
        where = ", ".join(domain["uri"] for domain in recorded["domains"].values())
        if uri is not None:
            raise ShardError("one shard set is given for a run that read a mixture", where=uri,
                             mend="leave it out: run.json says where the domains are")
        mixture = build(MixtureConfig, data["mixture"])
        domains = {name: domain.model_copy(update={"shards": recorded["domains"][name]["uri"]})
                   for name, domain in mixture.domains.items()}
        source = open_source("", mixture.model_copy(update={"domains": domains}), seed)
    if source.hash != recorded["hash"]:
        raise ShardError("this is not the data that the run read", where=where,
                         mend="give the original set; a copy of it elsewhere will do")
    if store is not None and (source.manifest.waves or source.manifest.to_come):
        _same_waves({int(line["wave"]): line["hash"] for line in jsonlog.read(store, WAVES)},
                    dict(enumerate(Growing.of(source.manifest).hashes[1:])), where)
    return source


def _same_waves(taken_in: Mapping[int, str], now: Mapping[int, str], where: str) -> None:
    other = [number for number, found in sorted(now.items()) if taken_in.get(number, found) != found]
    if other:
        raise ShardError(f"wave {other[0]} of the shard set is not what the run read: the set was made anew with other "
                         "content", where=where, mend="give the original set, or start a new run with another run.id")


def _data(source: Source, sequences: int) -> dict[str, Any]:
    """"shards" of a single set; "mixture" with what its domains give to a run of so many sequences."""
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
