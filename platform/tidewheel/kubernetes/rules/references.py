"""Rules for references: the volumes, ConfigMaps, accounts, roles and pods that manifests name exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tidewheel.kubernetes.clusters import templates
from tidewheel.kubernetes.problem import Manifest, Problem, at, get, walk
from tidewheel.kubernetes.rules.policy import selects


def resolve(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report references to missing objects, except Secrets, which are created elsewhere."""
    objects = {(manifest["kind"], manifest["metadata"].get("name")) for manifest in manifests}
    for template in templates(manifests):
        path = (*template.path, "spec")
        account = get(template.spec, "serviceAccountName")
        if account not in (None, "default") and ("ServiceAccount", account) not in objects:
            yield at(template.manifest, (*path, "serviceAccountName"),
                     f"no ServiceAccount {account!r} in the manifests",
                     "correct the name, or add it: the operator creates none with a given name")
        volumes = {volume["name"] for volume in get(template.spec, "volumes", default=[])}
        volumes |= {get(claim, "metadata", "name")
                    for claim in get(template.manifest, "spec", "volumeClaimTemplates", default=[])}
        for at_container, container in template.containers:
            for index, mount in enumerate(get(container, "volumeMounts", default=[])):
                if mount["name"] not in volumes:
                    yield at(template.manifest, (*at_container, "volumeMounts", index, "name"),
                             f"no volume {mount['name']!r} in this pod", "add it to volumes, or correct the name")
        for index, volume in enumerate(get(template.spec, "volumes", default=[])):
            yield from _source(template.manifest, (*path, "volumes", index), volume, objects)
    for manifest in manifests:
        if manifest["kind"] != "RoleBinding":
            continue
        role = manifest["roleRef"]
        if (role["kind"], role["name"]) not in objects:
            yield at(manifest, ("roleRef", "name"), f"no {role['kind']} {role['name']!r} in the manifests",
                     "correct the name")
        for index, subject in enumerate(get(manifest, "subjects", default=[])):
            if subject["kind"] == "ServiceAccount" and (subject["kind"], subject["name"]) not in objects:
                yield at(manifest, ("subjects", index, "name"),
                         f"no ServiceAccount {subject['name']!r} in the manifests",
                         "correct the name")


def _source(manifest: Manifest, path: tuple[Any, ...], volume: dict[str, Any],
            objects: set[tuple[str, Any]]) -> Iterator[Problem]:
    for kind, field, key in (("ConfigMap", "configMap", "name"), ("PersistentVolumeClaim", "persistentVolumeClaim",
                                                                  "claimName")):
        name = get(volume, field, key)
        if name is not None and (kind, name) not in objects and not get(volume, field, "optional"):
            yield at(manifest, (*path, field, key), f"no {kind} {name!r} in the manifests",
                     "correct the name, or add it")


def selectors(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report selectors that match no pod of the manifests, which Kubernetes ignores silently."""
    pods = list(templates(manifests))
    labels = [{**pod.labels, **({"ray.io/node-type": pod.role} if pod.role in ("head", "worker") else {})}
              for pod in pods]
    if not pods:
        return
    for manifest in manifests:
        path = {"NetworkPolicy": ("spec", "podSelector"), "PodDisruptionBudget": ("spec", "selector"),
                "PodMonitor": ("spec", "selector")}.get(manifest["kind"])
        roles = {label.get("tidewheel.io/role") for label in labels}
        if path and not any(selects(get(manifest, *path, default={}), item) for item in labels) \
                and not ("submitter" not in roles and _only_submitters(get(manifest, *path, default={}))):
            yield at(manifest, path, "selects no pod in the manifests", "use the labels of the intended pods")
        if manifest["kind"] == "PodDisruptionBudget":
            yield from _budget(manifest)
        if manifest["kind"] == "PodMonitor":
            ports = {port.get("name") for pod, each in zip(pods, labels)
                     if selects(get(manifest, "spec", "selector", default={}), each)
                     for _, container in pod.containers for port in get(container, "ports", default=[])}
            for index, endpoint in enumerate(get(manifest, "spec", "podMetricsEndpoints", default=[])):
                if endpoint.get("port") not in ports:
                    yield at(manifest, ("spec", "podMetricsEndpoints", index, "port"),
                             f"no pod has a port {endpoint.get('port')!r}",
                             f"one of {', '.join(sorted(map(str, ports)))}")
        if manifest["kind"] == "Service" and get(manifest, "spec", "selector") and not any(
                selects({"matchLabels": manifest["spec"]["selector"]}, item) for item in labels):
            yield at(manifest, ("spec", "selector"), "selects no pod in the manifests", "use the labels of its pods")
    for pod in pods:
        for where, value in walk(get(pod.spec, "topologySpreadConstraints", default=[])):
            if where and where[-1] == "labelSelector" and not selects(value, pod.labels):
                yield at(pod.manifest, (*pod.path, "spec", "topologySpreadConstraints", *where),
                         "does not select the template's own pods, so it has no effect",
                         "use the labels of this template")


def _budget(manifest: Manifest) -> Iterator[Problem]:
    """Report budgets that are not an absolute minAvailable: Ray's pods have no controller with a scale."""
    if get(manifest, "spec", "maxUnavailable") is not None:
        yield at(manifest, ("spec", "maxUnavailable"), "not allowed for pods without a scalable controller",
                 "minAvailable, a whole number")
    elif not isinstance(get(manifest, "spec", "minAvailable"), int):
        yield at(manifest, ("spec", "minAvailable"), f"{get(manifest, 'spec', 'minAvailable')!r}", "a whole number")


def _only_submitters(selector: dict[str, Any]) -> bool:
    """Return whether a selector is for submitters, which a standing cluster lacks until a job comes."""
    return selects(selector, {"tidewheel.io/role": "submitter"})
