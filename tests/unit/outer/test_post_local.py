"""Tests of post-local SGD: groups that branch off a run which was trained together first."""

from pathlib import Path

import pytest

from tests.unit.outer.groups import events, group, model, train_together
from tests.unit.outer.test_exchange import step_ids
from tests.unit.train.helpers import config, write_shards
from tests.unit.train.test_branching import BASE
from tidewheel.checkpoint.digest import digest
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import ConfigError
from tidewheel.train.audit import audit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with shards and the run "base", of 8 steps with batches of 16."""
    write_shards(tmp_path / "shards")
    fit_local(config(tmp_path, "base", *BASE, "batch.global_sequences=16"))
    return tmp_path


def test_groups_go_on_from_a_run_with_its_state_and_divide_its_batches(folder: Path):
    runs = [group(folder, number, 2, *BASE, "run.branch=base@4") for number in range(2)]
    train_together(runs)
    assert model(folder / "outer") == model(runs[0].run_uri) == model(runs[1].run_uri)
    for settings in runs:
        assert [event["step"] for event in events(settings, "outer_round")] == [6, 8]
        assert audit(settings.run_uri).ok
    for step in range(5, 9):
        both = [name for settings in runs for name in step_ids(Path(settings.run_uri), step)]
        assert both == step_ids(folder / "runs/base", step)
    whole = group(folder, 0, 1, *BASE, "run.branch=base@4", "batch.global_sequences=16", "run.id=alone",
                  learning_rate=1, momentum=0, store=folder / "alone")
    fit_local(whole)
    assert digest(whole.run_uri).groups == digest(str(folder / "runs/base")).groups, "the optimizer's state comes along"


def test_groups_that_do_not_divide_the_batches_of_a_run_are_refused(folder: Path):
    settings = group(folder, 0, 4, *BASE, "run.branch=base@4")
    with pytest.raises(ConfigError, match=r"batch\.global_sequences was 16, now 8"):
        fit_local(settings)
