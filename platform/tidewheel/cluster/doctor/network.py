"""Check the ports of this machine, proxies, and the address and token of a Ray cluster."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from tidewheel.cluster.doctor.check import Check

RAY_PORTS = {6379: "GCS", 8265: "dashboard and job server", 10001: "client server"}
"""Ports of a head that `ray start --head` starts."""
LEAST_PORTS = 5_000
"""Free ports that a large job needs: gloo and NCCL open one or more sockets to every peer."""
LOCAL = ("127.0.0.1", "localhost", "[::1]")


def loopback() -> Check:
    """Check that processes of this machine can connect to each other."""
    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.settimeout(2)
            client.connect(server.getsockname())
    except OSError as error:
        return Check("loopback", "failure", f"cannot open a port on 127.0.0.1 ({error.strerror})",
                     "allow loopback connections: Ray's processes use them")
    return Check("loopback", "ok", "ports can be opened on 127.0.0.1")


def proxy() -> Iterator[Check]:
    """Warn of a proxy that also receives requests to this machine."""
    names = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if os.environ.get(name)]
    if names:
        spared = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        if not {"127.0.0.1", "localhost", "*"} & {part.strip() for part in spared.split(",")}:
            yield Check("proxy", "warning", f"{names[0]} is set, and NO_PROXY does not exclude this machine",
                        "export NO_PROXY=127.0.0.1,localhost")


def ray_address() -> Iterator[Check]:
    """Check that RAY_ADDRESS answers; a stale one is the most common reason why Ray does not start."""
    address = os.environ.get("RAY_ADDRESS", "")
    if not address or address == "local":
        yield Check("RAY_ADDRESS", "ok", "not set: a private cluster is started when one is needed")
    elif address == "auto":
        yield Check("RAY_ADDRESS", "ok", "auto: commands join the cluster that runs on this machine")
    elif _answers(address):
        yield Check("RAY_ADDRESS", "ok", f"{address} answers: commands run on that cluster")
    else:
        yield Check("RAY_ADDRESS", "failure", f"nothing answers at {address}",
                    "unset RAY_ADDRESS, or start the cluster it names")


def _answers(address: str) -> bool:
    host, _, port = address.partition("://")[2].partition("/")[0].rpartition(":") if "://" in address else (
        address.rpartition(":"))
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.5).close()
    except (OSError, ValueError):
        return False
    return True


def ports() -> Iterator[Check]:
    """Check that Ray's usual ports are free for a head, and that enough ports are left for a job's sockets."""
    busy = [f"{port} ({what})" for port, what in RAY_PORTS.items() if _in_use(port)]
    if busy and not os.environ.get("RAY_ADDRESS"):
        yield Check("ports", "warning", f"in use: {', '.join(busy)}: a Ray head, or another program",
                    "join that cluster with --address auto; or `ray start --head --port=PORT --dashboard-port=PORT`")
    else:
        yield Check("ports", "ok", f"in use: {', '.join(busy)}" if busy else
                    f"{', '.join(map(str, RAY_PORTS))} are free")
    try:
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return  # not Linux: nothing to read it from
    if last - first < LEAST_PORTS:
        yield Check("local ports", "warning", f"{first} to {last}", "sysctl net.ipv4.ip_local_port_range='32768 60999'")


def _in_use(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.5).close()
    except OSError:
        return False
    return True


def token() -> Check:
    """Check how Ray clients of this machine authenticate. The token itself is never shown."""
    mode = os.environ.get("RAY_AUTH_MODE", "")
    address = os.environ.get("RAY_ADDRESS", "")
    source = _token_source()
    if mode.lower() == "token" and source is None:
        return Check("Ray token", "failure", "RAY_AUTH_MODE is token, but there is none",
                     "export RAY_AUTH_TOKEN_PATH=FILE with the cluster's token, or `ray get-auth-token --generate`")
    if isinstance(source, Path) and source.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        return Check("Ray token", "warning", f"other users can read {source}", f"chmod 600 {source}")
    if mode.lower() != "token" and address and address != "auto" and not _is_local(address):
        return Check("Ray token", "warning", f"{address} requires none: anyone who can reach it can run any code there",
                     "start the cluster with RAY_AUTH_MODE=token, and set it here too")
    shown = f"from {source}" if source else "none"
    return Check("Ray token", "ok", f"mode {mode or 'not set'}, token {shown}")


def listening() -> Check:
    """Warn of ports beyond loopback on which Ray processes of this user listen; Ray cannot bind them all to it."""
    sockets = _open_ports()
    shown = []
    for process in Path("/proc").glob("[0-9]*"):
        name, inodes = _ray_process(process)
        ports = sorted(sockets[inode] for inode in inodes if inode in sockets)
        if ports:
            shown.append(f"{name} {', '.join(map(str, ports))}")
    if not shown:
        return Check("listening", "ok", "no Ray process listens beyond loopback")
    return Check("listening", "warning", f"reachable from the network: {'; '.join(sorted(shown))}",
                 "keep these ports behind a firewall; Ray has no setting that binds them (docs/clusters.md)")


def _open_ports() -> dict[str, int]:
    """Return the TCP ports that listen beyond loopback, by inode; none on systems without /proc/net."""
    ports: dict[str, int] = {}
    for table, loopback_end in (("tcp", "7F"), ("tcp6", "0" * 24 + "01000000")):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            address, _, port = fields[1].partition(":")
            if fields[3] == "0A" and not address.endswith(loopback_end):  # listening; addresses are little-endian
                ports[fields[9]] = int(port, 16)
    return ports


def _ray_process(process: Path) -> tuple[str, set[str]]:
    """Return the name of a Ray process and the inodes of its sockets; empty ones for other processes."""
    try:
        name = (process / "comm").read_text().strip()
        if not name.startswith(("gcs_server", "raylet", "ray::")):
            return "", set()
        links = [os.readlink(path) for path in (process / "fd").iterdir()]
    except OSError:  # the process has ended, or belongs to another user
        return "", set()
    return name, {link[len("socket:["):-1] for link in links if link.startswith("socket:[")}


def _token_source() -> Path | str | None:
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return path if path.is_file() and path.stat().st_size else None


def _is_local(address: str) -> bool:
    host = address.rpartition("://")[2].rpartition(":")[0]
    return host in LOCAL or host.startswith("127.")
