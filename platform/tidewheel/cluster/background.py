"""A local cluster that stays: `tidewheel cluster up` starts it, later commands find it by a file and change it.

A keeper process holds the raylets (see `keeper`) and answers on a Unix socket in a folder of its own, which only this
user may enter. The state file says where that is. Everything the cluster writes is in the folder and the file; `down`
removes both, and a keeper that dies takes its raylets along.

The cluster asks its clients for a token, made for this cluster, in a file that only this user may read. `environment`
is what programs need to be let in.
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
from tidewheel.cluster.local import LOOPBACK, free_port, keeper_environment
from tidewheel.errors import ClusterError, ConfigError

logger = logging.getLogger(__name__)

START_SECONDS = 90.0
ANSWER_SECONDS = 120.0
DEFAULT_NAME = "local"


@dataclass(frozen=True)
class State:
    """What the state file holds; no secret."""

    name: str
    folder: str
    """Sockets, logs and the token."""
    keeper: int
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
        """Variables for a program that shall use this cluster."""
        return {"RAY_ADDRESS": self.address, "RAY_API_SERVER_ADDRESS": self.dashboard_url, "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": self.token_path}


def state_folder() -> Path:
    """Where state files are: $TIDEWHEEL_STATE, or tidewheel/clusters below $XDG_STATE_HOME (~/.local/state)."""
    if given := os.environ.get("TIDEWHEEL_STATE"):
        return Path(given)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "tidewheel/clusters"


def find(name: str = DEFAULT_NAME) -> State | None:
    """The cluster of this name if it is up. The file of one whose keeper has died is removed."""
    path = _path(name)
    try:
        state = State(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise ClusterError("this is not a state file of a cluster", where=str(path),
                           mend="remove the file; a cluster it told of ends with `kill` of its keeper") from None
    if _answers(state):
        return state
    shutil.rmtree(state.folder, ignore_errors=True)
    path.unlink(missing_ok=True)
    return None


def find_address(address: str) -> State | None:
    """The background cluster whose Ray address or dashboard this is."""
    folder = state_folder()
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        with contextlib.suppress(ClusterError):
            state = find(path.stem)
            if state is not None and address.rstrip("/") in (state.address, state.dashboard_url):
                return state
    return None


def show_token(address: str | None) -> None:
    """Let this process into the background cluster at `address` (any, by default the one named DEFAULT_NAME), unless
    its environment says how it authenticates. Before Ray is imported: it reads the variables once."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    state = find() if address is None else find_address(address)
    if state is not None:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=state.token_path)


def up(groups: Sequence[Group], *, name: str = DEFAULT_NAME, head_cpus: float = 0, object_store_mb: int = 128) -> State:
    """Start a head and the nodes of `groups` in the background; returns when all are in the cluster's table.

    Raises:
        ClusterError: one of this name is up, or Ray's processes do not start.
    """
    if find(name) is not None:
        raise ClusterError(f"the cluster {name!r} is up already", where=str(_path(name)),
                           mend="`tidewheel cluster down` ends it, `add` gives it nodes, --name makes a second one")
    folder = f"/tmp/tw-{uuid.uuid4().hex[:8]}"  # short: it is in the names of Unix sockets (107 bytes)
    os.makedirs(folder, mode=0o700)
    with open(os.open(f"{folder}/token", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as token:
        token.write(secrets.token_hex(32))
    environment = {**keeper_environment(), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{folder}/token"}
    environment.pop("RAY_AUTH_TOKEN", None)  # it would win over the file
    with open(f"{folder}/keeper.log", "ab") as log:
        keeper = subprocess.Popen([sys.executable, "-m", "tidewheel.cluster.background", folder], env=environment,
                                  stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True)
    port = free_port()
    state = State(name, folder, keeper.pid, "", f"http://{LOOPBACK}:{port}", time.time())
    store_bytes = object_store_mb << 20
    try:
        _wait_for_socket(state, keeper)
        head = ask(state, "start", cpus=head_cpus, object_store_bytes=store_bytes, dashboard_port=port,
                   labels=Group("head").node_labels)
        state = State(**{**asdict(state), "address": head["address"]})
        for group in groups:
            add(state, group, object_store_mb=object_store_mb)
        _write(state)
        logger.info("cluster %s is up at %s", name, state.address)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(keeper.pid, signal.SIGTERM)
        keeper.wait(30)
        if not Path(f"{folder}-logs").exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return state


def add(state: State, group: Group, *, object_store_mb: int = 128) -> list[str]:
    """Start the group's nodes; their ids."""
    return [ask(state, "add", cpus=group.cpus, object_store_bytes=object_store_mb << 20, labels=group.node_labels,
                resources=group.resources)["node_id"] for _ in range(group.nodes)]


def down(state: State) -> int:
    """End every process of the cluster and remove its folder and state file; the number of processes."""
    try:
        killed = len(ask(state, "stop")["killed"])
    finally:
        until = time.monotonic() + 10
        while (_answers(state) or _lives(state.keeper)) and time.monotonic() < until:
            time.sleep(0.05)
        shutil.rmtree(state.folder, ignore_errors=True)
        _path(state.name).unlink(missing_ok=True)
    return killed + 1


def node_of(state: State, prefix: str) -> dict[str, Any]:
    """The one worker node whose id begins with `prefix`, or all of whose group's name it is, the newest.

    Raises:
        ConfigError: none, or several.
    """
    nodes = [node for node in ask(state, "status")["nodes"] if node["state"] != "dead" and not node["head"]]
    found = [node for node in nodes if node["node_id"].startswith(prefix)] if prefix else []
    found = found or [node for node in nodes if node["group"] == prefix][-1:]
    if len(found) != 1:
        raise ConfigError(f"{len(found) or 'no'} worker nodes begin with {prefix!r}", where="cluster",
                          mend="`tidewheel cluster status` lists the ids; a group's name means its newest node")
    return found[0]


def ask(state: State, what: str, **arguments: Any) -> dict[str, Any]:
    """One request to the keeper and its answer.

    Raises:
        ClusterError: the keeper is gone, or could not do it.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(f"{state.folder}/keeper.sock")
            connection.sendall((json.dumps({"do": what, **arguments}) + "\n").encode())
            with connection.makefile() as answers:
                line = answers.readline()
    except OSError as error:
        raise ClusterError(f"its keeper does not answer ({error})", where=state.folder,
                           mend="`tidewheel cluster up` starts a new cluster") from None
    answer: dict[str, Any] = json.loads(line) if line else {"error": "the keeper ended"}
    if "error" in answer:
        kept = f"{state.folder}-logs"
        with contextlib.suppress(OSError):
            shutil.copytree(f"{state.folder}", kept, dirs_exist_ok=True, ignore=lambda folder, names: [
                name for name in names if not Path(folder, name).is_dir() and not name.endswith((".log", ".err"))])
        raise ClusterError(f"could not {what}: {answer['error']}", where=kept,
                           mend="see the logs there; free memory and space in /tmp, then try again")
    return answer["ok"]


def _path(name: str) -> Path:
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"{name!r} is no name for a cluster", where="--name", mend="letters, digits, - and _")
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
            connection.connect(f"{state.folder}/keeper.sock")
        return True
    except OSError:
        return False


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_for_socket(state: State, keeper: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_SECONDS
    while not _answers(state):
        if keeper.poll() is not None or time.monotonic() > until:
            raise ClusterError("the keeper process did not start", where=f"{state.folder}/keeper.log",
                               mend="see its log; free memory and space in /tmp, then try again")
        time.sleep(0.05)


def main() -> None:
    """The keeper process: serve requests on the folder's socket until `stop` or SIGTERM, then end the cluster."""
    from tidewheel.cluster.keeper import BackgroundKeeper

    folder = sys.argv[1]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    keeper = BackgroundKeeper(f"{folder}/ray")  # Ray opens its folder to everyone; ours stays closed
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{folder}/keeper.sock")  # nobody else gets through the folder, whose mode is 0700
            server.listen(8)
            import ray  # noqa: F401  while the one who started us connects

            while not keeper.stopped:
                connection, _ = server.accept()
                with connection, connection.makefile("rw") as stream:
                    if line := stream.readline():
                        with contextlib.suppress(OSError):  # the one who asked is gone
                            stream.write(json.dumps(keeper.answer(json.loads(line))) + "\n")
                            stream.flush()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not keeper.stopped:
            keeper.stop()


if __name__ == "__main__":
    main()
