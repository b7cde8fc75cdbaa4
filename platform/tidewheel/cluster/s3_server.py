"""moto's S3-protocol server on loopback in a separate process, for the demo and the tests.

    with S3Server() as server:
        store(server.create_bucket("demo")).write("key", b"...")

During the block, the AWS variables point to the server, so this process and every process that it starts (Ray nodes and
their workers) use it. Objects are in the server's memory and are lost when it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import asdict
from importlib.util import find_spec
from types import TracebackType

from tidewheel.cluster.s3_faults import COUNTS_PATH, Faults
from tidewheel.errors import ClusterError, StorageError

LOOPBACK = "127.0.0.1"
REQUEST_SECONDS = 120.0
"""Deadline of a request to the server itself: generous, so that a loaded machine fails no test."""
# Unset while the server runs, because the user's values would conflict with ours.
SET_ASIDE = ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL_S3", "AWS_CONFIG_FILE",
             "AWS_SHARED_CREDENTIALS_FILE", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")

# The server binds a free port (so there is no race), prints it, and ends when its standard input closes, which happens
# even if this process is killed.
_SERVE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address=sys.argv[1], port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""
_SERVE_FAULTY = """
import json
import sys
from tidewheel.cluster.s3_faults import Faults, serve
serve(sys.argv[1], Faults(**json.loads(sys.argv[2])))
"""


class S3Server:
    """Context manager around one server process.

    Args:
        faults: makes the server fail at a share of its requests; None: never.
        accept_all: accept any credentials. False refuses every request, to test how refused access is reported.

    Attributes:
        endpoint: "http://127.0.0.1:PORT", also in AWS_ENDPOINT_URL.

    Raises:
        ClusterError: moto is not installed or the server does not start, when the block is entered.
    """

    def __init__(self, *, accept_all: bool = True, faults: Faults | None = None) -> None:
        self.endpoint = ""
        self._faults = faults
        self._accept_all = accept_all
        self._process: subprocess.Popen[str] | None = None
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> S3Server:
        if find_spec("moto") is None:
            raise ClusterError("the S3-protocol server needs moto, which is not installed", where="storage s3",
                               fix="pip install 'tidewheel[demo]', or use a folder: --storage local")
        atexit.register(self.close)
        try:
            self.endpoint = f"http://{LOOPBACK}:{self._start()}"
            self._point_environment_here()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the server while it runs."""
        return self._process.pid if self._process else None

    def create_bucket(self, name: str) -> str:
        """Make the bucket `name` if it does not exist, and return its URI, "s3://name".

        Raises:
            StorageError: the server refused the name.
        """
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # bypass proxies
        try:
            direct.open(request, timeout=REQUEST_SECONDS).close()
        except urllib.error.HTTPError as error:
            if error.code != 409:  # 409: it exists already
                raise StorageError(f"the server refused to create the bucket {name!r} (HTTP {error.code})",
                                   where=self.endpoint, fix="use 3 to 63 small letters, digits and dashes") from None
        return f"s3://{name}"

    def fault_counts(self) -> dict[str, int]:
        """Return the number of requests so far and of faults by kind, for a server with `faults`."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(self.endpoint + COUNTS_PATH, timeout=REQUEST_SECONDS) as answer:
            return json.load(answer)

    def fail(self, faults: Faults) -> None:
        """Change the faults of a server that was started with `faults`."""
        request = urllib.request.Request(self.endpoint + COUNTS_PATH, method="PUT",
                                         data=json.dumps(asdict(faults)).encode())
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        direct.open(request, timeout=REQUEST_SECONDS).close()

    def close(self) -> None:
        """End the server and restore the environment. May be called more than once."""
        atexit.unregister(self.close)
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # nothing to save: its objects are in memory
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before = {}

    def _start(self) -> int:
        environment = dict(os.environ)
        environment.pop("INITIAL_NO_AUTH_ACTION_COUNT", None)
        if not self._accept_all:
            environment["INITIAL_NO_AUTH_ACTION_COUNT"] = "0"  # moto's setting for: check every request
        code, arguments = _SERVE, [LOOPBACK]
        if self._faults is not None:
            code = _SERVE_FAULTY
            arguments.append(json.dumps(asdict(self._faults)))
        self._process = subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                         start_new_session=True)  # so that Ctrl-C does not reach the server
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()  # printed once it listens; "" if it ended
        if not port.isdigit():
            raise ClusterError("the S3-protocol server did not start", where=f"{sys.executable} (moto)",
                               fix="pip install --force-reinstall 'moto[server]', or use a folder: --storage local")
        return int(port)

    def _point_environment_here(self) -> None:
        loopback = {LOOPBACK, "localhost"}
        changes: dict[str, str | None] = {
            "AWS_ENDPOINT_URL": self.endpoint, "AWS_ACCESS_KEY_ID": "tidewheel", "AWS_SECRET_ACCESS_KEY": "tidewheel",
            "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
            **dict.fromkeys(SET_ASIDE),
        }
        for name in ("NO_PROXY", "no_proxy"):
            given = [part.strip() for part in os.environ.get(name, "").split(",") if part.strip()]
            changes[name] = ",".join([*given, *sorted(loopback - set(given))])
        for name, value in changes.items():
            self._before[name] = os.environ.get(name)
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
