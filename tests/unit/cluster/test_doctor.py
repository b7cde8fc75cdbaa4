from __future__ import annotations

import json
import resource
import socket
from pathlib import Path

import pytest

from tidewheel.cluster import doctor
from tidewheel.cluster.doctor import Check, diagnose
from tidewheel.cluster.s3_server import S3Server


def only(name: str, checks: list[Check]) -> Check:
    return next(check for check in checks if check.name == name)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers in place of the two imports, which take seconds."""
    monkeypatch.setattr(doctor, "_TORCH", 'print(\'{"version": "2.13", "built_for": null, "gpus": [], "threads": 2, '
                                          '"gloo": true}\')')
    monkeypatch.setattr(doctor, "_RAY", 'print(\'{"version": "2.60.0", "problem": "", "mend": ""}\')')


def test_this_machine_is_fit() -> None:
    checks = diagnose()
    assert {"python", "packages", "cpus", "memory", "shared memory", "open files", "temporary disk", "working disk",
            "loopback", "RAY_ADDRESS", "torch", "ray"} <= {check.name for check in checks}
    assert [check for check in checks if check.status == "failure"] == []
    json.dumps([vars(check) for check in checks])
    assert all(check.mend for check in checks if check.status != "ok")


@pytest.mark.usefixtures("quick")
def test_storage_is_tried_and_left_clean(tmp_path: Path) -> None:
    check = only("storage", diagnose(str(tmp_path)))
    assert check.status == "ok"
    assert "MB/s" in check.detail
    assert list(tmp_path.iterdir()) == []
    with S3Server() as server:
        assert only("storage", diagnose(server.create_bucket("fine"))).status == "ok"
        missing = only("storage", diagnose("s3://not-there/x"))
        assert missing.status == "failure"
        assert "no bucket 'not-there'" in missing.detail
        assert "create the bucket" in missing.mend
    with S3Server(accept_all=False):
        refused = only("storage", diagnose("s3://fine/x"))
        assert refused.status == "failure"
        assert "access refused" in refused.detail
    (tmp_path / "file").write_text("")
    assert only("storage", diagnose(str(tmp_path / "file"))).status == "failure"
    assert only("storage", diagnose("gopher://x/y")).status == "failure"


@pytest.mark.usefixtures("quick")
def test_ray_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", f"http://127.0.0.1:{port}/"):
            monkeypatch.setenv("RAY_ADDRESS", address)
            assert only("RAY_ADDRESS", diagnose()).status == "ok"
    for address in (f"127.0.0.1:{port}", "nonsense", "host:port"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        stale = only("RAY_ADDRESS", diagnose())
        assert (stale.status, stale.mend) == ("failure", "unset RAY_ADDRESS, or start the cluster it names")


@pytest.mark.parametrize(("code", "said"), [
    ("raise ImportError('libcudart.so.12 is missing')", "libcudart.so.12 is missing"),
    ("import os; os.abort()", "the import ended with signal or code -6"),
    ("import time; time.sleep(60)", "did not end within"),
    ("print('nothing of use')", "code 0"),
])
def test_broken_installations_are_findings(monkeypatch: pytest.MonkeyPatch, code: str, said: str) -> None:
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 1.0)
    monkeypatch.setattr(doctor, "_TORCH", code)
    monkeypatch.setattr(doctor, "_RAY", code)
    for name in ("torch", "ray"):
        check = only(name, diagnose())
        assert check.status == "failure"
        assert said in check.detail
        assert "Traceback" not in check.detail
        assert check.mend


@pytest.mark.usefixtures("quick")
def test_a_small_machine_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("usage", (), {"total": 64 << 20, "free": 1 << 20, "used": 63 << 20})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    checks = diagnose()
    assert only("shared memory", checks).status == "warning"
    assert only("open files", checks).mend == "ulimit -n 4096"
    assert only("temporary disk", checks).status == "failure"
    assert only("proxy", checks).mend == "export NO_PROXY=127.0.0.1,localhost"


@pytest.mark.usefixtures("quick")
def test_wrong_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: ["numpy>=99", "not-there>=1", "pyyaml>=5",
                                                                "moto>=99; extra == 'demo'"])
    check = only("packages", diagnose())
    assert check.status == "failure"
    assert check.mend == "pip install 'numpy>=99' 'not-there>=1'"
    assert "not-there missing" in check.detail
