"""A run that is open in this process: its settings and its folder, opened once and passed on.

A driver opens the run before it starts any process; each worker process opens it once and keeps it for all generations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidewheel import storage
from tidewheel.ownership import CHECKPOINTS
from tidewheel.shards.manifest import Manifest
from tidewheel.shards.source import Source
from tidewheel.storage import Store
from tidewheel.train import checks
from tidewheel.train.branching import Branch
from tidewheel.train.config import TrainConfig
from tidewheel.train.record import TrainResult, read_result
from tidewheel.train.teacher_config import live_teacher

ROLLOUT_SECONDS = 3600.0
"""Default of `data.wait_seconds` where the run makes its own rollouts."""


class Run:
    """An open run.

    Attributes:
        config: the settings, with absolute URIs: a worker's working folder is not the user's.
        store: the run's folder.
        checkpoints: the folder of its checkpoints.
        prepared: what `post.running.prepare` has read for the run's rollouts; None before, and for a run without.
    """

    prepared: Any = None

    def __init__(self, config: TrainConfig, store: Store) -> None:
        self.config = config
        self.store = store
        self.checkpoints = store.child(CHECKPOINTS)
        self._data: tuple[Source, Mapping[str, Manifest]] | None = None

    @classmethod
    def open(cls, run: Run | TrainConfig) -> Run:
        """Return the run with these settings; return a run that is already open as it is."""
        if isinstance(run, Run):
            return run
        config = with_absolute_uris(run)
        return cls(config, storage.store(config.run_uri))

    @property
    def uri(self) -> str:
        """URI of the run's folder."""
        return self.store.uri

    def check(self) -> None:
        """Check the settings against this machine and the data. Only the first call does the work.

        Raises:
            ConfigError: a part cannot work here, there is no data or too little, or the model does not fit it.
            ShardError: a shard set is missing, damaged or empty, or the sets do not belong together.
        """
        self.data()

    def data(self) -> tuple[Source, Mapping[str, Manifest]]:
        """Return the training data and the validation sets' manifests by domain, checked; see `check`.

        All generations of a process share them. A set that is still being written grows in place.
        """
        if self._data is None:
            checks.parts(self.config)
            self._data = checks.read_data(self.config)
        return self._data

    def check_files(self) -> None:
        """Check that every file of the training and validation sets is there and whole.

        Raises:
            ShardError: one is missing or damaged.
        """
        source, validation = self.data()
        checks.files(self.config, source, validation)

    def result(self) -> TrainResult | None:
        """Return the result of a run that is over, None while steps are left.

        Raises:
            ConfigError: the run is over, and was of another model.
        """
        result = read_result(self.store)
        if result is None or result.steps != self.config.steps:
            return None
        checks.same_model(self.config, self.store)
        return result


def with_absolute_uris(config: TrainConfig) -> TrainConfig:
    """Return the settings with all local paths made absolute."""
    def absolute(uri: str) -> str:
        return storage.absolute(uri) if uri else uri

    sets = config.data.validation
    validation = {name: absolute(uri) for name, uri in sets.items()} if isinstance(sets, dict) else absolute(sets)
    data = config.data.model_copy(update={"uri": absolute(config.data.uri), "validation": validation,
                                          "cache": absolute(config.data.cache),
                                          "reference": absolute(config.data.reference),
                                          "teacher": absolute(config.data.teacher)})
    if data.mixture is not None:
        domains = {name: domain.model_copy(update={"shards": absolute(domain.shards)})
                   for name, domain in data.mixture.domains.items()}
        data = data.model_copy(update={"mixture": data.mixture.model_copy(update={"domains": domains})})
    runs = absolute(config.run.uri)
    branch = config.run.branch
    if branch:
        parent = Branch.parse(branch, runs)
        branch = str(Branch(absolute(parent.uri), parent.step))
    run = config.run.model_copy(update={"uri": runs, "branch": branch})
    answers = config.evaluation.answers.model_copy(update={"prompts": absolute(config.evaluation.answers.prompts)})
    evaluation = config.evaluation.model_copy(update={"answers": answers})
    changes: dict[str, Any] = {"run": run, "data": data, "evaluation": evaluation}
    if config.rollouts is not None:
        rollouts = config.rollouts.model_copy(update={
            name: absolute(getattr(config.rollouts, name)) for name in ("prompts", "tokenizer", "replay")})
        folder = rollouts.folder(storage.join(run.uri, run.id))
        changes["data"] = data.model_copy(update={"uri": folder, "wait_seconds": data.wait_seconds or ROLLOUT_SECONDS})
        changes["rollouts"] = rollouts
    if config.outer is not None:
        changes["outer"] = config.outer.model_copy(update={"store": absolute(config.outer.store)})
    if uri := live_teacher(config):
        changes["objective"] = config.objective.model_copy(update={"teacher": absolute(uri)})
    return config.model_copy(update=changes)
