"""Rules for alerts and dashboards: their metrics exist, and an alert says what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tidewheel.kubernetes.problem import Manifest, Problem, at, get

TIDEWHEEL = frozenset({
    "ray_tidewheel_step", "ray_tidewheel_train_loss", "ray_tidewheel_train_gradient_norm",
    "ray_tidewheel_train_learning_rate", "ray_tidewheel_train_loss_scale", "ray_tidewheel_train_tokens",
    "ray_tidewheel_train_slowest_rank", "ray_tidewheel_train_slowest_own_seconds", "ray_tidewheel_validation_loss",
    "ray_tidewheel_validation_perplexity", "ray_tidewheel_validation_bits_per_byte",
    "ray_tidewheel_speed_tokens_per_second", "ray_tidewheel_speed_tokens_per_second_per_worker",
    "ray_tidewheel_checkpoint_failed_saves", "ray_tidewheel_checkpoint_kept_step",
    "ray_tidewheel_checkpoint_keep_waits", "ray_tidewheel_checkpoint_skipped_keeps",
    "ray_tidewheel_gpu_least_clock_mhz", "ray_tidewheel_gpu_highest_temperature_c",
    "ray_tidewheel_gpu_throttled_gpus", "ray_tidewheel_speed_mfu", "ray_tidewheel_speed_step_seconds",
    "ray_tidewheel_speed_data_wait_seconds", "ray_tidewheel_speed_world_size",
    "ray_tidewheel_memory_host_resident_bytes",
    "ray_tidewheel_memory_device_allocated_bytes", "ray_tidewheel_memory_device_reserved_bytes",
    "ray_tidewheel_memory_device_peak_bytes"})
"""Gauges of `tidewheel.elastic.gauges.RayGauges`. A test compares them with a run's records."""
RAY = frozenset({
    "ray_node_cpu_utilization", "ray_node_cpu_count", "ray_node_mem_used", "ray_node_mem_total",
    "ray_node_mem_available", "ray_node_mem_shared_bytes", "ray_node_gpus_utilization", "ray_node_gpus_available",
    "ray_node_gram_used", "ray_node_gram_available", "ray_node_disk_usage", "ray_node_disk_free",
    "ray_node_network_receive_speed", "ray_node_network_send_speed", "ray_object_store_memory", "ray_tasks",
    "ray_actors", "autoscaler_active_nodes", "autoscaler_pending_nodes", "autoscaler_recently_failed_nodes"})
"""Metrics of Ray 2.60. A test looks for them in its source."""
_PREFIX = re.compile(r"\b((?:ray|autoscaler|tidewheel)[_:][A-Za-z0-9_:]+)")
_LABELS = re.compile(r"\{[^}]*\}|\b(?:by|on|without|ignoring)\s*\([^)]*\)|\"[^\"]*\"")


def names(expression: str) -> set[str]:
    """Return the metrics of Tidewheel and Ray in a PromQL expression."""
    return set(_PREFIX.findall(_LABELS.sub(" ", expression)))


def metrics(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report metrics that neither Tidewheel, Ray nor a recording rule of the manifests makes."""
    rules = list(_rules(manifests))
    known = TIDEWHEEL | RAY | {rule["record"] for _, _, rule in rules if "record" in rule}
    for manifest, path, rule in rules:
        for name in sorted(names(str(rule["expr"])) - known):
            yield at(manifest, (*path, "expr"), f"nothing exports {name}", _nearest(name, known))
    for manifest in manifests:
        labels = get(manifest, "metadata", "labels", default={})
        if manifest["kind"] != "ConfigMap" or "grafana_dashboard" not in labels:
            continue
        for key, text in get(manifest, "data", default={}).items():
            try:
                dashboard = json.loads(text)
            except ValueError as error:
                yield at(manifest, ("data", key), f"no JSON: {error}", "export it from Grafana again")
                continue
            for panel in dashboard.get("panels", []):
                for target in panel.get("targets", []):
                    for name in sorted(names(target.get("expr", "")) - known):
                        yield at(manifest, ("data", key), f"panel {panel.get('title')!r}: nothing exports {name}",
                                 _nearest(name, known))


def _nearest(name: str, known: frozenset[str] | set[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, 1, 0.6)
    return f"did you mean {near[0]}?" if near else "docs/metrics.md lists the metrics"


def alerts(manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """Report alerts without a waiting time, a severity, a summary or a fix."""
    for manifest, path, rule in _rules(manifests):
        if "alert" not in rule:
            continue
        for name, value in (("for", rule.get("for")), ("labels.severity", get(rule, "labels", "severity")),
                            ("annotations.summary", get(rule, "annotations", "summary")),
                            ("annotations.fix", get(rule, "annotations", "fix"))):
            if not value:
                yield at(manifest, (*path, *name.split(".")), "missing", "add it: the alert wakes somebody")


def _rules(manifests: Sequence[Manifest]) -> Iterator[tuple[Manifest, tuple[Any, ...], dict[str, Any]]]:
    for manifest in manifests:
        if manifest["kind"] == "PrometheusRule":
            for group_number, group in enumerate(get(manifest, "spec", "groups", default=[])):
                for index, rule in enumerate(group.get("rules", [])):
                    yield manifest, ("spec", "groups", group_number, "rules", index), rule
