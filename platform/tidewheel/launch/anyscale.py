"""Render an Anyscale job: its compute configuration and a training run on the Ray cluster that Anyscale starts."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from tidewheel.launch import workers
from tidewheel.train.config import TrainConfig


@dataclass(frozen=True)
class Anyscale:
    """One job.

    Args:
        config: of the run.
        config_file: its file below the working folder, which is uploaded.
        overrides: settings on the command line, key=value.
        nodes: largest number of worker nodes.
        instance_type: of a worker node, "p5.48xlarge".
        head_type: instance type of the head, which runs the driver alone; "": Anyscale's default.
        cpus: CPUs of a worker node.
        gpus: GPUs of a worker node.
        spot: use spot machines, and on-demand ones where there are none.
        image: image URI; "": the workspace's default.
    """

    config: TrainConfig
    config_file: str
    nodes: int
    instance_type: str
    cpus: int
    gpus: int = 0
    overrides: tuple[str, ...] = ()
    head_type: str = ""
    spot: bool = False
    image: str = ""


def render(job: Anyscale) -> str:
    """Return the YAML of `anyscale job submit --config-file`.

    Raises:
        ConfigError: the nodes do not hold the run's workers.
    """
    workers.check(job.config, nodes=job.nodes, cpus=job.cpus, gpus=job.gpus)
    least = _nodes(job, job.config.elastic.min_workers)
    group = {"instance_type": job.instance_type, "min_nodes": least, "max_nodes": job.nodes,
             "market_type": "PREFER_SPOT" if job.spot else "ON_DEMAND"}
    head: dict[str, Any] = {"resources": {"CPU": 0, "GPU": 0}}  # drivers only
    if job.head_type:
        head = {"instance_type": job.head_type, **head}
    overrides = " ".join(f"--set {shlex.quote(text)}" for text in job.overrides)
    values: dict[str, Any] = {
        "name": job.config.run.id, "entrypoint": f"tidewheel train {shlex.quote(job.config_file)} {overrides}".strip(),
        "working_dir": ".", "compute_config": {"head_node": head, "worker_nodes": [group]},
        "max_retries": 5}  # a run resumes after its newest save
    if job.image:
        values["image_uri"] = job.image
    return ("# Written by `tidewheel anyscale render`. Start it: anyscale job submit --config-file THIS_FILE\n"
            + yaml.safe_dump(values, sort_keys=False, width=120))


def _nodes(job: Anyscale, number: int) -> int:
    """Return how many nodes `number` workers need."""
    elastic = job.config.elastic
    each = int(job.cpus // elastic.cpus_per_worker)
    if elastic.gpus_per_worker:
        each = min(each, int(job.gpus // elastic.gpus_per_worker))
    return -(-number // max(1, each))
