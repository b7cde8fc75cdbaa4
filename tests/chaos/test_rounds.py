"""The checks of `tests.chaos.groups` on two groups in threads, of which one is late: they hold, and they can fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.chaos.replay import replay
from tests.chaos.rounds import Rounds, Take, Witness
from tests.unit.outer.groups import gate, group, train_together
from tests.unit.train.helpers import write_shards
from tidewheel.checkpoint.digest import digest
from tidewheel.cluster.faults import flip_byte
from tidewheel.storage import store
from tidewheel.train.config import TrainConfig

QUANTISED = {"quantise": "int4", "error_feedback": True, "keep": 3}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[TrainConfig]]:
    """Return the folder of two groups whose rounds 1 and 2 lack group 1, and their configurations."""
    folder = tmp_path_factory.mktemp("recorded")
    write_shards(folder / "shards")
    outer = folder / "outer"
    gates = ", ".join([gate("g1", 1, outer / "decisions/00000002.json"),
                       gate("g0", 5, outer / "takes/group_0001/00000001.json"),
                       gate("g0", 6, outer / "meetings/00000003/0001-offer.json"),
                       gate("g0", 8, outer / "meetings/00000004/0001-offer.json")])
    runs = [group(folder, number, 2, f"callbacks=[{gates}]", patience_seconds=patience, **QUANTISED)
            for number, patience in enumerate((0.2, 300))]
    with Witness(outer, folder / "record") as witness:
        train_together(runs)
    assert not witness.changed
    assert not list(outer.glob("checkpoints/step_00000000-*/manifest.json")), "it is kept no longer"
    return folder, runs


def examined(folder: Path, config: TrainConfig) -> Rounds:
    assert config.outer is not None
    rounds = Rounds(folder / "record", config.outer)
    rounds.examine()
    return rounds


def test_the_record_explains_the_rounds_and_a_replay_has_the_bits(recorded: tuple[Path, list[TrainConfig]],
                                                                  tmp_path: Path):
    folder, runs = recorded
    rounds = examined(folder, runs[0])
    assert [rounds.members(number) for number in range(6)] == [[], [0], [0], [0, 1], [0, 1], [1]]
    assert rounds.committed == 6
    compared = []
    for number, config in enumerate(runs):
        takes = rounds.takes(number)
        rounds.examine_takes(number, takes, config.steps)
        again = config.model_copy(update={
            "run": config.run.model_copy(update={"uri": str(tmp_path)}), "callbacks": ()})
        compared.append(replay(again, rounds, takes))
        assert digest(again.run_uri).state == digest(config.run_uri).state
    assert compared == [4, 3]
    assert not rounds.problems


def test_a_step_that_counts_in_two_rounds_is_found(recorded: tuple[Path, list[TrainConfig]]):
    folder, runs = recorded
    rounds = examined(folder, runs[0])
    takes = rounds.takes(0)
    assert (takes[2].step, takes[2].round) == (4, 2)
    rounds.examine_takes(0, [*takes[:2], Take(3, 2, -1), *takes[3:]], 8)
    assert rounds.problems[0].startswith("group 0 sent its steps 3 to 4 in round 2, but went on from step 3")
    rounds.problems.clear()
    takes = rounds.takes(1)
    rounds.examine_takes(1, takes, 8)
    assert rounds.problems == []
    rounds.examine_takes(1, takes[:3], 8)
    assert rounds.problems == ["group 1 is in round 5, but it never took round 4"]


def test_another_outer_gradient_state_or_decision_is_found(recorded: tuple[Path, list[TrainConfig]], tmp_path: Path):
    folder, runs = recorded
    shutil.copytree(folder / "record", tmp_path / "record")
    place = store(tmp_path / "record")
    decisions = [json.loads(file.read_bytes()) for file in sorted((tmp_path / "record/decisions").glob("*.json"))]
    third = tmp_path / "record/decisions/00000003.json"
    third.write_text(json.dumps({**decisions[3], "members": decisions[3]["members"][:1]}))
    assert examined(tmp_path, runs[0]).problems[0].startswith(
        "the outer state of round 3 is not the outcome of its 1 outer gradients")
    third.write_text(json.dumps(decisions[3]))
    assert not examined(tmp_path, runs[0]).problems
    [file] = (tmp_path / "record/offers" / decisions[3]["members"][1]["offer"]).glob("*.safetensors")
    flip_byte(place, str(file.relative_to(tmp_path / "record")), -5)
    assert "is damaged" in examined(tmp_path, runs[0]).problems[0]
