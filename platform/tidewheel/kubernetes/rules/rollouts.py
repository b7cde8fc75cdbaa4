"""Rules that compare pods with the generators of a run of reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tidewheel.kubernetes.clusters import clusters, generator_groups, generators_per_pod, training_groups
from tidewheel.kubernetes.problem import Manifest, Problem, at, get, name_of
from tidewheel.placement import with_labels
from tidewheel.storage import is_remote

if TYPE_CHECKING:
    from tidewheel.train.config import TrainConfig


def check(manifests: Sequence[Manifest], config: TrainConfig) -> Iterator[Problem]:
    """Report what keeps generators from starting, and groups that they would share with trainers."""
    rollouts = config.rollouts
    if rollouts is None or rollouts.replay:
        return
    generators = rollouts.generators
    for cluster in clusters(manifests):
        where = (*cluster.path, "workerGroupSpecs")
        groups = generator_groups(cluster, config)
        fitting = [group for group in groups if generators_per_pod(group, config)]
        if not fitting:
            missing = f"no group{with_labels(generators.placement.selector)} has room for a generator"
            yield at(cluster.manifest, where, f"{missing} of {generators.cpus:g} CPUs and {generators.gpus:g} GPUs",
                     "the overlay rollouts, or another rollouts.generators.placement, cpus or gpus")
        of_trainers = {id(group.group) for group in training_groups(cluster, config)}
        for group in fitting:
            if id(group.group) in of_trainers:
                yield at(cluster.manifest, (*group.path[:-1], "groupName"), f"trainers and generators share "
                         f"{get(group.group, 'groupName')}, but trainers count whole nodes",
                         "give elastic.placement and rollouts.generators.placement groups of their own")
        slots = sum(get(group.group, "maxReplicas", default=0) * generators_per_pod(group, config) for group in fitting)
        if fitting and slots < generators.processes:
            yield at(cluster.manifest, (*fitting[-1].path[:-1], "maxReplicas"),
                     f"the groups have room for {slots} generators, the run asks for {generators.processes}",
                     "more pods, or fewer rollouts.generators.processes")
        if not is_remote(rollouts.prompts):
            yield Problem(name_of(cluster.manifest), "config: rollouts.prompts",
                          f"{rollouts.prompts!r} is not in the pods", "s3://bucket/prompts.jsonl")
