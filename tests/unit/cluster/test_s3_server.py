from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tidewheel import storage
from tidewheel.cluster import s3_server
from tidewheel.cluster.s3_server import S3Server
from tidewheel.errors import ClusterError, StorageError

SOURCES = str(Path(storage.__file__).parents[2])


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pid: int, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(pid)


def test_the_environment_is_set_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setenv("NO_PROXY", "internal.example")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    before = dict(os.environ)
    with S3Server() as server:
        assert os.environ["AWS_ENDPOINT_URL"] == server.endpoint
        assert os.environ["AWS_ACCESS_KEY_ID"] != "mine"
        assert "AWS_PROFILE" not in os.environ
        assert os.environ["NO_PROXY"] == "internal.example,127.0.0.1,localhost"
        pid = server.pid
    assert dict(os.environ) == before
    assert pid is not None
    assert not alive(pid)
    server.close()


def test_a_dead_proxy_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with S3Server() as server:
        remote = storage.store(server.create_bucket("proxied"))
        remote.write("x", b"1")
        assert remote.read("x") == b"1"


def test_child_processes_use_the_server() -> None:
    with S3Server() as server:
        uri = server.create_bucket("children")
        code = f"from tidewheel.storage import store; store({uri!r}).write('x', b'from a child')"
        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": SOURCES}, timeout=60)
        assert storage.store(uri).read("x") == b"from a child"


def test_several_servers_have_their_own_buckets() -> None:
    with S3Server() as first:
        uri = first.create_bucket("both")
        assert first.create_bucket("both") == uri  # a second time does no harm
        storage.store(uri).write("x", b"first")
        with S3Server() as second:
            assert second.endpoint != first.endpoint
            with pytest.raises(StorageError, match="no bucket"):
                storage.store(uri).read("x")
        assert storage.store(uri).read("x") == b"first"
        with pytest.raises(StorageError, match="refused to create"):
            first.create_bucket("X")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_ends_with_the_process_that_started_it(sent: signal.Signals) -> None:
    code = ("import time\nfrom tidewheel.cluster.s3_server import S3Server\n"
            "with S3Server() as server:\n    print(server.pid, server.endpoint, flush=True)\n    time.sleep(60)\n")
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "PYTHONPATH": SOURCES})
    assert parent.stdout is not None
    pid, endpoint = parent.stdout.readline().split()
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    assert direct.open(f"{endpoint}/", timeout=60).status == 200
    parent.send_signal(sent)
    parent.wait(60)
    parent.stdout.close()
    wait_until_gone(int(pid))


def test_without_moto_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_server, "find_spec", lambda _: None)
    with pytest.raises(ClusterError, match="moto") as caught:
        S3Server().__enter__()
    assert "tidewheel[demo]" in caught.value.fix


def test_a_server_that_dies_at_once_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_server, "_SERVE", "raise SystemExit(1)")
    before = dict(os.environ)
    with pytest.raises(ClusterError, match="did not start"):
        S3Server().__enter__()
    assert dict(os.environ) == before
