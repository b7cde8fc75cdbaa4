"""How many workers a run may have on the cluster there is: said before any of them starts."""

import pytest

from tidewheel.elastic import nodes, trainer
from tidewheel.elastic.nodes import Node
from tidewheel.errors import ClusterError
from tidewheel.train.config import TrainConfig


@pytest.fixture(autouse=True)
def _two_nodes_of_two_cpus(monkeypatch: pytest.MonkeyPatch):
    there = [Node("a", "127.0.0.1", 1, 2.0, 0.0), Node("b", "127.0.0.2", 1, 2.0, 0.0)]
    monkeypatch.setattr(nodes, "usable", lambda: there)
    monkeypatch.setattr(nodes, "can_grow", lambda: False)


def sizes(most: int, **parallel: int) -> tuple[int, ...]:
    return trainer._sizes(TrainConfig.model_validate({
        "model": {"num_layers": 8, "num_heads": 8}, "elastic": {"max_workers": most}, "parallel": parallel,
        "batch": {"virtual_ranks": 12, "micro_sequences": 1, "global_sequences": 96}}))


def test_a_mesh_is_the_unit_of_workers():
    assert sizes(16) == (1, 2, 3, 4, 6, 12)
    assert sizes(16, pipeline=2) == (2, 4, 6, 8, 12)
    assert sizes(16, replicate=2) == (2, 4, 6, 12)
    assert sizes(24, pipeline=2, replicate=2) == (4, 8, 12, 24)


def test_a_mesh_larger_than_the_cluster_is_refused():
    with pytest.raises(ClusterError, match=r"8 worker.* of 1 CPUs .*for a mesh of pipeline 8 do not fit.*room for 4"):
        sizes(16, pipeline=8)
