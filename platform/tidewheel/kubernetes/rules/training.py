"""Rules that compare pods with the training run: workers, layout, batch, storage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tidewheel.errors import ConfigError
from tidewheel.kubernetes.clusters import GPU, Cluster, Template, clusters, training_groups, workers_per_pod
from tidewheel.kubernetes.documents import read
from tidewheel.kubernetes.problem import Manifest, Problem, at, get, join, name_of
from tidewheel.placement import with_labels
from tidewheel.storage import is_remote

if TYPE_CHECKING:
    from tidewheel.train.config import TrainConfig

RUN_KEY = "train.yaml"
"""Key of a training run's configuration in the ConfigMap that `render` makes."""


def configuration(manifests: Sequence[Manifest]) -> tuple[TrainConfig | None, list[Problem]]:
    """Return the training run's configuration from a ConfigMap of the manifests, and its problems."""
    from tidewheel.config import build
    from tidewheel.train.config import TrainConfig

    for manifest in manifests:
        text = get(manifest, "data", RUN_KEY) if manifest["kind"] == "ConfigMap" else None
        if text is None:
            continue
        try:
            values = read(text, RUN_KEY)
            if len(values) != 1 or not isinstance(values[0], dict):
                return None, [at(manifest, ("data", RUN_KEY), "expected keys and values", "render it again")]
            return build(TrainConfig, values[0], where=RUN_KEY), []
        except ConfigError as error:
            return None, [at(manifest, ("data", RUN_KEY), error.what, error.fix)]
    return None, []


def check(manifests: Sequence[Manifest], config: TrainConfig) -> Iterator[Problem]:
    """Report what keeps the run from starting, growing to its largest legal size, or using all pods."""
    ray_clusters = list(clusters(manifests))
    for cluster in ray_clusters:
        yield from _sizes(cluster, config)
    yield from _storage(ray_clusters, config)


def _sizes(cluster: Cluster, config: TrainConfig) -> Iterator[Problem]:
    from tidewheel.train.parallel import legal

    groups = training_groups(cluster, config)
    where = (*cluster.path, "workerGroupSpecs")
    elastic = config.elastic
    if not groups:
        kind = f"elastic.gpus_per_worker is {elastic.gpus_per_worker:g}"
        asked = with_labels(elastic.placement.selector)
        missing = f"no group{asked} {'and ' * bool(asked)}{'with' if elastic.gpus_per_worker else 'without'} GPUs"
        yield at(cluster.manifest, where, f"{missing}, but {kind}",
                 f"another overlay, or another elastic.gpus_per_worker{' or elastic.placement' * bool(asked)}")
        return
    sizes = legal.sizes(config)
    slots = {id(group): workers_per_pod(group, config) for group in groups}
    for group in groups:
        yield from _pod(cluster, group, slots[id(group)], config)
    least = sum(get(group.group, "minReplicas", default=0) * slots[id(group)] for group in groups)
    most = sum(get(group.group, "maxReplicas", default=0) * slots[id(group)] for group in groups)
    first = groups[0]
    at_first = (*first.path[:-1],)
    if not slots[id(first)]:
        return
    if least < sizes[0]:
        yield at(cluster.manifest, (*at_first, "minReplicas"),
                 f"the groups always have {least} workers, the run starts with {sizes[0]}",
                 f"{math.ceil(sizes[0] / slots[id(first)])}, at {slots[id(first)]} workers to a pod")
    elif least > sizes[-1]:
        yield at(cluster.manifest, (*at_first, "minReplicas"),
                 f"the groups always have {least} workers, the run uses at most {sizes[-1]}",
                 f"{math.ceil(sizes[0] / slots[id(first)])}")
    last = next((group for group in reversed(groups) if slots[id(group)]), first)
    if most < sizes[-1]:
        yield at(cluster.manifest, (*last.path[:-1], "maxReplicas"),
                 f"the groups grow to {most} workers, the run to {sizes[-1]}",
                 f"{math.ceil((sizes[-1] - most) / slots[id(last)])} more, or lower elastic.max_workers")
    elif most - sizes[-1] >= slots[id(last)]:
        fits = max((size for size in sizes if size <= most), default=0)
        yield at(cluster.manifest, (*last.path[:-1], "maxReplicas"),
                 f"the groups grow to {most} workers, of which a batch of {config.batch.virtual_ranks} virtual ranks "
                 f"and elastic.max_workers {elastic.max_workers} let {fits} be used",
                 f"{(most - sizes[-1]) // slots[id(last)]} less, or another batch.virtual_ranks: it must be a "
                 "multiple of the data-parallel size")


def _pod(cluster: Cluster, group: Template, slots: int, config: TrainConfig) -> Iterator[Problem]:
    elastic, parallel = config.elastic, config.parallel
    resources = (*group.path, "spec", "containers", 0, "resources", "limits")
    gpus = group.offers(GPU)
    if not slots:
        resource = GPU if elastic.gpus_per_worker and gpus < elastic.gpus_per_worker else "cpu"
        per_worker = elastic.gpus_per_worker if resource == GPU else elastic.cpus_per_worker
        yield at(cluster.manifest, (*resources, resource), f"{float(group.offers(resource)):g}: no room for one worker",
                 f"at least {per_worker:g}")
        return
    for_gpus = math.floor(float(gpus) / elastic.gpus_per_worker + 1e-6) if elastic.gpus_per_worker else 0
    if slots < for_gpus:
        yield at(cluster.manifest, (*resources, "cpu"),
                 f"{float(group.offers('cpu')):g} CPUs are enough for {slots} workers, but it has {float(gpus):g} "
                 "GPUs",
                 f"{math.ceil(for_gpus * elastic.cpus_per_worker)} CPUs, or fewer elastic.cpus_per_worker")
    inside = parallel.tensor * parallel.context
    if inside > 1 and slots % inside:
        name = "tensor x context" if parallel.context > 1 else "tensor"
        yield at(cluster.manifest, (*resources, GPU if gpus else "cpu"),
                 f"{slots} workers to a pod, but parallel.{name} {inside} does not divide them: a group "
                 "of ranks would span two pods",
                 f"use a multiple of {inside} to a pod, or a smaller {name}")


def _storage(ray_clusters: Sequence[Cluster], config: TrainConfig) -> Iterator[Problem]:
    if not ray_clusters:
        return
    manifest = ray_clusters[0].manifest
    where = name_of(manifest)
    if not is_remote(config.run.uri):
        yield Problem(where, "config: run.uri", f"{config.run.uri!r} is a folder inside a pod, and is lost with it",
                      "use s3://bucket/prefix, which all pods can reach")
    uris = [("data.uri", config.data.uri)] if config.data.uri else []
    if config.data.mixture is not None:
        uris += [(f"data.mixture.domains.{name}.shards", domain.shards)
                 for name, domain in config.data.mixture.domains.items()]
    for name, uri in uris:
        if not is_remote(uri):
            yield Problem(where, f"config: {name}", f"{uri!r} is not in the pods", "s3://bucket/prefix")
    for cluster in ray_clusters:
        for group in training_groups(cluster, config):
            mounts = [mount["mountPath"] for mount in get(group.spec, "containers", 0, "volumeMounts", default=[])]
            for name, folder in (("data.cache", config.data.cache), ("compile_cache", config.compile_cache)):
                if folder and not any(f"{folder}/".startswith(mount.rstrip("/") + "/") for mount in mounts):
                    yield Problem(name_of(cluster.manifest), join(*group.path, "spec", "containers", 0, "volumeMounts"),
                                  f"{name} is {folder}, which is not on a volume",
                                  "a folder below /cache, or mount a volume there")
