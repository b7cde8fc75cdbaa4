"""Make a run's rollouts beside its training: the set, the pool of generators and the collector's thread."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tidewheel import storage
from tidewheel.checkpoint import tokenizer_files
from tidewheel.checkpoint.verify import locate
from tidewheel.errors import ConfigError, OwnershipError, StorageError, TidewheelError
from tidewheel.jsonlog import JsonLog
from tidewheel.post.collector import Collector, head_of, open_set
from tidewheel.post.fetching import Fetched
from tidewheel.post.groups import Group
from tidewheel.post.ledger import LOG, StepEntry
from tidewheel.post.pool import OnEvent, Pool, RayPool
from tidewheel.post.prompts import Prompts, prompts_of
from tidewheel.post.recorded import RecordedCollector
from tidewheel.post.replay import check_replay
from tidewheel.post.scaling import Scaling, Training
from tidewheel.shards import notices
from tidewheel.shards.tokenizer import Encoder, load, of_manifest
from tidewheel.storage import content_hash
from tidewheel.train.config import TrainConfig
from tidewheel.train.growth import FAILED
from tidewheel.train.policy import resident
from tidewheel.train.record import recorded_source
from tidewheel.train.run import Run

logger = logging.getLogger(__name__)
JOIN_SECONDS = 10.0
TOKENIZER = "tokenizer.json"
MakePool = Callable[[tuple[Any, ...], TrainConfig, OnEvent], Pool]


@dataclass(frozen=True)
class Prepared:
    """What the rollouts of a run need: read once, before training starts."""

    prompts: Prompts
    tokenizer: dict[str, Any]
    """As the set's manifest names it."""
    vocabulary_size: int


def prepare(run: Run) -> Prepared | None:
    """Read the prompts and begin the run's set of rollouts, unless it exists; None if the run makes none.

    Only the first call for an open run does the work.

    Raises:
        ConfigError, InputError, RolloutError: the settings, the prompts or the set do not fit.
    """
    config = run.config
    if config.rollouts is None or run.prepared is not None:
        return run.prepared
    if config.rollouts.replay:
        check_replay(config)
        return None
    encoder, data = tokenizer_of(config)
    prompts = prompts_of(config, encoder)
    folder = storage.store(config.data.uri)
    folder.write(TOKENIZER, data)
    tokenizer = {**encoder.manifest(content_hash(data)), "file": TOKENIZER}
    vocabulary = config.model.vocabulary_size or encoder.padded_size
    prepared = Prepared(prompts, tokenizer, vocabulary)
    open_set(folder, head_of(config, prompts, tokenizer, vocabulary))
    run.prepared = prepared
    return prepared


@contextlib.contextmanager
def making_rollouts(run: Run, make_pool: MakePool) -> Iterator[None]:
    """Make the run's rollouts while the block runs, if its settings say so.

    Only the run's owner may call it. An error of the rollouts ends the training, which finds the reason in the set's
    folder.

    Args:
        run: the open run, for which `prepare` was called.
        make_pool: starts the generators, from the arguments of `Generator`, the settings and a listener.
    """
    config, prepared = run.config, prepare(run)
    if prepared is None or config.rollouts is None:
        yield
        return
    log = JsonLog(run.store, LOG)

    def record(kind: str, **detail: Any) -> None:
        log.append({"time": time.time(), "kind": kind, **detail})
        log.flush_due()

    folder = storage.store(config.data.uri)
    if folder.exists(FAILED):
        folder.delete(FAILED)
    known = open_set(folder, head_of(config, prepared.prompts, prepared.tokenizer, prepared.vocabulary_size))
    made: type[Collector] = RecordedCollector if config.rollouts.schedule == "recorded" else Collector
    code = [asdict(its) for its in config.code()]
    pool = make_pool((config.canonical(), code, prepared.tokenizer, prepared.vocabulary_size), config, record)
    ended = threading.Event()
    scaling = Scaling(config.rollouts) if config.rollouts.generators.min_processes else None
    training = Training(run.store, config.parallel.pipeline, config.rollouts.wave_steps)

    def on_step(entry: StepEntry, groups: list[Group], seconds: float) -> None:
        notices.tell(folder.uri)
        record("step", **figures(entry, groups, seconds))
        if scaling is not None and isinstance(pool, RayPool):
            before, ahead = scaling.processes, training.ahead(entry.step)
            if scaling.after(ahead) != before:
                pool.resize(scaling.processes)
                record("generators_scaled", step=entry.step, ahead=ahead, before=before, now=scaling.processes)

    collector = made(config, prepared.prompts, known, pool, ended=ended, on_step=on_step)
    thread = threading.Thread(target=_collect, args=(collector, run, ended), name="rollouts", daemon=True)
    thread.start()
    try:
        with notices.promised(folder.uri):
            yield
    finally:
        resident.drop(run.store.uri)
        ended.set()
        notices.tell(run.store.uri)
        thread.join(JOIN_SECONDS)
        pool.close()
        log.close()


def figures(entry: StepEntry, groups: list[Group], seconds: float) -> dict[str, Any]:
    """Return a step's figures for the log.

    Args:
        entry: the step's entry in the ledger.
        groups: its groups, also those dropped.
        seconds: that it took.
    """
    rewards = [reward for group in groups for reward in group.rewards]
    answers = [answer for group in groups for answer in group.answers]
    tokens = sum(group.tokens for group in groups)
    fetched = sum((group.fetched for group in groups), Fetched())
    engines = sorted({group.engine for group in groups} - {""})
    of_engine = {"engine": ", ".join(engines), "engine_losses": sum(group.engine_losses for group in groups)}
    return {
        **(of_engine if engines else {}),
        "step": entry.step, "version": entry.version, "lag": sum(entry.lags) / max(1, len(entry.lags)),
        "groups": len(groups), "admitted": len(entry.admitted),
        "dropped": dict(entry.reasons()), "reward": sum(rewards) / max(1, len(rewards)),
        "answer_tokens": tokens / max(1, len(answers)), "tokens": tokens,
        "stopped": sum(answer.stopped for answer in answers) / max(1, len(answers)), "seconds": round(seconds, 4),
        "processor_seconds": round(sum(group.seconds for group in groups), 4),
        "fetched": {**asdict(fetched), "seconds": round(fetched.seconds, 4)}}


def _collect(collector: Collector, run: Run, ended: threading.Event) -> None:
    """Collect until the run is over; leave the reason of an error for the training."""
    try:
        collector.collect()
    except Exception as error:
        if ended.is_set() or isinstance(error, OwnershipError):  # the run belongs to another driver, and goes on
            return
        logger.error("rollouts have ended", exc_info=error)
        known = isinstance(error, TidewheelError)
        failure = {"error": error.what if isinstance(error, TidewheelError) else f"{type(error).__name__}: {error}",
                   "fix": error.fix if isinstance(error, TidewheelError) else "see the log of the driver",
                   "traceback": "" if known else traceback.format_exc()}
        try:
            folder = storage.store(run.config.data.uri)
            folder.write_json(FAILED, failure)
            notices.tell(folder.uri)
        except StorageError as again:  # training gives up by itself after `data.wait_seconds`
            logger.error("training cannot be told: %s", again)


def tokenizer_of(config: TrainConfig) -> tuple[Encoder, bytes]:
    """Return the tokenizer of a run's rollouts, and the bytes of its file.

    Raises:
        ConfigError: it is not known, or there is no such file.
    """
    rollouts = config.rollouts
    assert rollouts is not None
    if rollouts.tokenizer:
        folder, key = storage.split(rollouts.tokenizer)
        try:
            data = folder.read(key)
        except FileNotFoundError:
            raise ConfigError("there is no such file", where=rollouts.tokenizer,
                              fix="set rollouts.tokenizer to the tokenizer's file") from None
        return load(data), data
    start = config.model.init_from
    if not start:
        raise ConfigError("the tokenizer is not known: training starts from random weights", where="rollouts.tokenizer",
                          fix="set it to the tokenizer's file, or set model.init_from to a trained model")
    before, _, _ = locate(start)
    if before.exists("run.json"):
        domain = recorded_source(before.read_json("run.json")).domains[0]
        shards = storage.store(domain.uri)
        return of_manifest(shards, domain.manifest.tokenizer), shards.read(domain.manifest.tokenizer["file"])
    if before.exists(tokenizer_files.TOKENIZER):
        data = before.read(tokenizer_files.TOKENIZER)
        return load(data), data
    raise ConfigError("the tokenizer is not known: the model in model.init_from has none beside it",
                      where="rollouts.tokenizer", fix="set it to the tokenizer's file")
