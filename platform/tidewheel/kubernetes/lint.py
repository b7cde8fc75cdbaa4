"""Check manifests before they are applied: against schemas first, then by rules, which rely on the schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from tidewheel.kubernetes import schemas
from tidewheel.kubernetes.problem import Manifest, Problem
from tidewheel.kubernetes.rules import (
    monitoring,
    operator,
    pods,
    policy,
    queues,
    references,
    rollouts,
    secrets,
    training,
)

if TYPE_CHECKING:
    from tidewheel.train.config import TrainConfig

RULES: tuple[Callable[[Sequence[Manifest]], Iterator[Problem]], ...] = (
    operator.names, operator.cluster, operator.autoscaler, operator.job, operator.fault_tolerance, operator.gates,
    pods.restricted, pods.ray_containers, pods.resources, pods.grace, pods.placement,
    policy.namespaces, policy.network, policy.roles, policy.accounts,
    references.resolve, references.selectors, queues.kueue, queues.volcano, secrets.none_inside,
    monitoring.metrics, monitoring.alerts)


def lint(manifests: Sequence[Manifest], config: TrainConfig | None = None) -> list[Problem]:
    """Return the problems of the manifests, in their order.

    Args:
        manifests: the objects to check.
        config: configuration of the training run, whose workers, batch and layout must fit the pods; None for the one
            in the manifests, if any.
    """
    problems = [problem for manifest in manifests for problem in schemas.check(manifest)]
    if problems:
        return problems
    problems = [problem for rule in RULES for problem in rule(manifests)]
    if config is None:
        config, unusable = training.configuration(manifests)
        problems += unusable
    if config is not None:
        problems += [*training.check(manifests, config), *rollouts.check(manifests, config)]
    return list(dict.fromkeys(problems))
