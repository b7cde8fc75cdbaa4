"""Select nodes by Ray's node groups and labels, which have the same meaning on every kind of cluster.

A node's group is its label `ray.io/node-group` (KubeRay sets it to the worker group's name, Ray's cluster launcher to
the node type). Its label `ray.io/market-type` distinguishes spot nodes, which may be preempted, from on-demand nodes. A
selector has one condition per label that a node must meet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

import pydantic
from pydantic import Field

from tidewheel.config import Config

Selector: TypeAlias = Mapping[str, str]
"""Conditions by label: "value" or "in(a,b)", negated by a leading "!", which nodes without the label meet too. This is
Ray's `label_selector` syntax."""

GROUP_LABEL = "ray.io/node-group"
MARKET_LABEL = "ray.io/market-type"
SPOT, ON_DEMAND = "spot", "on-demand"
DOMAIN_LABELS = ("tidewheel.io/failure-domain", "topology.kubernetes.io/zone", "ray.io/availability-zone")
"""Labels that may hold a node's failure domain, a rack or zone whose nodes may fail together. The first one counts."""
#: Selector that keeps actors that must not be lost off spot nodes. Nodes without the label match too.
NOT_SPOT = {MARKET_LABEL: f"!{SPOT}"}

WORD = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
"""Names of groups, and names and values of labels, as in Kubernetes."""
_CONDITION = re.compile(rf"(!?)(?:({WORD.pattern})|in\(({WORD.pattern}(?:, ?{WORD.pattern})*)\))")


class PlacementConfig(Config):
    """Which nodes are used. The result does not depend on it."""

    groups: tuple[str, ...] = ()
    """Node groups, by name, whose nodes are used, [gpu-on-demand, gpu-spot]; empty: those of any group."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Further labels that a node must have, {ray.io/accelerator-type: H100}, in the syntax of Ray's label selectors:
    a value, in(a, b), or with ! before it the contrary."""

    @pydantic.field_validator("groups")
    @classmethod
    def _names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [name for name in value if not WORD.fullmatch(name)]:
            raise ValueError(f"{wrong[0]!r} is not a valid name of a node group: use only letters, digits and _ . -")
        return value

    @pydantic.field_validator("labels")
    @classmethod
    def _conditions(cls, value: dict[str, str]) -> dict[str, str]:
        for key, condition in value.items():
            if not is_label(key):
                raise ValueError(f"{key!r} is not a valid name of a label: use letters, digits and _ . -, with or "
                                 "without a prefix")
            if not _CONDITION.fullmatch(condition):
                raise ValueError(f"{condition!r} is not a condition for label {key}: write a value or in(a, b), with "
                                 "or without ! before it")
        return value

    @pydantic.model_validator(mode="after")
    def _once(self) -> PlacementConfig:
        if self.groups and GROUP_LABEL in self.labels:
            raise ValueError(f"groups and the label {GROUP_LABEL} set the same condition: leave one out")
        return self

    @property
    def selector(self) -> dict[str, str]:
        """Groups and labels as one selector, without spaces, which Ray reads as part of a value; {} for any node."""
        selector = {key: condition.replace(" ", "") for key, condition in self.labels.items()}
        if not self.groups:
            return selector
        return {GROUP_LABEL: self.groups[0] if len(self.groups) == 1 else f"in({','.join(self.groups)})", **selector}


def matches(selector: Selector, labels: Mapping[str, str]) -> bool:
    """Return whether a node with these labels meets all conditions of the selector."""
    return all(_meets(labels.get(key), condition) for key, condition in selector.items())


def _meets(value: str | None, condition: str) -> bool:
    match = _CONDITION.fullmatch(condition)
    assert match is not None, condition
    negation, single, several = match[1], match[2], match[4]
    return (value in ([single] if single else several.split(","))) != bool(negation)


def is_spot(labels: Mapping[str, str]) -> bool:
    """Return whether a node with these labels is a spot node, which may be preempted at any time."""
    return labels.get(MARKET_LABEL) == SPOT


def failure_domain(labels: Mapping[str, str]) -> str:
    """Return the failure domain of a node with these labels; "" if no label names one."""
    return next((labels[name] for name in DOMAIN_LABELS if labels.get(name)), "")


def is_label(key: str) -> bool:
    """Return whether Ray accepts `key` as the name of a label, with or without a prefix and a slash."""
    parts = key.split("/")
    return len(parts) <= 2 and all(WORD.fullmatch(part) for part in parts)


def with_labels(selector: Selector) -> str:
    """Return a selector as text that follows "node": " with ray.io/node-group=data, team=a"; "" for any node."""
    return " with " + ", ".join(f"{key}={condition}" for key, condition in selector.items()) if selector else ""
