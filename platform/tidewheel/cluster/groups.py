"""Node groups of the clusters that Tidewheel starts: equal nodes with Ray's labels (`placement`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tidewheel.errors import ConfigError
from tidewheel.placement import GROUP_LABEL, MARKET_LABEL, ON_DEMAND, SPOT, WORD, is_label


@dataclass(frozen=True)
class Group:
    """Equal nodes: their name, number, CPUs, resources and further labels."""

    name: str
    nodes: int = 1
    cpus: float = 1.0
    resources: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def node_labels(self) -> dict[str, str]:
        """Labels that Ray gives each node."""
        market = SPOT if self.name.endswith(SPOT) else ON_DEMAND
        return {GROUP_LABEL: self.name, MARKET_LABEL: market, **self.labels}


def parse_group(text: str, *, cpus: float = 1.0, labels: dict[str, str] | None = None) -> Group:
    """Return the group that a text such as "gpu-spot:2:4,accelerator=8" describes.

    Args:
        text: NAME[:NODES[:CPUS]][,RESOURCE=AMOUNT...].
        cpus: CPUs of each node if the text has none.
        labels: further labels of each node.

    Raises:
        ConfigError: the text has another form.
    """
    head, *more = text.split(",")
    name, *numbers = head.split(":")
    fix = "NAME, NAME:NODES or NAME:NODES:CPUS, followed by ,RESOURCE=AMOUNT: --group gpu-spot:2:1,accelerator=1"
    if not WORD.fullmatch(name) or len(numbers) > 2:
        raise ConfigError(f"{text!r} is not a node group", where="--group", fix=fix)
    try:
        nodes = int(numbers[0]) if numbers else 1
        node_cpus = float(numbers[1]) if len(numbers) > 1 else cpus
        pairs = [part.partition("=") for part in more]
        resources = {key: float(amount) for key, _, amount in pairs}
    except ValueError:
        raise ConfigError(f"{text!r} is not a node group: a number is wrong", where="--group", fix=fix) from None
    if nodes < 0 or node_cpus < 0 or not all(key and amount > 0 for key, amount in resources.items()):
        raise ConfigError(f"{text!r}: numbers of nodes, CPUs and resources are positive", where="--group", fix=fix)
    return Group(name, nodes, node_cpus, resources, dict(labels or {}))


def parse_labels(texts: Sequence[str]) -> dict[str, str]:
    """Return the labels in texts of the form KEY=VALUE[,KEY=VALUE...].

    Raises:
        ConfigError: a key or value is missing, or breaks the syntax of Kubernetes labels, which Ray requires.
    """
    labels: dict[str, str] = {}
    for pair in (part for text in texts for part in text.split(",")):
        key, sep, value = pair.strip().partition("=")
        if not sep or not is_label(key) or not WORD.fullmatch(value):
            raise ConfigError(f"{pair!r} is not a label", where="--labels",
                              fix="KEY=VALUE, of letters, digits and _ . - (the key may have a prefix, team.org/key)")
        labels[key] = value
    return labels
