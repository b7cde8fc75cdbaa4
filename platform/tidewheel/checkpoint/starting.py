"""Check that what a new run starts from fits it: the reference model of preferences, a live teacher, and its parent."""

from __future__ import annotations

from tidewheel.checkpoint.digest import digest
from tidewheel.checkpoint.verify import of_step
from tidewheel.errors import ConfigError
from tidewheel.ownership import CHECKPOINTS
from tidewheel.shards.columns import SHOWN
from tidewheel.storage import store
from tidewheel.train import checks, starts
from tidewheel.train.branching import Branch, divides, read_parent
from tidewheel.train.preferences.objective import ReferenceObjective
from tidewheel.train.run import Run
from tidewheel.train.teacher_config import live_teacher


def check_start(run: Run) -> None:
    """Compare the model that a new run starts from with the reference model of its data, and check a live teacher.

    A branch's parent must have the checkpoint, and what defines a run in common with it.

    A run that has started before is not compared: its checkpoints name the reference (`train.checks.identity`).

    Raises:
        ConfigError: they differ, the run starts from random weights, or the teacher does not fit.
        CheckpointError: there is no checkpoint at `model.init_from` or `objective.teacher`, or it is damaged.
    """
    config = run.config
    _check_branch(run)
    objective = config.objective
    if uri := live_teacher(config):
        from tidewheel.checkpoint.models import describe  # imports torch, which most drivers do without

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


def _check_branch(run: Run) -> None:
    """Check, before its first start, that a branch is another run than its parent, with what defines a run unchanged.

    Raises:
        ConfigError: it is not, or there is no such parent.
        CheckpointError: the parent has no complete checkpoint of the step.
    """
    config = run.config
    if not config.run.branch or run.store.exists("run.json"):
        return
    branch = Branch.parse(config.run.branch)
    if store(branch.uri).uri == run.store.uri:
        raise ConfigError("a run cannot branch from itself, which would change the parent", where="run.branch",
                          fix="give the branch a run.id of its own: --set run.id=NAME")
    parent = read_parent(branch)
    if branch.step > config.steps:
        raise ConfigError(f"the branch begins after step {branch.step:,}, but steps is {config.steps:,}",
                          where="steps", fix=f"give more than {branch.step:,}: steps counts those of the parent too")
    changes = starts.changed(starts.last_settings(parent), starts.settings_of(config), reproducible=False)
    sequences = {"global_sequences": parent["config"]["batch"]["global_sequences"],
                 "share": parent["config"].get("outer")}
    free = ("batch.global_sequences",) if divides(sequences, config) else ()
    refused = [change for change in changes
               if change.refused and not change.key.startswith("run.") and change.key not in free]
    if refused:
        reasons = "; ".join(f"{change.key} was {change.before}, now {change.now}: {change.refused}"
                            for change in refused)
        raise ConfigError(f"a branch takes over its parent's state and data, so these settings stay as they are "
                          f"({reasons})", where=config.run_uri,
                          fix="restore them, or start a new run from the parent's weights alone: "
                              f"model.init_from={branch.uri}")
    of_step(store(branch.uri).child(CHECKPOINTS), branch.step)
