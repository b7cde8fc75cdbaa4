"""Tests of rounds: one decision whatever the interleaving, and who is waited for."""

from pathlib import Path
from threading import Thread

import pytest

from tidewheel.errors import ConfigError, StorageError
from tidewheel.outer import decisions as module
from tidewheel.outer.decisions import Decision, Decisions
from tidewheel.outer.fragment import fragments_of
from tidewheel.outer.meeting import SHARED_IDENTITY, Meetings, Round, agree, members_of
from tidewheel.storage import LocalStore
from tidewheel.train.outer_config import OuterConfig


def meetings(folder: Path, group: int, groups: int = 3) -> Meetings:
    return Meetings(LocalStore(folder), group, groups)


@pytest.mark.parametrize("conditional", [True, False])
def test_writers_at_once_get_one_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conditional: bool):
    monkeypatch.setattr(module, "creates_are_conditional", lambda store: conditional)
    answers: list[Decision] = []

    def propose(writer: int) -> None:
        answers.append(Decisions(LocalStore(tmp_path)).decide(0, {"by": writer}))

    threads = [Thread(target=propose, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 4
    assert len({answer["by"] for answer in answers}) == 1
    assert Decisions(LocalStore(tmp_path)).get(0) == answers[0]
    assert Decisions(LocalStore(tmp_path)).newest() == 0
    assert Decisions(LocalStore(tmp_path)).get(1) is None


@pytest.mark.parametrize(("content", "problem"), [
    ("[]", "00000000.json is no record"), ("{", "00000000.json is not valid JSON"), ("{}", "no field 'round'"),
    ('{"round": "0", "by": 1, "members": []}', "'round' is '0'"),
    ('{"round": 0, "by": 1, "members": 3}', "'members' is 3"),
    ('{"round": 0, "by": 1, "members": [{"group": "1", "offer": "a", "hash": "h"}]}', "'members.0.group' is '1'"),
])
def test_a_damaged_decision_is_named(tmp_path: Path, content: str, problem: str):
    decisions = Decisions(LocalStore(tmp_path), Round)
    decisions.decide(0, {"round": 0, "by": 1, "members": [{"group": 1, "offer": "a", "hash": "h"}]})
    (tmp_path / "00000000.json").write_text(content)
    with pytest.raises(StorageError, match=problem) as error:
        decisions.get(0)
    assert "00000000.json" in str(error.value)
    assert "restore it from a copy" in error.value.fix


def test_a_round_is_decided_when_all_that_are_expected_have_offered(tmp_path: Path):
    groups = [meetings(tmp_path, group) for group in range(3)]
    first = {"round": 0, "members": []}
    groups[0].offer(1, "a", "hash-a")
    assert groups[0].look(1, first, patient=True) is None
    groups[2].offer(1, "c", "hash-c")
    assert groups[0].missing(1, first) == [1]
    decision = groups[0].look(1, first, patient=False)
    assert decision is not None
    assert members_of(decision) == {0, 2}
    assert [member["offer"] for member in decision["members"]] == ["a", "c"]
    groups[1].offer(1, "b", "hash-b")
    late = groups[1].look(1, first, patient=True)
    assert late == decision, "it is never changed"


def test_a_group_that_was_left_out_is_waited_for_once_it_says_that_it_is_back(tmp_path: Path):
    groups = [meetings(tmp_path, group) for group in range(3)]
    last = {"round": 1, "members": [{"group": 0}, {"group": 2}]}
    groups[0].offer(2, "a", "hash")
    groups[2].offer(2, "c", "hash")
    assert groups[0].missing(2, last) == []
    groups[1].announce(2)
    assert groups[0].missing(2, last) == [1]
    groups[1].offer(2, "b", "hash")
    assert groups[0].missing(2, last) == []


def test_a_group_that_has_finished_is_not_waited_for(tmp_path: Path):
    groups = [meetings(tmp_path, group) for group in range(2)]
    last = {"round": 1, "members": [{"group": 0}, {"group": 1}]}
    groups[0].offer(2, "a", "hash")
    groups[1].leave(2)
    assert groups[0].missing(2, last) == []
    groups[1].announce(2)
    assert groups[0].missing(2, last) == [1], "its run was given more steps"


@pytest.mark.parametrize("conditional", [True, False])
def test_groups_with_other_settings_that_start_at_once_do_not_both_go_on(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conditional: bool):
    """All of them find that nothing is recorded yet."""
    monkeypatch.setattr(module, "creates_are_conditional", lambda store: conditional)
    identity = dict.fromkeys(SHARED_IDENTITY, 1)
    refused: list[str] = []

    def start(group: int) -> None:
        config = OuterConfig(groups=4, group=group, store=str(tmp_path), every=10 + group)
        try:
            agree(LocalStore(tmp_path), config, identity, f"run-{group}")
        except ConfigError as error:
            refused.append(error.what)

    threads = [Thread(target=start, args=(group,)) for group in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 3
    assert len({reason.partition(" there")[0] for reason in refused}) == 1, "they name the same settings"


@pytest.mark.parametrize("content", ["{", "[]", "7"])
def test_a_damaged_decision_is_not_to_be_deleted(tmp_path: Path, content: str):
    (tmp_path / "00000000.json").write_text(content)
    decisions = Decisions(LocalStore(tmp_path))
    for ask in (decisions.newest, lambda: decisions.get(0), lambda: decisions.decide(0, {})):
        with pytest.raises(StorageError, match=r"(?s)00000000\.json is no.*fix: restore it from a copy"):
            ask()


def test_fragments_hold_every_weight_once():
    layers = [f"blocks.{layer}.{part}" for layer in range(5) for part in ("a", "b")]
    names = ["embedding.weight", *layers, "norm.weight"]
    parts = fragments_of(names, 3)
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert [part[0] for part in parts] == ["embedding.weight", "blocks.1.a", "blocks.2.a"]
    assert parts[2][-1] == "norm.weight"
    assert fragments_of(names, 1) == [names]
