"""Rules for access: namespaces, network, roles and accounts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tidewheel.kubernetes.clusters import Template, clusters, templates
from tidewheel.kubernetes.problem import Manifest, Problem, at, get

ESCALATING = frozenset({"bind", "escalate", "impersonate", "*"})
DASHBOARD, METRICS, DNS = 8265, 8080, 53


def namespaces(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report namespaces without restricted Pod Security, and objects in other namespaces."""
    made = {manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "Namespace"}
    for manifest in manifests:
        if manifest["kind"] == "Namespace":
            key = "pod-security.kubernetes.io/enforce"
            if get(manifest, "metadata", "labels", key) != "restricted":
                yield at(manifest, ("metadata", "labels", key), f"{get(manifest, 'metadata', 'labels', key)}",
                         "restricted")
        elif made and (name := get(manifest, "metadata", "namespace")) is not None and name not in made:
            yield at(manifest, ("metadata", "namespace"), f"{name!r} is not the namespace of these manifests",
                     f"{', '.join(sorted(made))}")


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector matches labels."""
    if any(labels.get(key) != value for key, value in get(selector, "matchLabels", default={}).items()):
        return False
    for entry in get(selector, "matchExpressions", default=[]):
        value, values = labels.get(entry["key"]), entry.get("values") or []
        fits = {"In": value in values, "NotIn": value not in values, "Exists": value is not None,
                "DoesNotExist": value is None}[entry["operator"]]
        if not fits:
            return False
    return True


def network(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report traffic that Ray needs and the policies deny: DNS, the API server, other Ray pods, the submitter.

    Also report pods without any NetworkPolicy, because then nothing is denied.
    """
    policies = [manifest for manifest in manifests if manifest["kind"] == "NetworkPolicy"]
    pods = [template for template in templates(manifests) if template.role in ("head", "worker", "submitter")]
    if not pods:
        return
    if not policies:
        yield at(pods[0].manifest, ("metadata", "namespace"), "no NetworkPolicy in the manifests",
                 "add base/network-policy.yaml: anyone who reaches Ray's ports can run code in its pods")
        return
    denied = {direction: [pod for pod in pods if any(_covers(policy, pod, direction) for policy in policies)]
              for direction in ("Ingress", "Egress")}
    for pod in pods:
        if pod not in denied["Ingress"]:
            yield at(pod.manifest, (*pod.path, "metadata", "labels"), "no NetworkPolicy applies to this pod",
                     "set the label tidewheel.io/role that the policies select, or add a policy for all pods")
        if pod in denied["Egress"] and not _allowed(policies, pod, "Egress", DNS):
            yield at(pod.manifest, (*pod.path, "metadata", "labels"), "no NetworkPolicy lets this pod use DNS",
                     "allow egress to kube-system, port 53, UDP and TCP")
    heads = [pod for pod in pods if pod.role == "head"]
    for head in heads:
        same = [pod for pod in pods if pod.manifest is head.manifest]
        for pod in (pod for pod in same if pod.role == "worker"):
            for source, target in ((pod, head), (head, pod)):
                if source in denied["Egress"] and not _reaches(policies, source, target, "Egress", None):
                    yield at(source.manifest, (*source.path, "metadata", "labels"),
                             f"no NetworkPolicy lets the {source.role} connect to the {target.role}",
                             "allow egress between Ray's pods on all ports: Ray chooses them")
                if target in denied["Ingress"] and not _reaches(policies, target, source, "Ingress", None):
                    yield at(target.manifest, (*target.path, "metadata", "labels"),
                             f"no NetworkPolicy lets the {target.role} accept connections of the {source.role}",
                             "allow ingress between Ray's pods on all ports: Ray chooses them")
        for submitter in (pod for pod in same if pod.role == "submitter"):
            for owner, peer, direction in ((head, submitter, "Ingress"), (submitter, head, "Egress")):
                if owner in denied[direction] and not _reaches(policies, owner, peer, direction, DASHBOARD):
                    yield at(submitter.manifest, (*submitter.path, "metadata", "labels"),
                             "the submitter cannot reach the head", f"allow {direction.lower()} on port {DASHBOARD}")
        if get(clusters_of(manifests, head), "enableInTreeAutoscaling") and head in denied["Egress"] \
                and not _allowed(policies, head, "Egress", 443):
            yield at(head.manifest, (*head.path, "metadata", "labels"), "the autoscaler cannot reach the API server",
                     "allow egress on ports 443 and 6443")
    if any(manifest["kind"] == "PodMonitor" for manifest in manifests):
        for pod in (pod for pod in pods if pod.role != "submitter" and pod in denied["Ingress"]):
            if not _allowed(policies, pod, "Ingress", METRICS):
                yield at(pod.manifest, (*pod.path, "metadata", "labels"), "Prometheus cannot reach the pod",
                         f"allow ingress on port {METRICS} from its namespace")


def clusters_of(manifests: Sequence[Manifest], head: Template) -> dict[str, Any]:
    """Return the specification of the cluster that a head belongs to."""
    return next(cluster.spec for cluster in clusters(manifests) if cluster.head.value is head.value)


def _covers(policy: Manifest, pod: Template, direction: str) -> bool:
    types = get(policy, "spec", "policyTypes", default=["Ingress"])
    return direction in types and selects(get(policy, "spec", "podSelector", default={}), pod.labels)


def _rules(policies: Sequence[Manifest], pod: Template, direction: str) -> Iterator[dict[str, Any]]:
    for policy in policies:
        if _covers(policy, pod, direction):
            yield from get(policy, "spec", direction.lower(), default=[])


def _on(rule: dict[str, Any], port: int | None) -> bool:
    ports = get(rule, "ports", default=[])
    if not ports:
        return True
    return port is not None and any(entry.get("port") in (port, None) or (isinstance(entry.get("port"), int)
                                    and entry["port"] <= port <= entry.get("endPort", entry["port"]))
                                    for entry in ports)


def _allowed(policies: Sequence[Manifest], pod: Template, direction: str, port: int) -> bool:
    """Return whether the policies allow traffic on a port to or from pods outside the set."""
    side = "from" if direction == "Ingress" else "to"
    return any(_on(rule, port) and all("podSelector" not in peer or "namespaceSelector" in peer
                                       for peer in get(rule, side, default=[]))
               for rule in _rules(policies, pod, direction))


def _reaches(policies: Sequence[Manifest], pod: Template, peer: Template, direction: str, port: int | None) -> bool:
    side = "from" if direction == "Ingress" else "to"
    for rule in _rules(policies, pod, direction):
        peers = get(rule, side, default=[])
        if _on(rule, port) and (not peers or any(
                "podSelector" in entry and "namespaceSelector" not in entry
                and selects(entry["podSelector"], peer.labels) for entry in peers)):
            return True
    return False


def roles(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report roles beyond least privilege: wildcards, verbs that allow escalation, and rights in the whole cluster."""
    for manifest in manifests:
        if manifest["kind"] in ("ClusterRole", "ClusterRoleBinding"):
            yield at(manifest, ("kind",), "rights in the whole cluster", "a Role in the namespace")
        if manifest["kind"] not in ("Role", "ClusterRole"):
            continue
        for index, rule in enumerate(get(manifest, "rules", default=[])):
            for name in ("apiGroups", "resources"):
                if "*" in (rule.get(name) or []):
                    yield at(manifest, ("rules", index, name), "everything", "name only what is needed")
            if bad := sorted(ESCALATING & set(rule.get("verbs") or [])):
                yield at(manifest, ("rules", index, "verbs"), f"{', '.join(bad)} leads to more rights",
                         "name only the verbs that are needed")
            if {"secrets", "pods/exec"} & set(rule.get("resources") or []):
                yield at(manifest, ("rules", index, "resources"),
                         "gives access to every secret or pod of the namespace",
                         "remove it: pods get secrets by reference")


def accounts(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report pods without an account of their own, and API tokens outside the head, whose autoscaler needs one."""
    by_name = {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == "ServiceAccount"}
    for template in templates(manifests):
        path, name = (*template.path, "spec"), get(template.spec, "serviceAccountName")
        if template.role != "other" and name in (None, "default"):
            yield at(template.manifest, (*path, "serviceAccountName"), "the namespace's default account",
                     f"tidewheel-{template.role}")
        elif template.role == "head" or name is None:
            if template.role == "other" and template.spec.get("automountServiceAccountToken") is not False:
                yield at(template.manifest, (*path, "automountServiceAccountToken"), "an unnecessary token", "false")
        else:
            mounts = get(template.spec, "automountServiceAccountToken",
                         default=get(by_name.get(name), "automountServiceAccountToken", default=True))
            if mounts:
                yield at(template.manifest, (*path, "automountServiceAccountToken"),
                         "a token for the API server, which this code does not use", "false")
