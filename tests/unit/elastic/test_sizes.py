"""The numbers of workers that a run may have on the present cluster, decided before any of them starts."""

from typing import Any

import pytest

from tidewheel.elastic import nodes, trainer
from tidewheel.elastic.nodes import Node
from tidewheel.errors import ClusterError
from tidewheel.placement import GROUP_LABEL, matches
from tidewheel.train.config import TrainConfig


@pytest.fixture(autouse=True)
def _two_nodes_of_two_cpus(monkeypatch: pytest.MonkeyPatch):
    alive = [Node("a", "127.0.0.1", 1, {"CPU": 2.0, "accelerator": 1.0}, labels={GROUP_LABEL: "gpu"}),
             Node("b", "127.0.0.2", 1, {"CPU": 2.0})]
    monkeypatch.setattr(nodes, "usable", lambda selector: [node for node in alive if matches(selector, node.labels)])
    monkeypatch.setattr(trainer, "can_grow", lambda wait_seconds: False)


def sizes(max_workers: int, elastic: dict[str, Any] | None = None, **parallel: int) -> tuple[int, ...]:
    return trainer._sizes(TrainConfig.model_validate({
        "model": {"num_layers": 8, "num_heads": 8}, "parallel": parallel,
        "elastic": {"max_workers": max_workers, **(elastic or {})},
        "batch": {"virtual_ranks": 12, "micro_sequences": 1, "global_sequences": 96}}))


def test_a_mesh_is_the_unit_of_workers():
    assert sizes(16) == (1, 2, 3, 4, 6, 12)
    assert sizes(16, pipeline=2) == (2, 4, 6, 8, 12)
    assert sizes(16, replicate=2) == (2, 4, 6, 12)
    assert sizes(24, pipeline=2, replicate=2) == (4, 8, 12, 24)


def test_a_mesh_larger_than_the_cluster_is_refused():
    with pytest.raises(ClusterError, match=r"8 worker.* of 1 CPUs .*for a mesh of pipeline 8 do not fit.*room for 4"):
        sizes(16, pipeline=8)


def test_only_nodes_that_the_placement_asks_for_are_counted():
    assert sizes(4, {"placement": {"groups": ["gpu"]}}, pipeline=2) == (2, 4)
    with pytest.raises(ClusterError, match=r"1 node\(s\) with ray.io/node-group=gpu .*have room for 2") as caught:
        sizes(16, {"placement": {"groups": ["gpu"]}}, pipeline=4)
    assert "correct elastic.placement" in str(caught.value)


def test_custom_resources_count_like_cpus():
    assert sizes(4, {"resources_per_worker": {"accelerator": 0.5}}, pipeline=2) == (2, 4)
    with pytest.raises(ClusterError, match=r"1 CPUs and 1 accelerator each.*\(2 CPUs and 1 accelerator; 2 CPUs and 0"):
        sizes(4, {"resources_per_worker": {"accelerator": 1}}, pipeline=2)
    with pytest.raises(ValueError, match="cpus_per_worker"):
        sizes(4, {"resources_per_worker": {"CPU": 1}})
