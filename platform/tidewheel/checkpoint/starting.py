"""Check that the other models of a new run fit it: the reference model of preferences, and a live teacher."""

from __future__ import annotations

from tidewheel.checkpoint.digest import digest
from tidewheel.checkpoint.models import describe
from tidewheel.errors import ConfigError
from tidewheel.shards.columns import SHOWN
from tidewheel.train import checks
from tidewheel.train.preferences.objective import ReferenceObjective
from tidewheel.train.run import Run
from tidewheel.train.teacher_config import live_teacher


def check_start(run: Run) -> None:
    """Compare the model that a new run starts from with the reference model of its data, and check a live teacher.

    A run that has started before is not compared: its checkpoints name the reference (`train.checks.identity`).

    Raises:
        ConfigError: they differ, the run starts from random weights, or the teacher does not fit.
        CheckpointError: there is no checkpoint at `model.init_from` or `objective.teacher`, or it is damaged.
    """
    config = run.config
    objective = config.objective
    if uri := live_teacher(config):
        source, _ = run.data()
        checks.teacher(config, describe(uri), source.manifest)
        return
    if config.base_is_reference:
        return
    if not isinstance(objective, ReferenceObjective) or not objective.start_is_reference \
            or run.store.exists("run.json"):
        return
    source, _ = run.data()
    start = config.model.init_from
    other = "or set objective.start_is_reference to false, if the reference is to be another model"
    if not start:
        raise ConfigError("training starts from random weights, but the log-probabilities in data.reference are of a "
                          f"trained model, {source.reference[:SHOWN]}", where="model.init_from",
                          fix=f"set it to the reference model, {other}")
    found = digest(start).groups["model"]
    if found != source.reference:
        raise ConfigError(f"the log-probabilities are of the reference model {source.reference[:SHOWN]}, but training "
                          f"starts from {start}, which is {found[:SHOWN]}", where=config.data.reference,
                          fix=f"make them anew: tidewheel reference {start} --data SET --output FOLDER, {other}")
