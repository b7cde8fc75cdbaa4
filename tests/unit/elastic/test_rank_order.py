"""Which workers get a rank, and in which order: tensor-parallel groups stay on a node."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.elastic.world import World
from tidewheel.elastic.generation import Worker
from tidewheel.elastic.rank_order import choose, split_groups
from tidewheel.train.progress import describe


def workers(**nodes: int) -> list[Worker]:
    """Return workers in turn from each node, as they come: a0, b0, a1, b1 ...; nodes whose name begins with s are spot.
    """
    most = max(nodes.values())
    return [Worker(f"{node}{index}", node, connected=True, spot=node.startswith("s"))
            for index in range(most) for node, count in nodes.items() if index < count]


def names(chosen: list[Worker]) -> list[str]:
    return [worker.name for worker in chosen]


def test_whole_groups_come_first_and_what_is_left_of_each_node_last():
    chosen = choose(workers(a=3, b=3, c=2), 8, (), 2)
    assert names(chosen) == ["a0", "a1", "b0", "b1", "c0", "c1", "a2", "b2"]
    [split] = split_groups(chosen, 2)
    assert names(split) == ["a2", "b2"]


def test_workers_without_a_whole_group_on_their_node_are_not_chosen_if_others_suffice():
    """The lone worker of node a was in the previous generation, and would come first."""
    available = workers(a=1, b=2, c=3)
    assert names(choose(available, 4, ("a0", "b0", "c0", "c1"), 2)) == ["b0", "b1", "c0", "c1"]
    assert names(choose(available, 4, ("a0", "b0", "c0", "c1"))) == ["a0", "b0", "c0", "c1"], "tensor 1"


def test_replica_groups_of_which_nobody_is_lost_come_first():
    """Rank 1 of four is lost: ranks 2 and 3 have a whole copy, and rank 0 waits for a fourth."""
    previous = ("a0", "a1", "b0", "b1")
    left = [worker for worker in workers(a=2, b=2) if worker.name != "a1"]
    assert names(choose(left, 2, previous, group=2)) == ["b0", "b1"]
    assert names(choose(left, 2, previous)) == ["a0", "b0"], "without groups"
    again = [*left, Worker("a2", "a", connected=True)]
    assert names(choose(again, 4, ("b0", "b1"), group=2)) == ["b0", "b1", "a0", "a2"]
    both = [worker for worker in workers(a=4, b=4) if worker.name != "b1"]
    order = ("a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3")
    assert names(choose(both, 4, order, 2, group=4)) == ["a0", "a1", "a2", "a3"]


def test_rank_0_is_on_a_node_that_stays():
    assert names(choose(workers(s=4, n=2), 4, ("s0", "s1", "s2", "s3"), 2)) == ["n0", "n1", "s0", "s1"]
    assert names(choose(workers(s=4, n=1), 4, ("s0", "s1", "s2", "s3"), 2)) == ["n0", "s2", "s0", "s1"]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from([1, 2, 4]), st.randoms())
def test_no_order_splits_fewer_groups(counts, tensor, random):
    available = workers(**{f"n{node}": count for node, count in enumerate(counts)})
    random.shuffle(available)
    whole = sum(count // tensor for count in counts)
    most = sum(counts) // tensor
    for groups in {1, (1 + most) // 2, most} - {0} if most else ():
        chosen = choose(available, groups * tensor, (), tensor)
        assert len({worker.name for worker in chosen}) == groups * tensor
        assert len(split_groups(chosen, tensor)) == max(0, groups - whole)


def test_a_run_reports_groups_that_span_two_nodes():
    world = World((2, 4), tensor=2)
    placement = {"a": "x", "b": "y", "c": "x", "d": "y"}
    world.membership.expect(placement, world.now, anew=True)
    for name, node in placement.items():
        world.come(name, node=node)
    assert world.members == ("a", "c", "b", "d")
    assert not [kind for kind, _ in world.events if kind == "tensor_groups_split"]
    world.run(1)
    world.lose("c", "d")
    world.leave("a", "b")
    world.wait(30, "a", "b")
    assert world.members == ("a", "b")
    [detail] = [detail for kind, detail in world.events if kind == "tensor_groups_split"]
    assert (detail["groups"], detail["of"], detail["nodes"]) == (1, 1, ["x", "y"])
    assert describe({"kind": "tensor_groups_split", "detail": detail}) == (
        "1 of 1 tensor-parallel groups span two nodes, so every layer waits for the network; give each node a multiple "
        "of 2 workers")
