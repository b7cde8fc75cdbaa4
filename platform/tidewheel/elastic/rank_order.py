"""Choose the workers that get a rank, and the order of the ranks: tensor-parallel groups stay on a node if they can.

Ranks of a tensor-parallel group are neighbours (`train.parallel.mesh.DIMS`) and exchange activations in every layer.
The links inside a node are several times as fast as the network, so a group that spans two nodes slows every step down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidewheel.elastic.generation import Worker


def choose(available: Sequence[Worker], size: int, previous: Sequence[str], tensor: int = 1,
           group: int = 0) -> list[Worker]:
    """Return `size` of the available workers in rank order.

    Members of the previous generation come first, in their order. With replica groups, those of which nobody is lost
    come before the others: they have a whole copy of the model. Workers of one node get neighbouring ranks, which
    communicate most; workers that fill whole tensor-parallel groups on their node come before the rest. Nodes that stay
    come before spot nodes: rank 0 writes the run's records, so it is on a node that stays if there is one.

    Args:
        available: workers that can take a rank, at least `size`.
        size: number of ranks, a multiple of `tensor`.
        previous: names of the previous generation's members in rank order.
        tensor: ranks of a tensor-parallel group.
        group: ranks of a replica group; 0: there are none.
    """
    order = {name: index for index, name in enumerate(previous)}
    ranked = sorted(available, key=lambda worker: (order.get(worker.name, len(order)), worker.spot))
    if tensor > 1:
        ranked = _whole_groups_first(ranked, tensor)
    if group:
        ranked = _whole_copies_first(ranked, previous, group)
    selected = ranked[:size]
    if all(worker.spot for worker in selected):
        selected = _with_one_that_stays(selected, ranked[size:], tensor)
    by_node = _by_node(selected)
    nodes = sorted(by_node, key=lambda node: by_node[node][0].spot)
    whole = {node: len(by_node[node]) // tensor * tensor for node in nodes}
    in_groups = [worker for node in nodes for worker in by_node[node][:whole[node]]]
    rest = [worker for node in nodes for worker in by_node[node][whole[node]:]]  # it fills groups too
    if in_groups and in_groups[0].spot and rest and not rest[0].spot:
        return rest + in_groups
    return in_groups + rest


def _whole_copies_first(ranked: Sequence[Worker], previous: Sequence[str], group: int) -> list[Worker]:
    """Put the members of replica groups that are complete first."""
    names = {worker.name for worker in ranked}
    whole: set[str] = set()
    for start in range(0, len(previous), group):
        members = previous[start:start + group]
        if len(members) == group and names.issuperset(members):
            whole.update(members)
    return sorted(ranked, key=lambda worker: worker.name not in whole)


def split_groups(ranked: Sequence[Worker], tensor: int) -> list[list[Worker]]:
    """Return the tensor-parallel groups that span more than one node.

    Args:
        ranked: the workers in rank order.
        tensor: ranks of a group.
    """
    if tensor == 1:
        return []
    groups = [list(ranked[start:start + tensor]) for start in range(0, len(ranked), tensor)]
    return [group for group in groups if len({worker.node for worker in group}) > 1]


def described(split: Sequence[Sequence[Worker]], generation: int, size: int, tensor: int) -> dict[str, Any]:
    """Return the fields of the event that tells of split groups.

    Args:
        split: the groups.
        generation: number of the generation.
        size: its ranks.
        tensor: ranks of a group.
    """
    nodes = sorted({worker.node for group in split for worker in group})
    return {"generation": generation, "groups": len(split), "of": size // tensor, "tensor": tensor, "nodes": nodes}


def _by_node(workers: Sequence[Worker]) -> dict[str, list[Worker]]:
    by_node: dict[str, list[Worker]] = {}
    for worker in workers:
        by_node.setdefault(worker.node, []).append(worker)
    return by_node


def _whole_groups_first(ranked: Sequence[Worker], tensor: int) -> list[Worker]:
    """Put the groups that fit on one node first, each in place of its first worker, and the other workers last."""
    groups: list[list[Worker]] = []
    rest: list[Worker] = []
    for workers in _by_node(ranked).values():
        whole = len(workers) // tensor * tensor
        groups += [workers[start:start + tensor] for start in range(0, whole, tensor)]
        rest += workers[whole:]
    position = {worker.name: index for index, worker in enumerate(ranked)}
    groups.sort(key=lambda group: position[group[0].name])
    return [worker for group in groups for worker in group] + sorted(rest, key=lambda worker: position[worker.name])


def _with_one_that_stays(selected: list[Worker], others: Sequence[Worker], tensor: int) -> list[Worker]:
    """Replace the last chosen workers by some that include one on a node that stays, if there is one."""
    staying = next((worker for worker in others if not worker.spot), None)
    if staying is None:
        return selected
    neighbours = [worker for worker in others if worker.node == staying.node][:tensor]
    replacing = neighbours if len(neighbours) == tensor else [staying]
    return selected[:len(selected) - len(replacing)] + replacing
