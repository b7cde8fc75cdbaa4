"""Node groups: what kind of machine a node is, told by Ray's own labels, on every kind of cluster.

A group's nodes carry `ray.io/node-group` (KubeRay sets it to the worker group's name) and `ray.io/market-type` (spot or
on-demand). Placement asks for labels, so the same configuration means the same on a laptop and on Kubernetes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidewheel.errors import ConfigError

GROUP_LABEL = "ray.io/node-group"
MARKET_LABEL = "ray.io/market-type"
SPOT, ON_DEMAND = "spot", "on-demand"
#: A selector that keeps what must not be lost, drivers for one, off spot nodes. Nodes without the label match too.
NOT_SPOT = {MARKET_LABEL: f"!{SPOT}"}

_WORD = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Group:
    """Equal nodes: a name, how many, what each offers, and further labels."""

    name: str
    nodes: int = 1
    cpus: float = 1.0
    resources: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def node_labels(self) -> dict[str, str]:
        """What Ray is told about each node."""
        market = SPOT if self.name.endswith(SPOT) else ON_DEMAND
        return {GROUP_LABEL: self.name, MARKET_LABEL: market, **self.labels}


def parse_group(text: str, *, cpus: float = 1.0, labels: dict[str, str] | None = None) -> Group:
    """A group from NAME[:NODES[:CPUS]][,RESOURCE=AMOUNT...], for example "gpu-spot:2:4,accelerator=8".

    Args:
        cpus: of each node, where the text does not say.
        labels: further labels of each node.

    Raises:
        ConfigError: it is not of that form.
    """
    head, *more = text.split(",")
    name, *numbers = head.split(":")
    mend = "NAME, NAME:NODES or NAME:NODES:CPUS, and behind it ,RESOURCE=AMOUNT: --group gpu-spot:2:1,accelerator=1"
    if not _WORD.fullmatch(name) or len(numbers) > 2:
        raise ConfigError(f"{text!r} is not a node group", where="--group", mend=mend)
    try:
        nodes = int(numbers[0]) if numbers else 1
        each = float(numbers[1]) if len(numbers) > 1 else cpus
        pairs = [part.partition("=") for part in more]
        resources = {key: float(amount) for key, _, amount in pairs}
    except ValueError:
        raise ConfigError(f"{text!r} is not a node group: a number is wrong", where="--group", mend=mend) from None
    if nodes < 0 or each < 0 or not all(key and amount > 0 for key, amount in resources.items()):
        raise ConfigError(f"{text!r}: numbers of nodes, CPUs and resources are positive", where="--group", mend=mend)
    return Group(name, nodes, each, resources, dict(labels or {}))


def parse_labels(texts: Sequence[str]) -> dict[str, str]:
    """Labels from KEY=VALUE texts, several of them in one with commas between.

    Raises:
        ConfigError: no key or value, or one that Ray does not take (the syntax of Kubernetes labels).
    """
    labels: dict[str, str] = {}
    for pair in (part for text in texts for part in text.split(",")):
        key, sep, value = pair.strip().partition("=")
        parts = key.split("/")
        if not sep or len(parts) > 2 or not all(_WORD.fullmatch(part) for part in [*parts, value]):
            raise ConfigError(f"{pair!r} is not a label", where="--labels",
                              mend="KEY=VALUE, of letters, digits and _ . - (the key may have a prefix, team.org/key)")
        labels[key] = value
    return labels
