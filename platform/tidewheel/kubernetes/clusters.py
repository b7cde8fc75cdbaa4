"""Ray clusters inside manifests: their pods, what a pod offers, and how many a training run wants."""

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
    """A Kubernetes quantity ("500m", "16Gi", 8) as a number; None when it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", str(value))
    if match is None or match[2] not in _SUFFIX:
        return None
    return Fraction(match[1]) * _SUFFIX[match[2]]


@dataclass(frozen=True)
class Template:
    """A pod template and where it is; `role` is head, worker, submitter or other."""

    manifest: Manifest
    path: Path
    role: str
    value: dict[str, Any]
    group: dict[str, Any] | None = None
    """The worker group it belongs to."""

    @property
    def spec(self) -> dict[str, Any]:
        return get(self.value, "spec", default={})

    @property
    def labels(self) -> dict[str, str]:
        return get(self.value, "metadata", "labels", default={})

    @property
    def containers(self) -> list[tuple[Path, dict[str, Any]]]:
        """(path, container) of all, init containers included; Ray's is the first."""
        return [((*self.path, "spec", kind, number), container) for kind in ("containers", "initContainers")
                for number, container in enumerate(get(self.spec, kind, default=[]))]

    def offers(self, resource: str) -> Fraction:
        """What its first container may use: the limit, else the request."""
        resources = get(self.spec, "containers", 0, "resources", default={})
        value = get(resources, "limits", resource, default=get(resources, "requests", resource, default=0))
        return quantity(value) or Fraction(0)


@dataclass(frozen=True)
class Cluster:
    """The specification of a Ray cluster, of a RayCluster or inside a RayJob."""

    manifest: Manifest
    path: Path
    spec: dict[str, Any]

    @property
    def head(self) -> Template:
        path = (*self.path, "headGroupSpec", "template")
        return Template(self.manifest, path, "head", get(self.spec, "headGroupSpec", "template", default={}))

    @property
    def groups(self) -> list[tuple[Path, dict[str, Any]]]:
        """(path, group) of the worker groups."""
        return [((*self.path, "workerGroupSpecs", number), group)
                for number, group in enumerate(get(self.spec, "workerGroupSpecs", default=[]))]

    @property
    def workers(self) -> list[Template]:
        return [Template(self.manifest, (*path, "template"), "worker", get(group, "template", default={}), group)
                for path, group in self.groups]

    @property
    def autoscaling(self) -> bool:
        return get(self.spec, "enableInTreeAutoscaling", default=False) is True

    @property
    def autoscaler_v2(self) -> bool:
        return self.autoscaling and get(self.spec, "autoscalerOptions", "version") == "v2"


def clusters(manifests: Iterable[Manifest]) -> Iterator[Cluster]:
    """Every Ray cluster that the manifests ask for."""
    for manifest in manifests:
        path: Path = {"RayCluster": ("spec",), "RayJob": ("spec", "rayClusterSpec")}.get(manifest["kind"], ())
        if path and isinstance(spec := get(manifest, *path), dict):
            yield Cluster(manifest, path, spec)


def templates(manifests: Iterable[Manifest]) -> Iterator[Template]:
    """Every pod template of the manifests."""
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
    """Workers of a training run that fit into one pod; a worker never spans two."""
    elastic = config.elastic
    places = template.offers("cpu") / Fraction(elastic.cpus_per_worker)
    if elastic.gpus_per_worker:
        places = min(places, template.offers(GPU) / Fraction(elastic.gpus_per_worker))
    return math.floor(places + Fraction(1, 10**6))


def training_groups(cluster: Cluster, config: TrainConfig) -> list[Template]:
    """The worker groups a training run is for: those with GPUs, or without when it trains on CPUs, that its placement
    asks for."""
    selector = config.elastic.placement.selector
    return [worker for worker in cluster.workers if bool(worker.offers(GPU)) == bool(config.elastic.gpus_per_worker)
            and placement.matches(selector, node_labels(worker))]


def node_labels(template: Template) -> dict[str, str]:
    """Labels, for Ray, of the nodes of a worker group."""
    return {placement.GROUP_LABEL: get(template.group, "groupName", default=""),
            **get(template.group, "labels", default={})}


def is_spot(template: Template) -> bool:
    """Whether the pods of a worker group may be taken away."""
    return placement.is_spot(node_labels(template))


@dataclass(frozen=True)
class Replicas:
    """How many pods a worker group should have at the least and at the most."""

    template: Template
    least: int
    most: int


def wanted(cluster: Cluster, config: TrainConfig) -> list[Replicas]:
    """What each group a training run is for should have: the smallest legal number of workers always, the largest at
    the most. Beside a spot group, one on demand has what is always there and the spot group the rest.

    Groups with no room for one worker are left out.
    """
    from tidewheel.train.parallel import legal

    groups = [(template, places) for template in training_groups(cluster, config)
              if (places := workers_per_pod(template, config))]
    legal_sizes = legal.sizes(config)
    smallest, largest = legal_sizes[0], legal_sizes[-1]
    stable = [entry for entry in groups if not is_spot(entry[0])]
    spot = [entry for entry in groups if is_spot(entry[0])]
    found: list[Replicas] = []
    for template, places in (stable or spot)[:1]:
        base = math.ceil(smallest / places)
        found.append(Replicas(template, base, base if stable and spot else math.ceil(largest / places)))
    if stable and spot:
        template, places = spot[0]
        rest = largest - found[0].least * stable[0][1]
        found.append(Replicas(template, 0, max(0, math.ceil(rest / places))))
    return found
