"""Render an sbatch script: a Ray cluster over the nodes of a Slurm job, and a training run on it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tidewheel.errors import ConfigError
from tidewheel.launch import workers
from tidewheel.train.config import TrainConfig

TEMPLATE = Path(__file__).with_suffix(".sh")
PLAIN = re.compile(r"[\w./:=@%+,\[\]-]*")
"""Values that a shell and Slurm take as they are."""


@dataclass(frozen=True)
class Slurm:
    """One job.

    Args:
        config: of the run.
        nodes: number of nodes.
        cpus: CPUs of a node.
        gpus: GPUs of a node.
        time: time limit, as in sbatch.
        interface: network interface of the cluster; "": the address of the node's name.
        grace: seconds from the notice to the end of the job, for the save.
        state: folder that every node sees, for the job's files and Ray's token.
        setup: shell lines that prepare the environment.
        start: nodes: `ray start` on each. symmetric-run: `ray symmetric-run`, for nodes that the job has to itself: it
            ends with `ray stop`, which ends every Ray of the user on a node.
        options: further options of sbatch, {partition: gpu}.
    """

    config: TrainConfig
    nodes: int
    cpus: int
    gpus: int = 0
    time: str = ""
    interface: str = ""
    grace: int = 120
    state: str = "$SLURM_SUBMIT_DIR/.tidewheel-slurm"
    setup: Sequence[str] = ()
    start: Literal["nodes", "symmetric-run"] = "nodes"
    options: Mapping[str, str] = field(default_factory=dict)


def render(job: Slurm) -> str:
    """Return the sbatch script of a job.

    Raises:
        ConfigError: the nodes do not hold the run's workers, or an option has characters that a shell interprets.
    """
    workers.check(job.config, nodes=job.nodes, cpus=job.cpus, gpus=job.gpus)
    options = dict(job.options)
    if job.time:
        options["time"] = job.time
    if job.gpus:
        options["gpus-per-node"] = str(job.gpus)
    for name, value in {**options, "interface": job.interface, "state": job.state.replace("$SLURM_SUBMIT_DIR", ""),
                        "job-name": job.config.run.id}.items():
        if not PLAIN.fullmatch(value) or not re.fullmatch(r"[a-z][a-z-]*", name):
            raise ConfigError(f"{name}={value!r} has characters that a shell interprets",
                              where="tidewheel slurm render", fix="letters, digits and . / : = @ % + , [ ] - only")
    config = workers.text(job.config)
    if "TIDEWHEEL_RUN" in config:
        raise ConfigError("the configuration contains TIDEWHEEL_RUN, which ends it in the script", where="--config",
                          fix="choose another name")
    values = {
        "NAME": job.config.run.id, "NODES": str(job.nodes), "CPUS": str(job.cpus), "GPUS": str(job.gpus),
        "GRACE": str(job.grace), "STATE": job.state, "INTERFACE": job.interface, "CONFIG": config, "START": job.start,
        "OPTIONS": "".join(f"#SBATCH --{name}={value}\n" for name, value in sorted(options.items())),
        "SETUP": "".join(f"{line}\n" for line in job.setup),
    }
    return re.sub(r"@([A-Z]+)@", lambda match: values[match.group(1)], TEMPLATE.read_text())


def state_folder(path: str) -> str:
    """Return a folder's path for the script; relative ones are below the folder of the submission.

    Raises:
        ConfigError: the path has characters that a shell interprets.
    """
    if shlex.quote(path) != path:
        raise ConfigError(f"{path!r} has characters that a shell interprets", where="--state",
                          fix="choose a plain path")
    return path if path.startswith("/") else f"$SLURM_SUBMIT_DIR/{path}"
