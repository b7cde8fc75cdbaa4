"""Ray clusters in manifests: their pods, the resources of a pod, and the number of pods that a training run needs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from tidewheel import placement
from tidewheel.kubernetes.problem import Manifest, get

if TYPE_CHECKING:
    from tidewheel.train.config import TrainConfig

GPU = "nvidia.com/gpu"
Path = tuple[str | int, ...]
_SUFFIX: dict[str, int | Fraction] = {
    "": 1, "m": Fraction(1, 1000), "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


def quantity(value: Any) -> Fraction | None:
    """Return a Kubernetes quantity such as "500m", "16Gi" or 8 as a number; None if the value is not a quantity."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", str(value))
    if match is None or match[2] not in _SUFFIX:
        return None
    return Fraction(match[1]) * _SUFFIX[match[2]]


@dataclass(frozen=True)
class Template:
    """Pod template and its place in a manifest; `role` is head, worker, submitter or other."""

    manifest: Manifest
    path: Path
    role: str
    value: dict[str, Any]
    group: dict[str, Any] | None = None
    """Worker group of the template."""

    @property
    def spec(self) -> dict[str, Any]:
        """Specification of the pod."""
        return get(self.value, "spec", default={})

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the pod."""
        return get(self.value, "metadata", "labels", default={})

    @property
    def containers(self) -> list[tuple[Path, dict[str, Any]]]:
        """Path and value of every container, init containers included; Ray's is the first."""
        return [((*self.path, "spec", kind, index), container) for kind in ("containers", "initContainers")
                for index, container in enumerate(get(self.spec, kind, default=[]))]

    def offers(self, resource: str) -> Fraction:
        """Return the amount of a resource that the first container may use: its limit, else its request."""
        resources = get(self.spec, "containers", 0, "resources", default={})
        value = get(resources, "limits", resource, default=get(resources, "requests", resource, default=0))
        return quantity(value) or Fraction(0)


@dataclass(frozen=True)
class Cluster:
    """Specification of a Ray cluster, in a RayCluster or a RayJob."""

    manifest: Manifest
    path: Path
    spec: dict[str, Any]

    @property
    def head(self) -> Template:
        """Template of the head."""
        path = (*self.path, "headGroupSpec", "template")
        return Template(self.manifest, path, "head", get(self.spec, "headGroupSpec", "template", default={}))

    @property
    def groups(self) -> list[tuple[Path, dict[str, Any]]]:
        """Path and value of every worker group."""
        return [((*self.path, "workerGroupSpecs", index), group)
                for index, group in enumerate(get(self.spec, "workerGroupSpecs", default=[]))]

    @property
    def workers(self) -> list[Template]:
        """Template of every worker group."""
        return [Template(self.manifest, (*path, "template"), "worker", get(group, "template", default={}), group)
                for path, group in self.groups]

    @property
    def autoscaling(self) -> bool:
        """Whether Ray's autoscaler runs."""
        return get(self.spec, "enableInTreeAutoscaling", default=False) is True

    @property
    def autoscaler_v2(self) -> bool:
        """Whether Ray's autoscaler v2 runs."""
        return self.autoscaling and get(self.spec, "autoscalerOptions", "version") == "v2"


def clusters(manifests: Iterable[Manifest]) -> Iterator[Cluster]:
    """Yield every Ray cluster in the manifests."""
    for manifest in manifests:
        path: Path = {"RayCluster": ("spec",), "RayJob": ("spec", "rayClusterSpec")}.get(manifest["kind"], ())
        if path and isinstance(spec := get(manifest, *path), dict):
            yield Cluster(manifest, path, spec)


def templates(manifests: Iterable[Manifest]) -> Iterator[Template]:
    """Yield every pod template in the manifests."""
    manifests = list(manifests)
    for cluster in clusters(manifests):
        yield cluster.head
        yield from cluster.workers
    for manifest in manifests:
        path: Path = ("spec", "template")
        if manifest["kind"] == "RayJob":
            path = ("spec", "submitterPodTemplate")
        elif manifest["kind"] == "CronJob":
            path = ("spec", "jobTemplate", "spec", "template")
        elif manifest["kind"] not in ("Deployment", "StatefulSet", "Job"):
            continue
        if isinstance(value := get(manifest, *path), dict):
            yield Template(manifest, path, "submitter" if manifest["kind"] == "RayJob" else "other", value)


def workers_per_pod(template: Template, config: TrainConfig) -> int:
    """Return the number of workers of a training run that fit into one pod. No worker spans two pods."""
    elastic = config.elastic
    slots = template.offers("cpu") / Fraction(elastic.cpus_per_worker)
    if elastic.gpus_per_worker:
        slots = min(slots, template.offers(GPU) / Fraction(elastic.gpus_per_worker))
    return math.floor(slots + Fraction(1, 10**6))


def training_groups(cluster: Cluster, config: TrainConfig) -> list[Template]:
    """Return the worker groups on which a training run may run: with GPUs if it uses them, and of its placement."""
    selector = config.elastic.placement.selector
    return [worker for worker in cluster.workers if bool(worker.offers(GPU)) == bool(config.elastic.gpus_per_worker)
            and placement.matches(selector, node_labels(worker))]


def generators_per_pod(template: Template, config: TrainConfig) -> int:
    """Return the number of generators of rollouts that fit into one pod."""
    assert config.rollouts is not None
    generators = config.rollouts.generators
    slots = template.offers("cpu") / Fraction(generators.cpus)
    if generators.gpus:
        slots = min(slots, template.offers(GPU) / Fraction(generators.gpus))
    return math.floor(slots + Fraction(1, 10**6))


def generator_groups(cluster: Cluster, config: TrainConfig) -> list[Template]:
    """Return the worker groups on which generators may run: with GPUs if they use them, and of their placement."""
    assert config.rollouts is not None
    generators = config.rollouts.generators
    return [worker for worker in cluster.workers if bool(worker.offers(GPU)) == bool(generators.gpus)
            and placement.matches(generators.placement.selector, node_labels(worker))]


def node_labels(template: Template) -> dict[str, str]:
    """Return Ray's labels of the nodes of a worker group."""
    return {placement.GROUP_LABEL: get(template.group, "groupName", default=""),
            **get(template.group, "labels", default={})}


def is_spot(template: Template) -> bool:
    """Return whether the pods of a worker group may be preempted."""
    return placement.is_spot(node_labels(template))


@dataclass(frozen=True)
class Replicas:
    """Least and largest number of pods that a worker group should have."""

    template: Template
    least: int
    most: int


def wanted(cluster: Cluster, config: TrainConfig) -> list[Replicas]:
    """Return the number of pods that each group of a training run should have.

    The smallest legal number of workers always runs; the largest is the limit. If there are on-demand and spot groups,
    the smallest number is on demand and the spot group has the rest. Groups without room for a worker are left out. The
    first group of generators has room for all of them; on spot nodes it may have no pod.
    """
    from tidewheel.train.parallel import legal

    groups = [(template, slots) for template in training_groups(cluster, config)
              if (slots := workers_per_pod(template, config))]
    legal_sizes = legal.sizes(config)
    smallest, largest = legal_sizes[0], legal_sizes[-1]
    stable = [entry for entry in groups if not is_spot(entry[0])]
    spot = [entry for entry in groups if is_spot(entry[0])]
    replicas: list[Replicas] = []
    for template, slots in (stable or spot)[:1]:
        base = math.ceil(smallest / slots)
        replicas.append(Replicas(template, base, base if stable and spot else math.ceil(largest / slots)))
    if stable and spot:
        template, slots = spot[0]
        rest = largest - replicas[0].least * stable[0][1]
        replicas.append(Replicas(template, 0, max(0, math.ceil(rest / slots))))
    if config.rollouts is not None and not config.rollouts.replay and config.rollouts.generators.placement.selector:
        generators = config.rollouts.generators
        for template in generator_groups(cluster, config)[:1]:
            slots = max(1, generators_per_pod(template, config))
            least = 0 if is_spot(template) else math.ceil((generators.min_processes or generators.processes) / slots)
            replicas.append(Replicas(template, least, math.ceil(generators.processes / slots)))
    return replicas
