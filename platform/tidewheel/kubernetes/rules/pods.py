"""Rules for pods: Pod Security, resources, time to shut down, placement."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from tidewheel.kubernetes.clusters import GPU, Template, clusters, is_spot, quantity, templates
from tidewheel.kubernetes.kustomize import split_image
from tidewheel.kubernetes.problem import Manifest, Problem, at, get
from tidewheel.placement import MARKET_LABEL, SPOT

DRAIN_VARIABLE = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
DRAIN_DEFAULT_SECONDS, MARGIN_SECONDS = 30, 15
"""Ray's default for a drain, and the time that Ray takes to end after it."""
VOLUMES = frozenset({"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected",
                     "secret", "name"})
"""Kinds of volume that the restricted standard allows."""
MOVING_TAGS = frozenset({"", "latest", "nightly", "main", "master", "edge"})


def restricted(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report breaches of the restricted Pod Security Standard.

    https://kubernetes.io/docs/concepts/security/pod-security-standards/
    """
    for template in templates(manifests):
        yield from _pod(template)
        for path, container in template.containers:
            yield from _container(template, path, container)
    for cluster in clusters(manifests):
        if cluster.autoscaling:
            context = get(cluster.spec, "autoscalerOptions", "securityContext", default={})
            yield from _context(cluster.manifest, (*cluster.path, "autoscalerOptions", "securityContext"), context)
    for manifest in manifests:
        spec = get(manifest, "spec", default={})
        if manifest["kind"] == "RayJob" and spec.get("submissionMode", "K8sJobMode") == "K8sJobMode" \
                and not spec.get("submitterPodTemplate"):
            yield at(manifest, ("spec", "submitterPodTemplate"), "missing: the operator's own has no security context",
                     "give one, as in jobs/train")


def _pod(template: Template) -> Iterator[Problem]:
    manifest, path, spec = template.manifest, (*template.path, "spec"), template.spec
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield at(manifest, (*path, name), "refused by the restricted standard", "remove it")
    context = get(spec, "securityContext", default={})
    context_path = (*path, "securityContext")
    if context.get("runAsNonRoot") is not True:
        yield at(manifest, (*context_path, "runAsNonRoot"), f"{context.get('runAsNonRoot')}", "true")
    if context.get("runAsUser") == 0:
        yield at(manifest, (*context_path, "runAsUser"), "root", "1000, the user of the image")
    if get(context, "seccompProfile", "type") not in ("RuntimeDefault", "Localhost"):
        yield at(manifest, (*context_path, "seccompProfile"), "not set", "{type: RuntimeDefault}")
    for index, volume in enumerate(get(spec, "volumes", default=[])):
        for kind in sorted(set(volume) - VOLUMES):
            yield at(manifest, (*path, "volumes", index, kind), "refused by the restricted standard",
                     "use emptyDir: it is on the node's local disk, NVMe if there is one")


def _container(template: Template, path: tuple[str | int, ...], container: dict[str, Any]) -> Iterator[Problem]:
    context = get(container, "securityContext", default={})
    yield from _context(template.manifest, (*path, "securityContext"), context)
    for index, port in enumerate(get(container, "ports", default=[])):
        if port.get("hostPort"):
            yield at(template.manifest, (*path, "ports", index, "hostPort"), "refused by the restricted standard",
                     "remove it")


def _context(manifest: Manifest, path: tuple[str | int, ...], context: dict[str, Any]) -> Iterator[Problem]:
    if context.get("allowPrivilegeEscalation") is not False:
        yield at(manifest, (*path, "allowPrivilegeEscalation"), f"{context.get('allowPrivilegeEscalation')}", "false")
    if "ALL" not in get(context, "capabilities", "drop", default=[]):
        yield at(manifest, (*path, "capabilities", "drop"), "keeps capabilities", "[ALL]")
    if set(get(context, "capabilities", "add", default=[])) - {"NET_BIND_SERVICE"}:
        yield at(manifest, (*path, "capabilities", "add"), "refused by the restricted standard", "remove it")
    if context.get("privileged"):
        yield at(manifest, (*path, "privileged"), "refused by the restricted standard", "remove it")
    if context.get("runAsUser") == 0:
        yield at(manifest, (*path, "runAsUser"), "root", "1000, the user of the image")
    if context.get("runAsNonRoot") is False:
        yield at(manifest, (*path, "runAsNonRoot"), "false", "remove it, or set it to true")


def ray_containers(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report settings of a Ray pod that belong to the operator, and images whose tag may move."""
    for template in templates(manifests):
        for path, container in template.containers:
            _, separator, tag = split_image(container.get("image", ""))
            if tag in MOVING_TAGS and separator != "@":
                yield at(template.manifest, (*path, "image"), f"{container.get('image')!r} has a tag that can move",
                         "use a version as tag, or a digest")
            for index, mount in enumerate(get(container, "volumeMounts", default=[])):
                if mount.get("mountPath", "").rstrip("/") == "/dev/shm":
                    yield at(template.manifest, (*path, "volumeMounts", index, "mountPath"), "/dev/shm is mounted by "
                             "the operator", "remove the mount and its volume")
            words = " ".join(map(str, [*get(container, "command", default=[]), *get(container, "args", default=[])]))
            if template.role in ("head", "worker") and path[-2] == "containers" and path[-1] == 0 and words:
                yield at(template.manifest, (*path, "command" if container.get("command") else "args"),
                         "the operator puts `ray start` there", "remove it; start parameters are in rayStartParams")
            elif re.search(r"\bsh\b.* -c", words) and "exec " not in words and template.role == "other":
                yield at(template.manifest, (*path, "command"), "the shell does not pass SIGTERM on",
                         "exec the program")
            if template.role in ("head", "worker") and get(container, "lifecycle", "preStop") is not None:
                yield at(template.manifest, (*path, "lifecycle", "preStop"), "Ray drains on SIGTERM; a hook delays it",
                         f"remove it, and set {DRAIN_VARIABLE}")


def resources(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report containers without requests and limits, and overcommitted memory and GPUs."""
    for template in templates(manifests):
        for path, container in template.containers:
            requests = get(container, "resources", "requests", default={})
            limits = get(container, "resources", "limits", default={})
            resources_path = (*path, "resources")
            for name in ("cpu", "memory"):
                if name not in requests:
                    yield at(template.manifest, (*resources_path, "requests", name), "missing",
                             "set it: Ray and the autoscaler read a pod's size here")
            if "memory" not in limits:
                yield at(template.manifest, (*resources_path, "limits", "memory"), "missing",
                         "as requested: Ray's object store and the memory tier are sized by it")
            for kind, values in (("requests", requests), ("limits", limits)):
                for name, value in values.items():
                    if quantity(value) is None:
                        yield at(template.manifest, (*resources_path, kind, name), f"{value!r} is not a quantity",
                                 "as in 500m, 8 or 16Gi")
            for name in sorted({"memory", GPU} & set(requests) & set(limits)):
                if quantity(requests[name]) != quantity(limits[name]):
                    yield at(template.manifest, (*resources_path, "limits", name),
                             f"{limits[name]}, requested {requests[name]}",
                             "make them equal: overcommitted pods are killed first")
            gpus = quantity(limits.get(GPU, requests.get(GPU, 0)))
            if gpus is not None and gpus.denominator != 1:
                yield at(template.manifest, (*resources_path, "limits", GPU), f"{limits.get(GPU)}", "a whole number")


def grace(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report pods that end before their drain, in which training saves."""
    for cluster in clusters(manifests):
        for template in [cluster.head, *cluster.workers]:
            variables = {entry["name"]: (index, entry.get("value"))
                         for index, entry in enumerate(get(template.spec, "containers", 0, "env", default=[]))}
            index, text = variables.get(DRAIN_VARIABLE, (None, str(DRAIN_DEFAULT_SECONDS)))
            if not str(text).isdigit():
                yield at(cluster.manifest, (*template.path, "spec", "containers", 0, "env", index or 0, "value"),
                         f"{text!r} is not a number of seconds", "whole seconds, quoted")
                continue
            least = int(str(text)) + MARGIN_SECONDS
            given = get(template.spec, "terminationGracePeriodSeconds", default=30)
            if given < least:
                yield at(cluster.manifest, (*template.path, "spec", "terminationGracePeriodSeconds"),
                         f"{given} s, but the drain takes up to {text} s",
                         f"use at least {least}, or lower {DRAIN_VARIABLE}")


def placement(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report a head on spot nodes, groups whose label contradicts their nodes, and GPU pods without a toleration."""
    for cluster in clusters(manifests):
        head = cluster.head
        if get(cluster.spec, "headGroupSpec", "labels", MARKET_LABEL) == SPOT or _wants_spot(head.spec):
            yield at(cluster.manifest, (*head.path, "spec", "nodeSelector"), "the head is on spot nodes",
                     "use an on-demand pool: losing the head loses the driver, the job server and the tables")
        if str(get(cluster.spec, "headGroupSpec", "rayStartParams", "num-cpus")) != "0":
            yield at(cluster.manifest, (*cluster.path, "headGroupSpec", "rayStartParams", "num-cpus"),
                     "the head runs tasks", '"0": a task that runs out of memory would end the cluster')
        for template in cluster.workers:
            keys = {entry.get("key") for entry in get(template.spec, "tolerations", default=[])}
            tolerates_all = any(not entry.get("key") and entry.get("operator") == "Exists"
                                for entry in get(template.spec, "tolerations", default=[]))
            spec_path = (*template.path, "spec")
            if is_spot(template) and not _wants_spot(template.spec):
                yield at(cluster.manifest, (*spec_path, "nodeSelector"),
                         "labelled spot, but does not select spot nodes",
                         "select the spot pool, or correct the group's label")
            if _wants_spot(template.spec) and not is_spot(template):
                yield at(cluster.manifest, (*template.path[:-1], "labels", MARKET_LABEL), "on spot nodes, but "
                         "Ray's label does not say so", f"{MARKET_LABEL}: {SPOT}")
            if template.offers(GPU) and GPU not in keys and not tolerates_all:
                yield at(cluster.manifest, (*spec_path, "tolerations"), f"GPU nodes are tainted {GPU}",
                         f"{{key: {GPU}, operator: Exists, effect: NoSchedule}}")


def _wants_spot(spec: dict[str, Any]) -> bool:
    labels = " ".join(f"{key}={value}" for key, value in get(spec, "nodeSelector", default={}).items())
    return re.search(r"spot|preemptible", labels, re.IGNORECASE) is not None
