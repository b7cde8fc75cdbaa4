"""Node groups and labels as users write them."""

from __future__ import annotations

import pytest

from tidewheel.cluster.groups import Group, parse_group, parse_labels
from tidewheel.errors import ConfigError
from tidewheel.placement import GROUP_LABEL, MARKET_LABEL


@pytest.mark.parametrize(("text", "group"), [
    ("data", Group("data", 1, 2.0)),
    ("data:3", Group("data", 3, 2.0)),
    ("gpu-spot:0:0.5", Group("gpu-spot", 0, 0.5)),
    ("gpu-spot:1:4,accelerator=8,nic=1", Group("gpu-spot", 1, 4.0, {"accelerator": 8, "nic": 1})),
])
def test_a_group_is_parsed(text, group):
    assert parse_group(text, cpus=2) == group


@pytest.mark.parametrize("text", ["", ":3", "data:x", "data:1:2:3", "data:-1", "a b", "data:1,accelerator",
                                  "data:1,accelerator=0", "data,=1"])
def test_invalid_groups_are_refused(text):
    with pytest.raises(ConfigError, match="fix: NAME"):
        parse_group(text)


def test_a_group_gives_its_nodes_their_labels():
    assert parse_group("gpu-spot").node_labels == {GROUP_LABEL: "gpu-spot", MARKET_LABEL: "spot"}
    assert parse_group("gpu", labels={"team": "a"}).node_labels[MARKET_LABEL] == "on-demand"
    assert parse_group("gpu", labels={"team": "a"}).node_labels["team"] == "a"


def test_labels_are_parsed_and_invalid_ones_refused():
    assert parse_labels(["a=1,b.c/d=x-y", "e=f"]) == {"a": "1", "b.c/d": "x-y", "e": "f"}
    for wrong in ("a", "=b", "a=", "a b=c", "a/b/c=d", "a=b=c"):
        with pytest.raises(ConfigError, match="not a label"):
            parse_labels([wrong])
