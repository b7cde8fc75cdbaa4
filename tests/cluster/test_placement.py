"""Labels place work, on a local cluster of three groups: data, gpu-on-demand and gpu-spot."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.unit.train.helpers import config, write_shards
from tidewheel import jsonlog
from tidewheel.cluster.groups import Group
from tidewheel.cluster.local import LocalCluster
from tidewheel.config import load
from tidewheel.data import pipeline
from tidewheel.data.config import PipelineConfig
from tidewheel.demo.corpus import build_corpus
from tidewheel.elastic.trainer import fit
from tidewheel.errors import ClusterError
from tidewheel.placement import GROUP_LABEL, MARKET_LABEL, matches
from tidewheel.storage import store
from tidewheel.train.audit import audit

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(nodes=0) as running:
        for name in ("gpu-spot", "data", "gpu-on-demand"):  # an order that favours none of the tests
            running.add_node(group=Group(name, cpus=1, resources={"accelerator": 1} if "gpu" in name else {}))
        ray.init(address=running.address, log_to_driver=False, logging_level="ERROR")
        yield running
        ray.shutdown()


def groups(key: str) -> dict[str, str]:
    """Return the group of each node by its id or its address."""
    return {row[key]: row["Labels"].get(GROUP_LABEL, "head") for row in ray.nodes()}


def test_ray_reads_selectors_as_we_do(cluster):
    """A node without a label matches a negated selector: the head has no labels."""
    rows = [row for row in ray.nodes() if row["Alive"]]
    for selector in ({MARKET_LABEL: "!spot"}, {GROUP_LABEL: "in(data,gpu-spot)"}, {GROUP_LABEL: "!in(data,gpu-spot)"},
                     {GROUP_LABEL: "gpu-on-demand", MARKET_LABEL: "!spot"}):
        results = set()
        for row in rows:
            strategy = NodeAffinitySchedulingStrategy(row["NodeID"], soft=False)
            task: Any = ray.remote(num_cpus=0, scheduling_strategy=strategy, label_selector=selector)(lambda: None)
            try:
                ray.get(task.remote(), timeout=600)
            except ray.exceptions.TaskUnschedulableError:
                continue
            results.add(row["NodeID"])
        assert results == {row["NodeID"] for row in rows if matches(selector, row["Labels"])}, selector


def test_a_pipeline_runs_on_the_nodes_of_its_group(cluster, tmp_path: Path):
    build_corpus(store(tmp_path / "raw"), max_bytes=300_000)
    recipe = load(PipelineConfig, "pipelines/demo.yaml", ["placement.groups=[data]"])
    assert pipeline.run(recipe, input=str(tmp_path / "raw"), output=str(tmp_path / "clean")).tokens
    where, group = defaultdict(set), groups("NodeManagerAddress")
    for event in ray.timeline():
        name = event["cat"].removeprefix("task::")
        if event["cat"] != name and "Actor" not in name and name != "<lambda>":  # not Ray's own or the other test's
            where[name].add(group[event["pid"]])
    assert any("Shuffle" in name for name in where), where  # Ray does not place these by itself
    assert set(map(tuple, where.values())) == {("data",)}, where
    with pytest.raises(ClusterError, match=r"no node with ray\.io/node-group=cpu has CPUs"):
        pipeline.run(load(PipelineConfig, "pipelines/demo.yaml", ["placement.groups=[cpu]"]),
                     input=str(tmp_path / "raw"), output=str(tmp_path / "nowhere"))


def test_a_training_runs_on_its_groups_and_rank_0_on_the_node_that_stays(cluster, tmp_path: Path):
    write_shards(tmp_path / "shards", rows=40)
    write_shards(tmp_path / "validation", shards=1, rows=11, seed=1)
    wanted = config(tmp_path, "placed", "steps=6", "elastic.max_workers=4", "evaluation.sample_tokens=0",
                    "elastic.placement.groups=[gpu-on-demand, gpu-spot]")
    assert fit(wanted).steps == 6
    group = {node_id[:12]: name for node_id, name in groups("NodeID").items()}
    ranks = {line["rank"]: group[line["node"]] for line in jsonlog.read(store(wanted.run_uri), "ledger.jsonl")}
    assert ranks == {0: "gpu-on-demand", 1: "gpu-spot"}
    assert audit(wanted.run_uri).ok
    with pytest.raises(ClusterError, match=r"0 node\(s\) with ray.io/node-group=tpu"):
        fit(config(tmp_path, "nowhere", "elastic.placement.groups=[tpu]"))
