"""`tidewheel slurm|sky|anyscale render`: job files that start a Ray cluster and a training run on it."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import cyclopts
from cyclopts import Parameter

from tidewheel.commands.options import Overrides

slurm_app = cyclopts.App(name="slurm", help="Job files for Slurm.")
sky_app = cyclopts.App(name="sky", help="Job files for SkyPilot.")
anyscale_app = cyclopts.App(name="anyscale", help="Job files for Anyscale.")

Config = Annotated[str, Parameter(help="Configuration of the training run; goes into the job file, with --set.")]
Nodes = Annotated[int, Parameter(help="Nodes.")]
Output = Annotated[str, Parameter(help="File to write; default: standard output.")]
Setup = Annotated[list[str] | None, Parameter(negative="", consume_multiple=False, help="A shell line that prepares a "
                                              "node, such as 'source .venv/bin/activate'. May be repeated.")]


@slurm_app.command(name="render")
def slurm_render(
    config: Config,
    *,
    nodes: Nodes,
    cpus_per_node: Annotated[int, Parameter(help="CPUs of a node for the job.")],
    gpus_per_node: Annotated[int, Parameter(help="GPUs of a node for the job.")] = 0,
    time: Annotated[str, Parameter(help="Time limit as in sbatch: 1-00:00:00.")] = "",
    interface: Annotated[str, Parameter(help="Network interface of the cluster, such as ib0; default: the address of "
                                             "the node's name. One node uses loopback.")] = "",
    grace: Annotated[int, Parameter(help="Seconds before the time limit at which the run saves and stops.")] = 120,
    option: Annotated[list[str] | None, Parameter(negative="", consume_multiple=False, help="A further option of "
                                                  "sbatch, partition=gpu. May be repeated.")] = None,
    setup: Setup = None,
    state: Annotated[str, Parameter(help="Folder that every node sees, for the job's files and Ray's token; relative "
                                         "to the folder of the submission.")] = ".tidewheel-slurm",
    start: Annotated[Literal["nodes", "symmetric-run"], Parameter(
        help="nodes: `ray start` on each node. symmetric-run: `ray symmetric-run`, where the job has its nodes to "
             "itself.")] = "nodes",
    set_: Overrides = None,
    output: Output = "",
) -> int:
    """Write an sbatch script: a Ray cluster over the nodes of the job, and the run on it.

    The script exits with the run's exit code. A job that Slurm preempts or that reaches its time limit saves, is
    requeued and resumes.
    """
    from tidewheel.config import load
    from tidewheel.launch import slurm
    from tidewheel.train.config import TrainConfig

    options = {name: value for name, _, value in (text.partition("=") for text in option or ())}
    job = slurm.Slurm(load(TrainConfig, config, set_ or ()), nodes=nodes, cpus=cpus_per_node, gpus=gpus_per_node,
                      time=time, interface=interface, grace=grace, state=slurm.state_folder(state),
                      setup=tuple(setup or ()), start=start, options=options)
    return _write(slurm.render(job), output)


@sky_app.command(name="render")
def sky_render(
    config: Config,
    *,
    nodes: Nodes,
    accelerators: Annotated[str, Parameter(help="GPUs of a node as SkyPilot names them: H100:8.")] = "",
    cpus_per_node: Annotated[str, Parameter(help="CPUs of a node: 8, or 8+ for at least 8.")] = "",
    spot: Annotated[bool, Parameter(negative="", help="Use spot machines.")] = False,
    infra: Annotated[str, Parameter(help="Cloud and region: aws/us-east-1; default: SkyPilot chooses.")] = "",
    image: Annotated[str, Parameter(help="Container image with Tidewheel; default: --setup installs it.")] = "",
    setup: Setup = None,
    set_: Overrides = None,
    output: Output = "",
) -> int:
    """Write a SkyPilot task: a Ray cluster over its nodes on the private network, and the run on it."""
    from tidewheel.config import load
    from tidewheel.launch import sky
    from tidewheel.train.config import TrainConfig

    task = sky.Sky(load(TrainConfig, config, set_ or ()), nodes=nodes, accelerators=accelerators, cpus=cpus_per_node,
                   spot=spot, infra=infra, image=image, setup=tuple(setup or ()))
    return _write(sky.render(task), output)


@anyscale_app.command(name="render")
def anyscale_render(
    config: Annotated[str, Parameter(help="Configuration of the training run, below this folder, which is uploaded.")],
    *,
    nodes: Annotated[int, Parameter(help="Largest number of worker nodes.")],
    instance_type: Annotated[str, Parameter(help="Instance type of a worker node.")],
    cpus_per_node: Annotated[int, Parameter(help="CPUs of a worker node.")],
    gpus_per_node: Annotated[int, Parameter(help="GPUs of a worker node.")] = 0,
    head_type: Annotated[str, Parameter(help="Instance type of the head; default: Anyscale's.")] = "",
    spot: Annotated[bool, Parameter(negative="", help="Use spot machines where there are any.")] = False,
    image: Annotated[str, Parameter(help="Image URI; default: Anyscale's.")] = "",
    set_: Overrides = None,
    output: Output = "",
) -> int:
    """Write an Anyscale job: its nodes, and the run on the Ray cluster that Anyscale starts."""
    from tidewheel.config import load
    from tidewheel.launch import anyscale
    from tidewheel.train.config import TrainConfig

    job = anyscale.Anyscale(load(TrainConfig, config, set_ or ()), config, nodes=nodes, instance_type=instance_type,
                            cpus=cpus_per_node, gpus=gpus_per_node, overrides=tuple(set_ or ()), head_type=head_type,
                            spot=spot, image=image)
    return _write(anyscale.render(job), output)


def _write(text: str, output: str) -> int:
    if not output:
        sys.stdout.write(text)
        return 0
    from tidewheel.storage import split

    folder, name = split(output)
    folder.write(name, text.encode())
    print(f"job file: {output}")
    return 0
