"""Check manifests before they are applied: schemas first, then the rules, which rely on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from tidewheel.kubernetes import schemas
from tidewheel.kubernetes.problem import Manifest, Problem
from tidewheel.kubernetes.rules import monitoring, operator, pods, policy, queues, references, secrets, training

if TYPE_CHECKING:
    from tidewheel.train.config import TrainConfig

RULES: tuple[Callable[[Sequence[Manifest]], Iterator[Problem]], ...] = (
    operator.names, operator.cluster, operator.autoscaler, operator.job, operator.fault_tolerance, operator.gates,
    pods.restricted, pods.ray_containers, pods.resources, pods.grace, pods.placement,
    policy.namespaces, policy.network, policy.roles, policy.accounts,
    references.resolve, references.selectors, queues.kueue, queues.volcano, secrets.none_inside,
    monitoring.metrics, monitoring.alerts)


def lint(manifests: Sequence[Manifest], config: TrainConfig | None = None) -> list[Problem]:
    """Everything that is wrong with the manifests, in their order.

    Args:
        config: of the training run that they are for, whose workers, batch and layout are compared with the pods; by
            default the one that is in the manifests, if there is one.
    """
    found = [problem for manifest in manifests for problem in schemas.check(manifest)]
    if found:
        return found
    found = [problem for rule in RULES for problem in rule(manifests)]
    if config is None:
        config, unusable = training.configuration(manifests)
        found += unusable
    if config is not None:
        found += training.check(manifests, config)
    return list(dict.fromkeys(found))
