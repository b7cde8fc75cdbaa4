"""A local cluster that outlives the command: `tidewheel cluster up` starts it, later commands find it by a file.

A supervisor process holds the raylets (see `supervisor`) and answers on a Unix socket in a folder that only this user
may enter. The state file names the folder. The cluster writes nothing outside the folder and the file; `down` removes
both, and the raylets die with the supervisor.

Clients of the cluster show its token, which is in a file that only this user may read. `State.environment` holds the
variables with which a program finds and shows it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tidewheel.cluster.groups import Group
from tidewheel.cluster.local import LOOPBACK, free_port, supervisor_environment
from tidewheel.errors import ClusterError, ConfigError

logger = logging.getLogger(__name__)

START_SECONDS = 90.0
ANSWER_SECONDS = 120.0
DEFAULT_NAME = "local"


@dataclass(frozen=True)
class State:
    """Content of the state file, which holds no secret."""

    name: str
    folder: str
    """Sockets, logs and the token."""
    supervisor: int
    """Process id."""
    address: str
    """"127.0.0.2:PORT", for `ray.init` and --address."""
    dashboard_url: str
    """"http://127.0.0.1:PORT", of the job server."""
    created: float
    """Unix time."""

    @property
    def token_path(self) -> str:
        """The file with the cluster's token."""
        return f"{self.folder}/token"

    @property
    def environment(self) -> dict[str, str]:
        """Variables for a program that uses this cluster."""
        return {"RAY_ADDRESS": self.address, "RAY_API_SERVER_ADDRESS": self.dashboard_url, "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": self.token_path}


def state_folder() -> Path:
    """Return the folder of state files: $TIDEWHEEL_STATE, or $XDG_STATE_HOME/tidewheel/clusters (~/.local/state)."""
    if given := os.environ.get("TIDEWHEEL_STATE"):
        return Path(given)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "tidewheel/clusters"


def find(name: str = DEFAULT_NAME) -> State | None:
    """Return the cluster of this name, or None if it is not up; remove the file if its supervisor has died.

    Raises:
        ClusterError: the state file is damaged.
    """
    path = _path(name)
    try:
        state = _state(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise ClusterError("this is not a state file of a cluster", where=str(path),
                           fix="remove the file, and end its supervisor with `kill`") from None
    if _answers(state):
        return state
    shutil.rmtree(state.folder, ignore_errors=True)
    path.unlink(missing_ok=True)
    return None


def find_address(address: str) -> State | None:
    """Return the background cluster that has this Ray address or dashboard."""
    folder = state_folder()
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        with contextlib.suppress(ClusterError):
            state = find(path.stem)
            if state is not None and address.rstrip("/") in (state.address, state.dashboard_url):
                return state
    return None


def show_token(address: str | None) -> None:
    """Give this process the token of a background cluster, unless its environment says how it authenticates.

    Call it before Ray is imported, which reads the variables once.

    Args:
        address: Ray address or dashboard of the cluster; None for the one named DEFAULT_NAME.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return
    state = find() if address is None else find_address(address)
    if state is not None:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=state.token_path)


def up(groups: Sequence[Group], *, name: str = DEFAULT_NAME, head_cpus: float = 0, object_store_mb: int = 128) -> State:
    """Start a head and the nodes of `groups` in the background; return when the cluster's table has them all.

    Args:
        groups: groups of worker nodes.
        name: name of the cluster.
        head_cpus: CPUs that the head offers; 0 keeps tasks and training off it.
        object_store_mb: shared memory of each node, in MiB.

    Raises:
        ClusterError: a cluster of this name is up, or Ray's processes do not start.
    """
    if find(name) is not None:
        raise ClusterError(f"the cluster {name!r} is up already", where=str(_path(name)),
                           fix="`tidewheel cluster down` ends it, `add` gives it nodes, --name makes a second one")
    folder = f"/tmp/tw-{uuid.uuid4().hex[:8]}"  # short: it is in the names of Unix sockets (107 bytes)
    os.makedirs(folder, mode=0o700)
    with open(os.open(f"{folder}/token", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as token:
        token.write(secrets.token_hex(32))
    environment = {**supervisor_environment(), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{folder}/token"}
    environment.pop("RAY_AUTH_TOKEN", None)  # it would take precedence over the file
    with open(f"{folder}/supervisor.log", "ab") as log:
        supervisor = subprocess.Popen([sys.executable, "-m", "tidewheel.cluster.background", folder], env=environment,
                                  stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True)
    port = free_port()
    state = State(name, folder, supervisor.pid, "", f"http://{LOOPBACK}:{port}", time.time())
    store_bytes = object_store_mb << 20
    try:
        _wait_for_socket(state, supervisor)
        head = ask(state, "start", cpus=head_cpus, object_store_bytes=store_bytes, dashboard_port=port,
                   labels=Group("head").node_labels)
        state = State(**{**asdict(state), "address": head["address"]})
        for group in groups:
            add(state, group, object_store_mb=object_store_mb)
        _write(state)
        logger.info("cluster %s is up at %s", name, state.address)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor.pid, signal.SIGTERM)
        supervisor.wait(30)
        if not Path(f"{folder}-logs").exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return state


def add(state: State, group: Group, *, object_store_mb: int = 128) -> list[str]:
    """Start the nodes of a group; return their ids.

    Args:
        state: the cluster.
        group: number of nodes, and what each offers.
        object_store_mb: shared memory of each node, in MiB.

    Raises:
        ClusterError: the supervisor is gone, or Ray's processes do not start.
    """
    return [ask(state, "add", cpus=group.cpus, object_store_bytes=object_store_mb << 20, labels=group.node_labels,
                resources=group.resources)["node_id"] for _ in range(group.nodes)]


def down(state: State) -> int:
    """End every process of the cluster and remove its folder and state file; return the number of processes."""
    try:
        killed = len(ask(state, "stop")["killed"])
    finally:
        until = time.monotonic() + 10
        while (_answers(state) or _lives(state.supervisor)) and time.monotonic() < until:
            time.sleep(0.05)
        shutil.rmtree(state.folder, ignore_errors=True)
        _path(state.name).unlink(missing_ok=True)
    return killed + 1


def node_of(state: State, prefix: str) -> dict[str, Any]:
    """Return the worker node whose id begins with `prefix`, or the newest node of the group named `prefix`.

    Raises:
        ConfigError: no node or several match.
    """
    nodes = [node for node in ask(state, "status")["nodes"] if node["state"] != "dead" and not node["head"]]
    matches = [node for node in nodes if node["node_id"].startswith(prefix)] if prefix else []
    matches = matches or [node for node in nodes if node["group"] == prefix][-1:]
    if len(matches) != 1:
        raise ConfigError(f"{len(matches) or 'no'} worker nodes begin with {prefix!r}", where="cluster",
                          fix="`tidewheel cluster status` lists the ids; a group's name means its newest node")
    return matches[0]


def ask(state: State, what: str, **arguments: Any) -> dict[str, Any]:
    """Send one request to the supervisor and return its result.

    Args:
        state: the cluster.
        what: name of a method of `supervisor.BackgroundSupervisor`.
        arguments: its arguments.

    Raises:
        ClusterError: the supervisor is gone, or the request failed.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(f"{state.folder}/supervisor.sock")
            connection.sendall((json.dumps({"do": what, **arguments}) + "\n").encode())
            with connection.makefile() as answers:
                line = answers.readline()
    except OSError as error:
        raise ClusterError(f"its supervisor does not answer ({error})", where=state.folder,
                           fix="`tidewheel cluster up` starts a new cluster") from None
    answer: dict[str, Any] = json.loads(line) if line else {"error": "the supervisor ended"}
    if "error" in answer:
        kept = f"{state.folder}-logs"
        with contextlib.suppress(OSError):
            shutil.copytree(f"{state.folder}", kept, dirs_exist_ok=True, ignore=lambda folder, names: [
                name for name in names if not Path(folder, name).is_dir() and not name.endswith((".log", ".err"))])
        raise ClusterError(f"could not {what}: {answer['error']}", where=kept,
                           fix="see the logs there; free memory and space in /tmp, then try again")
    return answer["ok"]


def _state(values: dict[str, Any]) -> State:
    """Return the state in a state file, also in one that an older release wrote."""
    if "keeper" in values:
        values["supervisor"] = values.pop("keeper")
    return State(**values)


def _path(name: str) -> Path:
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"{name!r} is no name for a cluster", where="--name", fix="letters, digits, - and _")
    return state_folder() / f"{name}.json"


def _write(state: State) -> None:
    path = _path(state.name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(asdict(state), indent=1) + "\n")
    os.replace(temporary, path)


def _answers(state: State) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(f"{state.folder}/supervisor.sock")
        return True
    except OSError:
        return False


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_for_socket(state: State, supervisor: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_SECONDS
    while not _answers(state):
        if supervisor.poll() is not None or time.monotonic() > until:
            raise ClusterError("the supervisor process did not start", where=f"{state.folder}/supervisor.log",
                               fix="see its log; free memory and space in /tmp, then try again")
        time.sleep(0.05)


def main() -> None:
    """Run the supervisor: serve requests on the folder's socket until `stop` or SIGTERM, then end the cluster."""
    from tidewheel.cluster.supervisor import BackgroundSupervisor

    folder = sys.argv[1]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    supervisor = BackgroundSupervisor(f"{folder}/ray")  # Ray's folder is open to everyone; ours is not
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{folder}/supervisor.sock")  # the folder's mode is 0700
            server.listen(8)
            import ray  # noqa: F401  while the client connects

            while not supervisor.stopped:
                connection, _ = server.accept()
                with connection, connection.makefile("rw") as stream:
                    if line := stream.readline():
                        with contextlib.suppress(OSError):  # the client is gone
                            stream.write(json.dumps(supervisor.answer(json.loads(line))) + "\n")
                            stream.flush()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not supervisor.stopped:
            supervisor.stop()


if __name__ == "__main__":
    main()
