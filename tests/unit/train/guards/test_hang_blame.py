"""Which rank started a hang, from the ranks' records: simulated clusters with faults, and real collectives."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from tests.benchmarks.hang_blame import real
from tests.hang_world import FAULTS, simulated
from tests.ranks import on_ranks
from tidewheel.train.guards.collective_records import Entry, MarkCount, RankRecord, main_stack, recorded
from tidewheel.train.guards.hang import Finding, refined
from tidewheel.train.guards.hang_blame import NOBODY, Fault, blame

WORLD = {"all ranks@0": (0, 1, 2)}


def entries(*whats: str, group: str = "all ranks@0") -> tuple[Entry, ...]:
    return tuple(Entry(group, number, what) for number, what in enumerate(whats, start=1))


@pytest.mark.parametrize("kind", FAULTS)
def test_the_rank_that_started_a_hang_is_named(kind: str):
    """`tests/benchmarks/hang_blame.py` has many more cases, also slow ranks that go on while records are read."""
    for seed in range(3):
        run, culprits, records = simulated(kind, random.Random(f"test {kind} {seed}"))
        blamed = blame(records, run.cluster.members, run.cluster.kinds)
        assert set(blamed.ranks) <= set(culprits), blamed
        assert blamed.ranks or kind == "slow"


def test_nobody_is_named_while_all_do_long_work():
    for seed in range(3):
        run, _, records = simulated("", random.Random(seed))
        assert blame(records, run.cluster.members, run.cluster.kinds) == NOBODY


def test_of_two_ranks_that_differ_nobody_is_named():
    two = {0: RankRecord(entries("all_reduce [8]")), 1: RankRecord(entries("all_reduce [9]"))}
    assert blame(two, {"all ranks@0": (0, 1)}) == NOBODY


def test_a_rank_that_does_not_answer_comes_first():
    blamed = blame({0: RankRecord(entries("a")), 1: None, 2: RankRecord(entries("a", "b"))}, WORLD)
    assert (blamed.ranks, blamed.fault) == ((1,), Fault.SILENT)


def test_the_collective_and_the_stack_are_told():
    stuck = RankRecord(entries("all_reduce [4]"), stack=("loop.py:9 run", "data.py:3 read", "socket.py:1 recv"))
    waits = RankRecord(entries("all_reduce [4]", "all_reduce [8]"))
    blamed = blame({0: waits, 1: stuck, 2: waits}, WORLD)
    assert blamed.text == ("rank 1 did not start a collective that others wait in: all_reduce [8] number 2 of "
                           "all ranks@0; it stands at socket.py:1 recv < data.py:3 read < loop.py:9 run")


def test_a_skipped_collective_among_equal_ones_shows_at_the_marks():
    def record(*counts: int) -> RankRecord:
        marks = tuple(MarkCount(number, number, "data", {"all ranks@0": count})
                      for number, count in enumerate(counts, start=1))
        return RankRecord(entries(*["all_reduce [4]"] * counts[-1]), marks=marks)

    blamed = blame({0: record(0, 1, 2, 3), 1: record(0, 1, 1, 2, 3), 2: record(0, 1, 2, 3)}, WORLD)
    assert (blamed.ranks, blamed.fault) == ((1,), Fault.DIFFERENT)
    assert "at step 3 (data) it had started {'all ranks@0': 1} collectives, most ranks" in blamed.text


def test_ranks_of_different_pipeline_stages_are_not_compared():
    first = RankRecord(entries("all_reduce [4]", "all_reduce [8]"), program=0)
    last = RankRecord(entries("all_reduce [5]", "all_reduce [8]"), program=1)
    told = {0: first, 1: first, 2: first, 3: last}
    assert blame(told, {"all ranks@0": (0, 1, 2, 3)}) == NOBODY


def test_records_come_back_from_json():
    mark = MarkCount(1, 2, "data", {"all ranks@0": 1})
    record = RankRecord(entries("a", "b"), {"all ranks@0": 1}, (mark,), ("f:1 g",), 2)
    assert RankRecord.from_json(record.to_json()) == record
    assert main_stack()[-1].startswith("collective_records.py:")


@pytest.mark.parametrize(("found", "records", "expected"), [
    (Finding("rank 1 is still at step 5", (1,)), {}, (1,)),  # some rank has published nothing: the beats count
    (Finding("rank 1 is still at step 5", (1,)), {0: 2, 1: 2, 2: 1}, (2,)),
    (Finding(""), {0: 2, 1: 2, 2: 1}, ())])  # all are level by their beats: nobody hangs
def test_the_beats_are_refined_by_records(found: Finding, records: dict[int, int], expected: tuple[int, ...]):
    told = {rank: RankRecord(entries(*["all_reduce [4]"] * count)) for rank, count in records.items()}
    assert refined(found, told, WORLD).ranks == expected


def test_a_wrong_order_that_leaves_all_ranks_level_is_found():
    right, wrong = RankRecord(entries("all_reduce [4]", "all_reduce [8]")), RankRecord(
        entries("all_reduce [8]", "all_reduce [4]"))
    found = refined(Finding(""), {0: right, 1: wrong, 2: right}, WORLD)
    assert found.ranks == (1,)
    assert "collective number 1 of all ranks is all_reduce [8], on most ranks all_reduce [4]" in found.text


def record_real_collectives() -> None:
    group = dist.new_group([0, 1])
    names = {dist.distributed_c10d._get_default_group().group_name: "all", group.group_name: "pair"}
    dist.all_reduce(torch.ones(8))
    dist.broadcast(torch.ones(2, 3), 0, group=group)
    parts = [torch.empty(4) for _ in range(2)] if dist.get_rank() == 0 else None
    dist.gather(torch.ones(4), parts)
    found, done = recorded(names)
    assert found == (Entry("all", 1, "all_reduce [8] Float"), Entry("pair", 1, "broadcast [2, 3] Float"),
                     Entry("all", 2, "gather"))
    assert done is not None
    assert done["pair"] == 1
    dist.destroy_process_group(group)
    again = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(5), group=again)
    assert recorded({again.group_name: "pair"})[0] == (Entry("pair", 1, "all_reduce [5] Float"),)


def test_torchs_flight_recorder_tells_the_collectives_of_gloo():
    on_ranks(2, record_real_collectives)


def test_entries_of_an_earlier_group_with_the_same_name_are_left_out(monkeypatch: pytest.MonkeyPatch):
    import json

    from torch._C import _distributed_c10d

    def entry(number: int, size: int) -> dict:
        return {"process_group": ["0", ""], "pg_id": 0, "collective_seq_id": number, "is_p2p": False,
                "profiling_name": "gloo:all_reduce", "input_sizes": [[size]], "input_dtypes": ["Float"]}

    dump = json.dumps({"entries": [entry(1, 3), entry(2, 3), entry(3, 3), entry(1, 7), entry(2, 7)]})
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace_json", lambda **_: dump)
    assert [one.what for one in recorded({"0": "all"})[0]] == ["all_reduce [7] Float"] * 2


@pytest.mark.long  # four processes that wait for a time limit
@pytest.mark.parametrize("kind", ["hang", "stopped", "skipped", "other order"])
def test_a_fault_among_four_processes_is_named(kind: str):
    blamed, text = real(kind, 2)
    assert blamed == (2,), text
