"""Rules for the queues of Kueue and Volcano."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from tidewheel.kubernetes.clusters import Cluster, clusters, quantity
from tidewheel.kubernetes.problem import Manifest, Problem, at, get

KUEUE, ELASTIC, VOLCANO = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/elastic-job", "volcano.sh/queue-name"
MOST_GROUPS = 17
"""A Kueue workload has at most 18 pod sets; one is the head."""


def kueue(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report what Kueue's webhook refuses, and missing queues."""
    objects = {(manifest["kind"], manifest["metadata"].get("name")) for manifest in manifests}
    for manifest in manifests:
        if manifest["kind"] == "LocalQueue":
            name = get(manifest, "spec", "clusterQueue")
            queues = [queue for kind, queue in objects if kind == "ClusterQueue"]
            if queues and name not in queues:
                yield at(manifest, ("spec", "clusterQueue"), f"no ClusterQueue {name!r} in the manifests",
                         f"one of {', '.join(sorted(queues))}")
        if manifest["kind"] == "ClusterQueue":
            yield from _flavors(manifest, objects)
        queue = get(manifest, "metadata", "labels", KUEUE)
        if queue is None or manifest["kind"] not in ("RayCluster", "RayJob"):
            continue
        if ("LocalQueue", queue) not in objects:
            yield at(manifest, ("metadata", "labels", KUEUE), f"no LocalQueue {queue!r} in the manifests",
                     "correct the name, or add the component kueue")
        spec = manifest["spec"]
        if manifest["kind"] == "RayJob":
            if spec.get("shutdownAfterJobFinishes") is not True:
                yield at(manifest, ("spec", "shutdownAfterJobFinishes"), "false under Kueue",
                         "true: otherwise the quota is never released")
            if spec.get("clusterSelector"):
                yield at(manifest, ("spec", "clusterSelector"), "Kueue does not accept a job on a standing cluster",
                         "give the job its own cluster, or remove the label")
        if "suspend" in spec:
            yield at(manifest, ("spec", "suspend"), "set by Kueue itself", "remove it")
        for cluster in clusters([manifest]):
            if len(cluster.groups) > MOST_GROUPS:
                yield at(manifest, (*cluster.path, "workerGroupSpecs"), f"{len(cluster.groups)} groups",
                         f"at most {MOST_GROUPS} under Kueue")
            if cluster.autoscaling and get(manifest, "metadata", "annotations", ELASTIC) != "true":
                yield at(manifest, ("metadata", "annotations", ELASTIC), "not set, and the autoscaler is on",
                         '"true", with Kueue\'s feature gate ElasticJobsViaWorkloadSlices')


def _flavors(manifest: Manifest, objects: set[tuple[str, str]]) -> Iterator[Problem]:
    for number, group in enumerate(get(manifest, "spec", "resourceGroups", default=[])):
        for index, flavor in enumerate(group.get("flavors", [])):
            path = ("spec", "resourceGroups", number, "flavors", index)
            if ("ResourceFlavor", flavor["name"]) not in objects:
                yield at(manifest, (*path, "name"), f"no ResourceFlavor {flavor['name']!r} in the manifests",
                         "correct the name, or add it")
            if [entry["name"] for entry in flavor["resources"]] != group["coveredResources"]:
                yield at(manifest, (*path, "resources"), "not the covered resources, in their order",
                         ", ".join(group["coveredResources"]))


def volcano(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report gangs (the head and all minReplicas) that exceed their queue's capability."""
    queues = {manifest["metadata"].get("name"): manifest for manifest in manifests if manifest["kind"] == "Queue"}
    for cluster in clusters(manifests):
        name = get(cluster.manifest, "metadata", "labels", VOLCANO)
        if name is None:
            continue
        if get(cluster.manifest, "metadata", "labels", KUEUE) is not None:
            yield at(cluster.manifest, ("metadata", "labels", VOLCANO), "set beside Kueue's queue",
                     "keep one of the two")
        if queues and name not in queues:
            yield at(cluster.manifest, ("metadata", "labels", VOLCANO), f"no Queue {name!r} in the manifests",
                     f"one of {', '.join(sorted(queues))}")
        capability = get(queues.get(name), "spec", "capability", default={})
        for resource, text in capability.items():
            limit, needed = quantity(text), _gang(cluster, resource)
            if limit is not None and needed > limit:
                yield at(queues[name], ("spec", "capability", resource),
                         f"{text}, but the gang of {cluster.manifest['metadata']['name']} needs {float(needed):g}",
                         "raise it, or lower minReplicas: otherwise the gang waits forever")


def _gang(cluster: Cluster, resource: str) -> Fraction:
    return cluster.head.offers(resource) + sum(
        (worker.offers(resource) * get(worker.group, "minReplicas", default=0) for worker in cluster.workers),
        Fraction(0))
