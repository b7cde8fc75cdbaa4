"""`tidewheel cluster ...`, `tidewheel job ...` and `tidewheel submit`: clusters and jobs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import cyclopts
from cyclopts import Parameter

from tidewheel.cluster import background
from tidewheel.cluster.background import DEFAULT_NAME, State
from tidewheel.commands.options import AsJson
from tidewheel.config import build
from tidewheel.console import console, print_table
from tidewheel.errors import ClusterError, ConfigError
from tidewheel.placement import PlacementConfig

cluster_app = cyclopts.App(name="cluster", help="A Ray cluster of several nodes on this machine, in the background.")
job_app = cyclopts.App(name="job", help="Jobs on a Ray cluster's job server: list, follow, stop.")

Name = Annotated[str, Parameter(help="Name of the cluster; several may run.")]
Server = Annotated[str | None, Parameter(
    name="--address", help="URL of the job server, http://head:8265. Default: RAY_API_SERVER_ADDRESS, then "
                           "the cluster of `tidewheel cluster up`.")]
JobId = Annotated[str, Parameter(help="Id of the job, as `tidewheel submit` printed it.")]
Groups = Annotated[list[str] | None, Parameter(
    name="--group", negative="", consume_multiple=False, help="A node group, NAME[:NODES[:CPUS]][,RESOURCE=AMOUNT]; "
    "may be repeated: data:2, gpu-spot:1:1,accelerator=1. A name that ends in `spot` is a spot group.")]
Labels = Annotated[list[str] | None, Parameter(
    negative="", consume_multiple=False, help="Label KEY=VALUE of every node; may be repeated.")]


@cluster_app.command
def up(
    *,
    nodes: Annotated[int, Parameter(help="Nodes of the group `data`, beside those of --group.")] = 0,
    cpus_per_node: Annotated[float, Parameter(help="CPUs that each node offers; the machine may have fewer.")] = 1,
    group: Groups = None,
    labels: Labels = None,
    head_cpus: Annotated[float, Parameter(help="CPUs of the head; with 0 it runs drivers only.")] = 0,
    object_store_mb: Annotated[int, Parameter(help="Shared memory of each node, MiB; at least 75.")] = 128,
    name: Name = DEFAULT_NAME,
) -> int:
    """Start a head and nodes in the background: real raylets on loopback that require a token."""
    from tidewheel.cluster.groups import Group, parse_group, parse_labels

    extra = parse_labels(labels or ())
    groups = [parse_group(text, cpus=cpus_per_node, labels=extra) for text in group or ()]
    if nodes or not groups:
        groups.insert(0, Group("data", nodes or 2, cpus_per_node, {}, extra))
    began = time.monotonic()
    state = background.up(groups, name=name, head_cpus=head_cpus, object_store_mb=object_store_mb)
    print(f"up after {time.monotonic() - began:.1f} s: Ray {state.address}, job server {state.dashboard_url}")
    _print_nodes(background.ask(state, "status"))
    suffix = "" if name == DEFAULT_NAME else f" --name {name}"
    print(f'use it: eval "$(tidewheel cluster env{suffix})"')
    return 0


@cluster_app.command
def status(*, name: Name = DEFAULT_NAME, as_json: AsJson = False) -> int:
    """Show node groups, nodes and jobs. Exit code 2 if no cluster is up."""
    state = _found(name)
    cluster_status = background.ask(state, "status")
    if as_json:
        print(json.dumps({"address": state.address, "dashboard_url": state.dashboard_url, **cluster_status}, indent=2))
        return 0
    print(f"{name}: Ray {state.address}, job server {state.dashboard_url}, up for "
          f"{time.time() - state.created:,.0f} s")
    _print_groups(cluster_status)
    _print_nodes(cluster_status)
    if cluster_status["jobs"]:
        print_table([{"job": job["id"], "status": job["status"].lower(), "seconds": f"{_seconds(job):,.0f}",
                      "command": job["entrypoint"][:90]} for job in cluster_status["jobs"][-10:]])
    return 0


@cluster_app.command
def add(
    group: Annotated[list[str], Parameter(help="NAME[:NODES[:CPUS]][,RESOURCE=AMOUNT], for example gpu-spot:1.")],
    *,
    labels: Labels = None,
    name: Name = DEFAULT_NAME,
) -> int:
    """Start more nodes."""
    from tidewheel.cluster.groups import parse_group, parse_labels

    state = _found(name)
    groups = [parse_group(text, labels=parse_labels(labels or ())) for text in group]  # check all before one starts
    for parsed in groups:
        for node_id in background.add(state, parsed):
            print(f"{node_id[:12]} joined, group {parsed.name}, {parsed.cpus:g} CPUs")
    return 0


@cluster_app.command
def drain(
    node: Annotated[str, Parameter(help="Start of a node's id, or a group's name for its newest node.")],
    *,
    notice: Annotated[float, Parameter(help="Seconds from the notice to the end of the node.")] = 30.0,
    name: Name = DEFAULT_NAME,
) -> int:
    """Drain a node as a spot reclaim does: announce it, and end the node when the notice is over."""
    state = _found(name)
    target = background.node_of(state, node)
    answer = background.ask(state, "drain", node_id=target["node_id"], notice_seconds=notice, reason="tidewheel drain")
    if not answer["accepted"]:
        raise ClusterError("Ray refuses to drain the node", where=target["node_id"][:12], fix="kill it instead")
    print(f"{target['node_id'][:12]} (group {target['group']}) is draining and ends in {notice:g} s")
    return 0


@cluster_app.command
def kill(
    node: Annotated[str, Parameter(help="Start of a node's id, or a group's name for its newest node.")],
    *,
    name: Name = DEFAULT_NAME,
) -> int:
    """SIGKILL a node's raylet and all its processes, as a power cut would."""
    state = _found(name)
    target = background.node_of(state, node)
    killed = background.ask(state, "kill", node_id=target["node_id"])["killed"]
    print(f"{target['node_id'][:12]} (group {target['group']}) is gone, with {len(killed)} processes")
    return 0


@cluster_app.command
def down(*, name: Name = DEFAULT_NAME) -> int:
    """Stop the cluster and remove its files. It is no error if no cluster is up."""
    state = background.find(name)
    if state is None:
        print(f"no cluster {name!r} is up")
    else:
        print(f"{name} is down, {background.down(state)} processes ended")
    return 0


@cluster_app.command
def env(*, name: Name = DEFAULT_NAME) -> int:
    """Print the environment with which `ray`, `tidewheel` and Python programs use the cluster: eval "$(...)"."""
    import shlex

    for key, value in _found(name).environment.items():
        print(f"export {key}={shlex.quote(value)}")
    return 0


def submit(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True, help="A job (prepare_data, train, evaluate, export, "
                                       "workflow), a YAML file or any command, with its options; best behind --.")],
    address: Server = None,
    working_dir: Annotated[str, Parameter(help="Folder of code to upload; '' for none.")] = ".",
    exclude: Annotated[list[str] | None, Parameter(negative="", consume_multiple=False, help="Also leave out files "
                       "that match, as in .gitignore; may be repeated.")] = None,
    include: Annotated[list[str] | None, Parameter(negative="", consume_multiple=False, help="Upload files that match "
                       "although they are ignored or may hold secrets; may be repeated.")] = None,
    env_var: Annotated[list[str] | None, Parameter(name="--env", negative="", consume_multiple=False, help="KEY=VALUE "
                       "for the job and its workers; may be repeated. Not for secrets: anyone who may list jobs sees "
                       "it.")] = None,
    job_id: Annotated[str, Parameter(name="--id", help="Id of the job; default: a new one.")] = "",
    driver: Annotated[list[str] | None, Parameter(negative="", consume_multiple=False, help="LABEL=CONDITION of the "
                      "node that the driver runs on, ray.io/market-type=!spot for one; may be repeated. Left out, it "
                      "is the head, which clusters keep off spot nodes.")] = None,
    wait: Annotated[bool, Parameter(help="Show the job's log until it ends, and exit with its code.")] = True,
    dry_run: Annotated[bool, Parameter(negative="", help="Show what would be uploaded and run, then stop.")] = False,
) -> int:
    """Run a job on a Ray cluster: upload the code, start the job, show its log and exit with its code.

    The command reconnects when the connection is lost. Ctrl-C leaves the job running; `tidewheel job stop` ends it
    after training has saved. The exit code is the job's own, or 143 if it was stopped.
    """
    from tidewheel.cluster.jobs import JobServer, Submission, command_of, server_address

    pairs = [text.partition("=") for text in env_var or ()]
    if wrong := [key for key, sep, _ in pairs if not sep or not key]:
        raise ConfigError(f"{wrong[0]!r} is not of the form KEY=VALUE", where="--env", fix="--env NAME=VALUE")
    submission = Submission(command_of(command, working_dir), working_dir, job_id,
                            {key: value for key, _, value in pairs},
                            exclude or (), include or (), labels=_selector(driver or ()),
                            metadata={"submitted_by": "tidewheel"})
    address = server_address(address)
    uploaded = submission.upload()
    if uploaded is not None:
        print_table(uploaded.rows(), to=console)
        console.print(uploaded.summary(), markup=False)
    console.print(f"command: {submission.command}", markup=False)
    if dry_run:
        if uploaded is not None and uploaded.secrets:
            console.print(uploaded.left_out(), markup=False)
        return 0
    server = JobServer(address)
    job = server.submit(submission)
    console.print(f"job {job} on {server.address}", markup=False)
    return _follow(server, job) if wait else 0


def _selector(texts: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    if wrong := [text for text, (key, sep, _) in zip(texts, pairs, strict=True) if not sep or not key]:
        raise ConfigError(f"{wrong[0]!r} is not of the form LABEL=CONDITION", where="--driver",
                          fix="--driver ray.io/market-type=!spot")
    values = {"labels": {key: condition for key, _, condition in pairs}}
    return build(PlacementConfig, values, where="--driver").selector


@job_app.command(name="list")
def job_list(*, address: Server = None, as_json: AsJson = False) -> int:
    """List submitted jobs, oldest first."""
    from tidewheel.cluster.jobs import JobServer

    rows = [{"id": job.submission_id, "status": str(job.status.value), "entrypoint": job.entrypoint,
             "started": (job.start_time or 0) / 1000, "ended": (job.end_time or 0) / 1000,
             "exit_code": job.driver_exit_code} for job in JobServer(address).jobs()]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print_table([{"job": row["id"], "status": row["status"].lower(), "exit code": row["exit_code"],
                      "seconds": f"{_seconds(row):,.0f}", "command": row["entrypoint"][:90]} for row in rows])
    return 0


@job_app.command(name="follow")
def job_follow(job: JobId, *, address: Server = None) -> int:
    """Show a job's log from its start to its end, and exit with its code."""
    from tidewheel.cluster.jobs import JobServer

    return _follow(JobServer(address), job)


@job_app.command(name="stop")
def job_stop(job: JobId, *, address: Server = None,
             wait: Annotated[bool, Parameter(help="Wait until the job has ended.")] = True) -> int:
    """Stop a job: SIGTERM, on which training saves and exits, then SIGKILL if that takes too long."""
    from tidewheel.cluster.jobs import ENDED, JobServer

    server = JobServer(address)
    if not server.stop(job):
        print(f"{job} had already ended: {server.info(job).status.value.lower()}")
        return 0
    while wait and server.info(job).status not in ENDED:
        time.sleep(0.5)
    print(f"{job}: {server.info(job).status.value.lower()}")
    return 0


def _follow(server: Any, job: str) -> int:
    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        code: int = server.follow(job, write)
    except KeyboardInterrupt:
        console.print(f"the job continues; `tidewheel job follow {job}` shows it again, `tidewheel job stop {job}` "
                      "ends it", markup=False)
        return 130
    info = server.info(job)
    console.print(f"job {job}: {info.status.value.lower()}, exit code {code}", markup=False)
    return code


def _found(name: str) -> State:
    state = background.find(name)
    if state is None:
        raise ClusterError(f"no cluster {name!r} is up", where="tidewheel cluster",
                           fix="`tidewheel cluster up --nodes 3` starts one")
    return state


def _seconds(job: dict[str, Any]) -> float:
    return (job["ended"] or time.time()) - job["started"] if job["started"] else 0.0


def _print_groups(cluster_status: dict[str, Any]) -> None:
    groups: dict[str, list[dict[str, Any]]] = {}
    for node in cluster_status["nodes"]:
        groups.setdefault(node["group"] or "-", []).append(node)
    print_table([{"group": name, "alive": sum(node["state"] == "alive" for node in nodes),
                  "draining": sum(node["state"] == "draining" for node in nodes),
                  "dead": sum(node["state"] == "dead" for node in nodes),
                  "CPUs": f"{sum(node['cpus'] for node in nodes if node['state'] != 'dead'):g}"}
                 for name, nodes in sorted(groups.items())])


def _print_nodes(cluster_status: dict[str, Any]) -> None:
    rows = []
    for node in sorted(cluster_status["nodes"], key=lambda node: (not node["head"], node["group"], node["node_id"])):
        left = node["seconds_left"]
        resources = ", ".join(f"{name} {amount:g}" for name, amount in sorted(node["resources"].items())
                              if not name.startswith("node:"))
        labels = ", ".join(f"{key}={value}" for key, value in sorted(node["labels"].items())
                           if not key.startswith("ray.io/"))
        rows.append({"node": node["node_id"][:12], "group": node["group"], "address": node["host"],
                     "CPUs": f"{node['cpus']:g}", "resources": resources or "-", "labels": labels or "-",
                     "state": node["state"] + (f", {left:.0f} s left" if left is not None else "")})
    print_table(rows)
