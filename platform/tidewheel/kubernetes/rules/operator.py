"""Rules of the KubeRay operator's code (v1.7.0, controllers/ray/utils/validation.go) that no schema holds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from tidewheel import yaml_text
from tidewheel.kubernetes.clusters import Cluster, clusters
from tidewheel.kubernetes.problem import Manifest, Problem, at, get

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LONGEST = {"RayCluster": 53, "RayJob": 47}
LABEL_NAME = re.compile(r"([A-Za-z0-9]([-\w.]*[A-Za-z0-9])?)")
GATES_ANNOTATION = "tidewheel.io/feature-gates"
SUBMISSION_MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
RESOURCE_PARAMS = ("num-cpus", "num-gpus", "memory", "resources")
TLS_VARIABLES = ("RAY_USE_TLS", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")


def names(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report names that are not DNS-1035 labels, or too long for the operator's suffixes."""
    for manifest in manifests:
        if (longest := LONGEST.get(manifest["kind"])) is None:
            continue
        name = get(manifest, "metadata", "name", default="")
        if not DNS_1035.fullmatch(name):
            yield at(manifest, ("metadata", "name"), f"{name!r} is not a DNS-1035 label",
                      "lower-case letters, digits and -, with a letter first")
        elif len(name) > longest:
            yield at(manifest, ("metadata", "name"), f"{len(name)} characters",
                      f"a {manifest['kind']} has at most {longest}: pods' names are made from it")


def cluster(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report mistakes in groups, their labels and resources, and in authentication."""
    for ray_cluster in clusters(manifests):
        yield from _groups(ray_cluster)
        yield from _authentication(ray_cluster)
        if get(ray_cluster.spec, "tlsOptions", "enabled"):
            for path, entry in _environment(ray_cluster):
                if entry.get("name") in TLS_VARIABLES:
                    yield at(ray_cluster.manifest, path, f"{entry['name']} is set beside tlsOptions",
                              "remove it: the operator sets it")


def _groups(ray_cluster: Cluster) -> Iterator[Problem]:
    head = ((*ray_cluster.path, "headGroupSpec"), get(ray_cluster.spec, "headGroupSpec", default={}))
    for path, group in [head, *ray_cluster.groups]:
        params = get(group, "rayStartParams", default={})
        for name in RESOURCE_PARAMS:
            if name in params and get(group, "resources"):
                yield at(ray_cluster.manifest, (*path, "rayStartParams", name), "set beside the group's resources",
                          "keep one of the two")
        if "labels" in params:
            yield at(ray_cluster.manifest, (*path, "rayStartParams", "labels"), "labels are not a start parameter",
                      "use the group's own field labels")
        for key, value in get(group, "labels", default={}).items():
            if not (LABEL_NAME.fullmatch(key.rpartition("/")[2]) and len(key.rpartition("/")[2]) <= 63):
                yield at(ray_cluster.manifest, (*path, "labels", key), "no label's name", "letters, digits and - _ .")
            if value and not (LABEL_NAME.fullmatch(value) and len(value) <= 63):
                yield at(ray_cluster.manifest, (*path, "labels", key), f"{value!r} is not a label value",
                          "at most 63 letters, digits and - _ .")
    taken: set[str] = set()
    for path, group in ray_cluster.groups:
        if group["groupName"] in taken:
            yield at(ray_cluster.manifest, (*path, "groupName"), f"{group['groupName']!r} occurs twice",
                     "name each group once: pods are counted by it")
        taken.add(group["groupName"])
        least, most = get(group, "minReplicas", default=0), get(group, "maxReplicas")
        if most is not None and least > most:
            yield at(ray_cluster.manifest, (*path, "minReplicas"), f"{least} is more than maxReplicas {most}",
                      f"at most {most}, or raise maxReplicas")
        replicas = get(group, "replicas")
        if replicas is not None and not least <= replicas <= (replicas if most is None else most):
            yield at(ray_cluster.manifest, (*path, "replicas"), f"{replicas} is not from {least} to {most}",
                      f"start with minReplicas, {least}")
        if not ray_cluster.autoscaling and most is None:
            yield at(ray_cluster.manifest, (*path, "maxReplicas"), "missing, and the autoscaler is off", "set it")


def _authentication(ray_cluster: Cluster) -> Iterator[Problem]:
    options = get(ray_cluster.spec, "authOptions", default={})
    version = str(get(ray_cluster.spec, "rayVersion", default=""))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    path = (*ray_cluster.path, "rayVersion")
    if options.get("mode") == "token" and (len(numbers) < 2 or numbers < (2, 52)):
        yield at(ray_cluster.manifest, path, f"{version or 'none'}, and token authentication is on",
                  "2.52.0 or newer, as in the image")
    if options.get("enableK8sTokenAuth"):
        field = (*ray_cluster.path, "authOptions", "enableK8sTokenAuth")
        if options.get("mode") != "token":
            yield at(ray_cluster.manifest, field, "set, but mode is not token", "set authOptions.mode to token")
        if ray_cluster.manifest["kind"] == "RayJob":
            yield at(ray_cluster.manifest, field, "not for a RayJob", "remove it: mode token is enough")
        if options.get("secretName"):
            yield at(ray_cluster.manifest, (*ray_cluster.path, "authOptions", "secretName"),
                      "set beside enableK8sTokenAuth", "keep one of the two")


def autoscaler(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report settings that autoscaler v2 lacks or excludes."""
    for ray_cluster in clusters(manifests):
        options = get(ray_cluster.spec, "autoscalerOptions")
        field = (*ray_cluster.path, "autoscalerOptions")
        if options is not None and not ray_cluster.autoscaling:
            yield at(ray_cluster.manifest, (*ray_cluster.path, "enableInTreeAutoscaling"),
                      "off, but there are autoscalerOptions", "set it to true, or remove them")
        if ray_cluster.autoscaling and get(options, "version") != "v2":
            yield at(ray_cluster.manifest, (*field, "version"), "not v2, whose nodes have labels and drain before they "
                      "are removed", "use v2")
        if get(options, "idleTimeoutSeconds", default=0) < 0:
            yield at(ray_cluster.manifest, (*field, "idleTimeoutSeconds"), "negative", "0 or more")
        for index, entry in enumerate(get(options, "env", default=[])):
            if entry.get("name") == "KUBERAY_GEN_AUTOSCALER_START_CMD":
                yield at(ray_cluster.manifest, (*field, "env", index), "set by the operator", "remove it")
        for path, entry in _environment(ray_cluster):
            if entry.get("name") == "RAY_enable_autoscaler_v2":
                yield at(ray_cluster.manifest, path, "set beside autoscalerOptions.version", "remove it")
        for template in [ray_cluster.head, *ray_cluster.workers]:
            policy = get(template.spec, "restartPolicy")
            if ray_cluster.autoscaler_v2 and policy not in (None, "Never"):
                yield at(ray_cluster.manifest, (*template.path, "spec", "restartPolicy"),
                          f"{policy} under autoscaler v2",
                          "use Never, or leave it out: the autoscaler would not know the node of a restarted pod")
        for path, group in ray_cluster.groups:
            if group.get("suspend") and ray_cluster.autoscaling:
                yield at(ray_cluster.manifest, (*path, "suspend"), "a group cannot be suspended under the autoscaler",
                          "set minReplicas and maxReplicas to 0")
            for name in ("idleTimeoutSeconds", "priority"):
                if get(group, name) is not None and not ray_cluster.autoscaler_v2:
                    yield at(ray_cluster.manifest, (*path, name), "supported only by autoscaler v2",
                              "set autoscalerOptions.version to v2")


def job(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report mistakes in a RayJob's cluster, submission and deletion."""
    for manifest in manifests:
        if manifest["kind"] == "RayJob":
            yield from _place(manifest)
            yield from _end(manifest)
            yield from _submission(manifest)


def _place(manifest: Manifest) -> Iterator[Problem]:
    spec = manifest["spec"]
    selector, own = get(spec, "clusterSelector", default={}), get(spec, "rayClusterSpec")
    if not selector and own is None:
        yield at(manifest, ("spec", "rayClusterSpec"), "neither this nor clusterSelector",
                  "put jobs/own-cluster last among the components, or name a cluster")
    if selector and own is not None:
        yield at(manifest, ("spec", "clusterSelector"), "set beside rayClusterSpec", "keep one of the two")
    if selector:
        if not selector.get("ray.io/cluster"):
            yield at(manifest, ("spec", "clusterSelector", "ray.io/cluster"), "missing", "name the RayCluster")
        if get(spec, "backoffLimit", default=0) > 0:
            yield at(manifest, ("spec", "backoffLimit"), "not allowed with clusterSelector",
                      "use 0, and submit again: the run id identifies the run, which continues")
        if spec.get("suspend"):
            yield at(manifest, ("spec", "suspend"), "not allowed with clusterSelector", "remove it")


def _end(manifest: Manifest) -> Iterator[Problem]:
    spec = manifest["spec"]
    shutdown = spec.get("shutdownAfterJobFinishes") is True
    if get(spec, "ttlSecondsAfterFinished", default=0) > 0 and not shutdown:
        yield at(manifest, ("spec", "ttlSecondsAfterFinished"), "set, but shutdownAfterJobFinishes is false",
                  "set shutdownAfterJobFinishes to true")
    if get(spec, "ttlSecondsAfterFinished", default=0) < 0:
        yield at(manifest, ("spec", "ttlSecondsAfterFinished"), "negative", "0 or more")
    if spec.get("suspend") and not shutdown:
        yield at(manifest, ("spec", "suspend"), "set, but shutdownAfterJobFinishes is false",
                  "set shutdownAfterJobFinishes to true")
    for name in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if get(spec, name, default=1) <= 0:
            yield at(manifest, ("spec", name), "not positive", "1 or more, or leave it out")
    if get(spec, "backoffLimit", default=0) < 0:
        yield at(manifest, ("spec", "backoffLimit"), "negative", "0 or more")
    deletion = get(spec, "deletionStrategy", default={})
    rules = get(deletion, "deletionRules", default=[])
    if rules and shutdown:
        yield at(manifest, ("spec", "deletionStrategy", "deletionRules"), "set beside shutdownAfterJobFinishes",
                  "keep one of the two")
    policies: list[tuple[tuple[str | int, ...], Any]] = [
        (("deletionRules", index, "policy"), rule.get("policy")) for index, rule in enumerate(rules)]
    policies += [((name, "policy"), get(deletion, name, "policy")) for name in ("onSuccess", "onFailure")]
    for path, policy in policies:
        if policy == "DeleteWorkers" and get(spec, "rayClusterSpec", "enableInTreeAutoscaling"):
            yield at(manifest, ("spec", "deletionStrategy", *path), "DeleteWorkers under the autoscaler",
                      "DeleteCluster")


def _submission(manifest: Manifest) -> Iterator[Problem]:
    spec = manifest["spec"]
    mode = get(spec, "submissionMode", default="K8sJobMode")
    if mode not in SUBMISSION_MODES:
        yield at(manifest, ("spec", "submissionMode"), f"{mode!r} is not a mode of the operator",
                  f"use one of {', '.join(SUBMISSION_MODES)}")
    if mode == "SidecarMode":
        for name in ("clusterSelector", "submitterPodTemplate", "submitterConfig"):
            if spec.get(name):
                yield at(manifest, ("spec", name), "not allowed with SidecarMode", "remove it, or use K8sJobMode")
    if mode == "InteractiveMode" and get(spec, "backoffLimit", default=0) > 0:
        yield at(manifest, ("spec", "backoffLimit"), "not allowed with InteractiveMode", "0")
    if mode != "InteractiveMode" and not str(get(spec, "entrypoint", default="")).strip():
        yield at(manifest, ("spec", "entrypoint"), "missing", "the command, as python -m jobs.train --config ...")
    try:
        environment = yaml_text.load(get(spec, "runtimeEnvYAML", default="") or "{}")
    except yaml.YAMLError:
        environment = None
    if not isinstance(environment, dict):
        yield at(manifest, ("spec", "runtimeEnvYAML"), "not a YAML mapping", "keys such as env_vars and working_dir")
    elif set(environment) & {"pip", "uv", "conda"}:
        yield at(manifest, ("spec", "runtimeEnvYAML"), "installs packages on every node, at every start",
                  "build them into the image")


def fault_tolerance(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report GCS fault tolerance that is set without gcsFaultToleranceOptions, or incompletely."""
    for ray_cluster in clusters(manifests):
        options = get(ray_cluster.spec, "gcsFaultToleranceOptions")
        field = (*ray_cluster.path, "gcsFaultToleranceOptions")
        if get(ray_cluster.manifest, "metadata", "annotations", "ray.io/ft-enabled"):
            yield at(ray_cluster.manifest, ("metadata", "annotations", "ray.io/ft-enabled"), "the old way",
                      "use spec.gcsFaultToleranceOptions")
        for path, entry in _environment(ray_cluster):
            if entry.get("name") in ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"):
                yield at(ray_cluster.manifest, path, f"{entry['name']} is set by the operator",
                          "use spec.gcsFaultToleranceOptions")
        for name in ("redis-password", "redis-username"):
            if get(ray_cluster.spec, "headGroupSpec", "rayStartParams", name):
                yield at(ray_cluster.manifest, (*ray_cluster.path, "headGroupSpec", "rayStartParams", name),
                          "a start parameter",
                          "use spec.gcsFaultToleranceOptions, with a reference to a Secret")
        if options is None:
            continue
        if get(options, "backend", default="redis") == "redis":
            if not options.get("redisAddress"):
                yield at(ray_cluster.manifest, (*field, "redisAddress"), "missing", "host:port of Redis")
            if options.get("storage"):
                yield at(ray_cluster.manifest, (*field, "storage"), "for the backend rocksdb only", "remove it")


def gates(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report alpha fields, which the operator refuses by default, without an annotation that names the feature gate."""
    for ray_cluster in clusters(manifests):
        annotation = str(get(ray_cluster.manifest, "metadata", "annotations", GATES_ANNOTATION, default=""))
        declared = {gate.strip() for gate in annotation.split(",")}
        used = {"RayClusterNetworkPolicy": ("networkPolicy",), "RayClusterMTLS": ("tlsOptions",),
                "RayClusterHistoryServer": ("historyServerOptions",)}
        for gate, path in used.items():
            if get(ray_cluster.spec, *path) is not None and gate not in declared:
                yield _gate(ray_cluster, path, gate)
        if get(ray_cluster.spec, "gcsFaultToleranceOptions", "backend") == "rocksdb":
            gate = "GCSFaultToleranceEmbeddedStorage"
            if gate not in declared:
                yield _gate(ray_cluster, ("gcsFaultToleranceOptions", "backend"), gate)


def _gate(ray_cluster: Cluster, path: tuple[str, ...], gate: str) -> Problem:
    return at(ray_cluster.manifest, (*ray_cluster.path, *path), "alpha: the operator refuses it by default",
               f"start the operator with --feature-gates={gate}=true and say so in metadata.annotations"
               f"['{GATES_ANNOTATION}'], or remove it")


def _environment(ray_cluster: Cluster) -> Iterator[tuple[tuple[str | int, ...], dict[str, Any]]]:
    """Yield path and value of each variable of the cluster's Ray containers."""
    for template in [ray_cluster.head, *ray_cluster.workers]:
        for index, entry in enumerate(get(template.spec, "containers", 0, "env", default=[])):
            yield (*template.path, "spec", "containers", 0, "env", index), entry
