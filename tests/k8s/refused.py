"""Manifests that are each broken in one place, with the field and the fix that the lint must name.

A row is (name, object, operations, path, words of the fix). The object is "Kind/name" in the set of `test_lint.whole`;
operations are a JSON patch. "+" before an object's name adds it to the set instead.
"""

from __future__ import annotations

from typing import Any

JOB, CLUSTER = "RayJob/llama-8b", "RayCluster/tidewheel"
SPEC = "/spec/rayClusterSpec"
GROUP, HEAD = f"{SPEC}/workerGroupSpecs", f"{SPEC}/headGroupSpec"
POD = f"{GROUP}/1/template/spec"
AT = "spec.rayClusterSpec.workerGroupSpecs[1]"
CONTAINER = f"{AT}.template.spec.containers[0]"


def put(path: str, value: Any) -> dict[str, Any]:
    return {"op": "add", "path": path, "value": value}


def drop(path: str) -> dict[str, Any]:
    return {"op": "remove", "path": path}


Row = tuple[str, str, list[dict[str, Any]], str, str]
SCHEMA: list[Row] = [
    ("a field that does not exist", JOB, [put(f"{SPEC}/workerGroupSpec", [])], "spec.rayClusterSpec.workerGroupSpec",
     "did you mean workerGroupSpecs?"),
    ("a field of a container misspelt", JOB, [put(f"{POD}/containers/0/volumemounts", [])],
     f"{CONTAINER}.volumemounts", "did you mean volumeMounts?"),
    ("a start parameter that is no string", JOB, [put(f"{HEAD}/rayStartParams/num-cpus", 0)],
     "spec.rayClusterSpec.headGroupSpec.rayStartParams.num-cpus", "quote it"),
    ("replicas as text", JOB, [put(f"{GROUP}/1/maxReplicas", "4")], f"{AT}.maxReplicas", "not quoted"),
    ("a container without a name", JOB, [drop(f"{POD}/containers/0/name")], f"{CONTAINER}.name", "add it"),
    ("an unknown upscaling mode", JOB, [put(f"{SPEC}/autoscalerOptions/upscalingMode", "Agressive")],
     "spec.rayClusterSpec.autoscalerOptions.upscalingMode", "did you mean Aggressive?"),
    ("two groups with one name", JOB, [put(f"{GROUP}/2/groupName", "data")], 
     "spec.rayClusterSpec.workerGroupSpecs[2].groupName", "once"),
    ("a core kind's field misspelt", "NetworkPolicy/head", [put("/spec/podselector", {})], "spec.podselector",
     "did you mean podSelector?"),
    ("a version of a kind that is not served", "PodMonitor/tidewheel-head", [
        put("/apiVersion", "monitoring.coreos.com/v2")], "apiVersion", "monitoring.coreos.com/v1/PodMonitor"),
    ("an alert's waiting time", "PrometheusRule/tidewheel", [put("/spec/groups/0/rules/1/for", "five minutes")],
     "spec.groups[0].rules[1].for", "Kubernetes API"),
    ("a queue's quota missing", "LocalQueue/tidewheel", [put("/spec/clusterqueue", "a")], "spec.clusterqueue",
     "did you mean clusterQueue?"),
]
OPERATOR: list[Row] = [
    ("a name that is no DNS label", JOB, [put("/metadata/name", "Llama_8b")], "metadata.name", "lower-case"),
    ("a name too long", JOB, [put("/metadata/name", "a" * 48)], "metadata.name", "at most 47"),
    ("minReplicas above maxReplicas", JOB, [put(f"{GROUP}/1/minReplicas", 9)], f"{AT}.minReplicas",
     "raise maxReplicas"),
    ("replicas out of range", JOB, [put(f"{GROUP}/1/replicas", 7)], f"{AT}.replicas", "start with minReplicas"),
    ("resources twice", JOB, [put(f"{GROUP}/1/rayStartParams", {"num-gpus": "8"}),
                              put(f"{GROUP}/1/resources", {"GPU": "8"})], f"{AT}.rayStartParams.num-gpus", "keep one"),
    ("labels as a start parameter", JOB, [put(f"{GROUP}/1/rayStartParams", {"labels": "a=b"})],
     f"{AT}.rayStartParams.labels", "field labels"),
    ("an invalid label", JOB, [put(f"{GROUP}/1/labels/ray.io~1market-type", "on demand")],
     f"{AT}.labels['ray.io/market-type']", "letters, digits"),
    ("pods that restart under autoscaler v2", JOB, [put(f"{POD}/restartPolicy", "Always")],
     f"{AT}.template.spec.restartPolicy", "Never"),
    ("autoscaler v1", JOB, [put(f"{SPEC}/autoscalerOptions/version", "v1")],
     "spec.rayClusterSpec.autoscalerOptions.version", "v2"),
    ("the autoscaler off", JOB, [put(f"{SPEC}/enableInTreeAutoscaling", False)],
     "spec.rayClusterSpec.enableInTreeAutoscaling", "set it to true"),
    ("autoscaler v2 by variable, too", JOB, [put(f"{HEAD}/template/spec/containers/0/env/-",
                                                 {"name": "RAY_enable_autoscaler_v2", "value": "1"})],
     "spec.rayClusterSpec.headGroupSpec.template.spec.containers[0].env[1]", "remove it"),
    ("a suspended group under the autoscaler", JOB, [put(f"{GROUP}/1/suspend", True)], f"{AT}.suspend",
     "minReplicas and maxReplicas to 0"),
    ("token authentication on an old Ray", JOB, [put(f"{SPEC}/authOptions", {"mode": "token"}),
                                                 put(f"{SPEC}/rayVersion", "2.51.0")],
     "spec.rayClusterSpec.rayVersion", "2.52.0 or newer"),
    ("Kubernetes tokens for a job", JOB, [put(f"{SPEC}/authOptions", {"mode": "token", "enableK8sTokenAuth": True})],
     "spec.rayClusterSpec.authOptions.enableK8sTokenAuth", "mode token is enough"),
    ("neither a cluster nor a selector", JOB, [drop(SPEC)], "spec.rayClusterSpec", "own-cluster"),
    ("a cluster and a selector", JOB, [put("/spec/clusterSelector", {"ray.io/cluster": "a"})], "spec.clusterSelector",
     "keep one"),
    ("retries on a standing cluster", JOB, [drop(SPEC), put("/spec/clusterSelector", {"ray.io/cluster": "a"})],
     "spec.backoffLimit", "run id"),
    ("time to live without shutdown", JOB, [put("/spec/shutdownAfterJobFinishes", False)],
     "spec.ttlSecondsAfterFinished", "shutdownAfterJobFinishes to true"),
    ("a deadline of zero", JOB, [put("/spec/activeDeadlineSeconds", 0)], "spec.activeDeadlineSeconds", "1 or more"),
    ("negative retries", JOB, [put("/spec/backoffLimit", -1)], "spec.backoffLimit", "0 or more"),
    ("workers deleted under the autoscaler", JOB, [put("/spec/deletionStrategy", {
        "onSuccess": {"policy": "DeleteWorkers"}, "onFailure": {"policy": "DeleteCluster"}})],
     "spec.deletionStrategy.onSuccess.policy", "DeleteCluster"),
    ("deletion rules beside shutdown", JOB, [put("/spec/deletionStrategy", {"deletionRules": [
        {"policy": "DeleteCluster", "condition": {"jobStatus": "SUCCEEDED", "ttlSeconds": 5}}]})],
     "spec.deletionStrategy.deletionRules", "keep one"),
    ("an unknown submission mode", JOB, [put("/spec/submissionMode", "K8SJobMode")], "spec.submissionMode",
     "K8sJobMode"),
    ("a submitter's pod in sidecar mode", JOB, [put("/spec/submissionMode", "SidecarMode")],
     "spec.submitterPodTemplate", "K8sJobMode"),
    ("no command", JOB, [put("/spec/entrypoint", " ")], "spec.entrypoint", "python -m jobs.train"),
    ("a runtime environment that is no mapping", JOB, [put("/spec/runtimeEnvYAML", "- a")], "spec.runtimeEnvYAML",
     "env_vars"),
    ("packages installed at every start", JOB, [put("/spec/runtimeEnvYAML", "pip: [torch]")], "spec.runtimeEnvYAML",
     "image"),
    ("fault tolerance the old way", JOB, [put("/metadata/annotations/ray.io~1ft-enabled", "true")],
     "metadata.annotations['ray.io/ft-enabled']", "gcsFaultToleranceOptions"),
    ("Redis by variable", JOB, [put(f"{HEAD}/template/spec/containers/0/env/-",
                                    {"name": "RAY_REDIS_ADDRESS", "value": "redis:6379"})],
     "spec.rayClusterSpec.headGroupSpec.template.spec.containers[0].env[1]", "gcsFaultToleranceOptions"),
    ("Redis without an address", JOB, [drop(f"{SPEC}/gcsFaultToleranceOptions/redisAddress")],
     "spec.rayClusterSpec.gcsFaultToleranceOptions.redisAddress", "host:port"),
    ("an alpha field", JOB, [put(f"{SPEC}/tlsOptions", {"enabled": True})], "spec.rayClusterSpec.tlsOptions",
     "--feature-gates=RayClusterMTLS=true"),
    ("embedded storage of the tables", JOB, [put(f"{SPEC}/gcsFaultToleranceOptions", {"backend": "rocksdb"})],
     "spec.rayClusterSpec.gcsFaultToleranceOptions.backend", "GCSFaultToleranceEmbeddedStorage"),
]
PODS: list[Row] = [
    ("a pod that may be root", JOB, [drop(f"{POD}/securityContext/runAsNonRoot")],
     f"{AT}.template.spec.securityContext.runAsNonRoot", "true"),
    ("a pod that is root", JOB, [put(f"{POD}/securityContext/runAsUser", 0)],
     f"{AT}.template.spec.securityContext.runAsUser", "1000"),
    ("no seccomp profile", JOB, [drop(f"{POD}/securityContext/seccompProfile")],
     f"{AT}.template.spec.securityContext.seccompProfile", "RuntimeDefault"),
    ("a container with capabilities", JOB, [drop(f"{POD}/containers/0/securityContext/capabilities")],
     f"{CONTAINER}.securityContext.capabilities.drop", "ALL"),
    ("a container that may gain rights", JOB, [drop(f"{POD}/containers/0/securityContext/allowPrivilegeEscalation")],
     f"{CONTAINER}.securityContext.allowPrivilegeEscalation", "false"),
    ("an autoscaler without a security context", JOB, [drop(f"{SPEC}/autoscalerOptions/securityContext")],
     "spec.rayClusterSpec.autoscalerOptions.securityContext.allowPrivilegeEscalation", "false"),
    ("the operator's own submitter", JOB, [drop("/spec/submitterPodTemplate")], "spec.submitterPodTemplate",
     "jobs/train"),
    ("a folder of the node", JOB, [put(f"{POD}/volumes/0", {"name": "cache", "hostPath": {"path": "/mnt"}}),
                                   drop(f"{POD}/volumes/1")],
     f"{AT}.template.spec.volumes[0].hostPath", "emptyDir"),
    ("the node's network", JOB, [put(f"{POD}/hostNetwork", True)], f"{AT}.template.spec.hostNetwork", "remove"),
    ("an own /dev/shm", JOB, [put(f"{POD}/volumes/-", {"name": "shm", "emptyDir": {"medium": "Memory"}}),
                              put(f"{POD}/containers/0/volumeMounts/-", {"name": "shm", "mountPath": "/dev/shm"})],
     f"{CONTAINER}.volumeMounts[2].mountPath", "remove the mount"),
    ("an image without a fixed tag", JOB, [put(f"{POD}/containers/0/image", "tidewheel:latest")], f"{CONTAINER}.image",
     "digest"),
    ("a custom command", JOB, [put(f"{POD}/containers/0/command", ["bash", "-c", "ray start"])],
     f"{CONTAINER}.command", "rayStartParams"),
    ("a hook before stopping", JOB, [put(f"{POD}/containers/0/lifecycle", {"preStop": {"exec": {"command": ["a"]}}})],
     f"{CONTAINER}.lifecycle.preStop", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"),
    ("a shell between signal and program", "StatefulSet/tidewheel-redis", [
        put("/spec/template/spec/containers/0/command", ["sh", "-c", "redis-server"])],
     "spec.template.spec.containers[0].command", "exec"),
    ("no memory limit", JOB, [drop(f"{POD}/containers/0/resources/limits/memory")],
     f"{CONTAINER}.resources.limits.memory", "as requested"),
    ("memory overcommitted", JOB, [put(f"{POD}/containers/0/resources/limits/memory", "2000Gi")],
     f"{CONTAINER}.resources.limits.memory", "equal"),
    ("no CPU request", JOB, [drop(f"{POD}/containers/0/resources/requests/cpu")],
     f"{CONTAINER}.resources.requests.cpu", "set it"),
    ("less time than the drain takes", JOB, [put(f"{POD}/terminationGracePeriodSeconds", 60)],
     f"{AT}.template.spec.terminationGracePeriodSeconds", "at least 105"),
    ("the default grace period", JOB, [drop(f"{POD}/terminationGracePeriodSeconds")],
     f"{AT}.template.spec.terminationGracePeriodSeconds", "at least 105"),
    ("a head on spot nodes", JOB, [put(f"{HEAD}/template/spec/nodeSelector", {"cloud.google.com/gke-spot": "true"}),
                                   ], "spec.rayClusterSpec.headGroupSpec.template.spec.nodeSelector", "on-demand"),
    ("a head that takes tasks", JOB, [drop(f"{HEAD}/rayStartParams/num-cpus")],
     "spec.rayClusterSpec.headGroupSpec.rayStartParams.num-cpus", '"0"'),
    ("a spot group that is not on spot nodes", JOB, [drop(f"{GROUP}/2/template/spec/nodeSelector")],
     "spec.rayClusterSpec.workerGroupSpecs[2].template.spec.nodeSelector", "spot pool"),
    ("GPU pods that GPU nodes refuse", JOB, [drop(f"{POD}/tolerations")], f"{AT}.template.spec.tolerations",
     "nvidia.com/gpu"),
]
AROUND: list[Row] = [
    ("Pod Security not enforced", "Namespace/tidewheel", [
        put("/metadata/labels/pod-security.kubernetes.io~1enforce", "baseline")],
     "metadata.labels['pod-security.kubernetes.io/enforce']", "restricted"),
    ("another namespace", "ServiceAccount/tidewheel-head", [put("/metadata/namespace", "default")],
     "metadata.namespace", "tidewheel"),
    ("no egress to names", "NetworkPolicy/dns", [put("/spec/egress", [])],
     "spec.rayClusterSpec.headGroupSpec.template.metadata.labels", "port 53"),
    ("no way from the submitter to the head", "NetworkPolicy/submitter", [put("/spec/egress/0/ports/0/port", 8080)],
     "spec.submitterPodTemplate.metadata.labels", "8265"),
    ("workers without a network policy", JOB, [put(f"{GROUP}/1/template/metadata/labels/tidewheel.io~1role", "gpu")],
     f"{AT}.template.metadata.labels", "between Ray's pods"),
    ("no way for metrics", "NetworkPolicy/metrics", [put("/spec/ingress/0/ports/0/port", 9090)],
     "spec.rayClusterSpec.headGroupSpec.template.metadata.labels", "8080"),
    ("a role with all rights", "Role/tidewheel-launcher", [put("/rules/0/verbs", ["*"])], "rules[0].verbs", "name"),
    ("a role that reads secrets", "Role/tidewheel-launcher", [put("/rules/2/resources", ["secrets"])],
     "rules[2].resources", "by reference"),
    ("rights in the whole cluster", "Role/tidewheel-launcher", [put("/kind", "ClusterRole")], "kind", "Role"),
    ("the default account", JOB, [drop(f"{POD}/serviceAccountName")], f"{AT}.template.spec.serviceAccountName",
     "tidewheel-worker"),
    ("a token for the workers", JOB, [put(f"{POD}/automountServiceAccountToken", True)],
     f"{AT}.template.spec.automountServiceAccountToken", "false"),
    ("an account that does not exist", JOB, [put(f"{POD}/serviceAccountName", "tidewheel-wroker")],
     f"{AT}.template.spec.serviceAccountName", "correct the name"),
    ("a volume that does not exist", JOB, [put(f"{POD}/containers/0/volumeMounts/0/name", "cash")],
     f"{CONTAINER}.volumeMounts[0].name", "correct the name"),
    ("a ConfigMap that does not exist", JOB, [put(f"{HEAD}/template/spec/volumes/0/configMap", {"name": "run"})],
     "spec.rayClusterSpec.headGroupSpec.template.spec.volumes[0].configMap.name", "correct the name"),
    ("a binding to no role", "RoleBinding/tidewheel-launcher", [put("/roleRef/name", "launcher")], "roleRef.name",
     "correct the name"),
    ("a budget for no pod", "PodDisruptionBudget/tidewheel-head", [
        put("/spec/selector/matchLabels/tidewheel.io~1role", "haed")], "spec.selector", "labels of the intended pods"),
    ("a budget that cannot be computed", "PodDisruptionBudget/tidewheel-head", [
        drop("/spec/minAvailable"), put("/spec/maxUnavailable", 0)], "spec.maxUnavailable", "minAvailable"),
    ("a port without metrics", "PodMonitor/tidewheel-workers", [put("/spec/podMetricsEndpoints/0/port", "metric")],
     "spec.podMetricsEndpoints[0].port", "metrics"),
    ("a topology spread of other pods", JOB, [
        put(f"{POD}/topologySpreadConstraints/0/labelSelector/matchLabels", {"a": "b"})],
     f"{AT}.template.spec.topologySpreadConstraints[0].labelSelector", "this template"),
    ("a queue that does not exist", JOB, [put("/metadata/labels/kueue.x-k8s.io~1queue-name", "tidewhell")],
     "metadata.labels['kueue.x-k8s.io/queue-name']", "correct the name"),
    ("Kueue without shutdown", JOB, [put("/spec/shutdownAfterJobFinishes", False),
                                     drop("/spec/ttlSecondsAfterFinished")],
     "spec.shutdownAfterJobFinishes", "quota"),
    ("Kueue's own field", JOB, [put("/spec/suspend", True)], "spec.suspend", "remove it"),
    ("autoscaling under Kueue", JOB, [drop("/metadata/annotations/kueue.x-k8s.io~1elastic-job")],
     "metadata.annotations['kueue.x-k8s.io/elastic-job']", "ElasticJobsViaWorkloadSlices"),
    ("two queues", JOB, [put("/metadata/labels/volcano.sh~1queue-name", "a")],
     "metadata.labels['volcano.sh/queue-name']", "keep one"),
    ("a password as a value", "StatefulSet/tidewheel-redis", [
        drop("/spec/template/spec/containers/0/env/0/valueFrom"),
        put("/spec/template/spec/containers/0/env/0/value", "correct horse")],
     "spec.template.spec.containers[0].env[0].value", "secretKeyRef"),
    ("a key in a configuration", JOB, [put("/spec/entrypoint", "python -m jobs.train AKIA" + "ABCDEFGHIJKLMNOP")],
     "spec.entrypoint", "Secret"),
    ("a metric that does not exist", "PrometheusRule/tidewheel", [
        put("/spec/groups/0/rules/1/expr", "delta(ray_tidewheel_steps[5m]) == 0")], "spec.groups[0].rules[1].expr",
     "did you mean ray_tidewheel_step?"),
    ("an alert without a fix", "PrometheusRule/tidewheel", [drop("/spec/groups/0/rules/1/annotations/fix")],
     "spec.groups[0].rules[1].annotations.fix", "wakes somebody"),
    ("a dashboard that is no JSON", "ConfigMap/tidewheel-dashboards", [put("/data/training.json", "{")],
     "data['training.json']", "export"),
]
TRAINING: list[Row] = [
    ("fewer pods than the run starts with", JOB, [put(f"{GROUP}/1/minReplicas", 0), put(f"{GROUP}/1/replicas", 0)],
     f"{AT}.minReplicas", "1, at 8 workers to a pod"),
    ("fewer pods than the run grows to", JOB, [put(f"{GROUP}/2/maxReplicas", 3)],
     "spec.rayClusterSpec.workerGroupSpecs[2].maxReplicas", "4 more"),
    ("more pods than the batch divides into", JOB, [put(f"{GROUP}/2/maxReplicas", 9)],
     "spec.rayClusterSpec.workerGroupSpecs[2].maxReplicas", "2 less, or another batch.virtual_ranks"),
    ("no GPUs", JOB, [drop(f"{GROUP}/2"), drop(f"{GROUP}/1")], "spec.rayClusterSpec.workerGroupSpecs",
     "elastic.gpus_per_worker"),
    ("too few CPUs for the GPUs", JOB, [put(f"{POD}/containers/0/resources/limits/cpu", "16"),
                                                     put(f"{POD}/containers/0/resources/requests/cpu", "16")],
     f"{CONTAINER}.resources.limits.cpu", "32 CPUs"),
    ("a cache outside of every volume", JOB, [put(f"{POD}/containers/0/volumeMounts/0/mountPath", "/elsewhere")],
     f"{CONTAINER}.volumeMounts", "below /cache"),
]
ROWS = [row for row in SCHEMA + OPERATOR + PODS + AROUND + TRAINING if row[3]]
