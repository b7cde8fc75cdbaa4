from __future__ import annotations

import json
import re
import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tidewheel.cluster.doctor import Check, diagnose, machine, network, nodes, software
from tidewheel.cluster.doctor import gpu as gpus
from tidewheel.cluster.doctor.storage import storage
from tidewheel.cluster.s3_server import S3Server
from tidewheel.data.text import kernel_objects
from tidewheel.elastic.ray_contract import KNOWN_RELEASES
from tidewheel.storage import LocalStore, store


def only(name: str, checks: list[Check]) -> Check:
    return next(check for check in checks if check.name == name)


def test_a_processor_without_compiled_kernels_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWHEEL_KERNELS", "compile")
    kernel_objects.level.cache_clear()
    check = software.kernels()
    monkeypatch.undo()
    kernel_objects.level.cache_clear()
    assert (check.status, "minute" in check.detail) == ("warning", True)
    assert software.kernels().status == ("ok" if kernel_objects.level() else "warning")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the imports of Torch and Ray, which take seconds, with prepared answers."""
    monkeypatch.setattr(software, "TORCH", 'print(\'{"version": "2.13", "built_for": null, "gpus": [], "threads": 2, '
                                           '"gloo": true, "nccl": "", "apart": []}\')')
    monkeypatch.setattr(software, "RAY", 'print(\'{"version": "2.60.0", "known": ["2.60.0"], "problem": "", '
                                         '"fix": ""}\')')


def test_this_machine_is_fit() -> None:
    checks = diagnose()
    assert {"python", "packages", "cpus", "memory", "shared memory", "open files", "temporary disk", "working disk",
            "loopback", "RAY_ADDRESS", "torch", "ray"} <= {check.name for check in checks}
    assert [check for check in checks if check.status == "failure"] == []
    json.dumps([vars(check) for check in checks])
    assert all(check.fix for check in checks if check.status != "ok")
    assert only("ray", checks).detail == f"{KNOWN_RELEASES[-1]}; releases known to work: {', '.join(KNOWN_RELEASES)}"


TRIED = ["put", "list", "conditional put", "write", "delete"]


def test_a_folder_is_probed_and_left_clean(tmp_path: Path) -> None:
    checks = storage(str(tmp_path))
    assert [check.name for check in checks] == [f"storage {name}" for name in TRIED]
    assert {check.status for check in checks} == {"ok"}
    assert "MB/s" in only("storage write", checks).detail
    assert not any(tmp_path.rglob("*"))
    (tmp_path / "file").write_text("")
    assert only("storage", storage(str(tmp_path / "file"))).status == "failure"
    assert only("storage", storage("gopher://x/y")).status == "failure"


def test_a_bucket_is_probed_and_left_clean() -> None:
    with S3Server() as server:
        bucket = server.create_bucket("fine")
        checks = storage(bucket)
        assert {check.name: check.status for check in checks} == dict.fromkeys(
            [f"storage {name}" for name in ("put", "list", "conditional put", "multipart", "clock", "delete")], "ok")
        assert store(bucket).list() == []
        missing = only("storage", storage("s3://not-there/x"))
        assert missing.status == "failure"
        assert "no bucket 'not-there'" in missing.detail
        assert "create the bucket" in missing.fix
    with S3Server(accept_all=False):
        refused = only("storage", storage("s3://fine/x"))
        assert refused.status == "failure"
        assert "access refused" in refused.detail


def test_stores_that_overwrite_or_damage_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrites(self: LocalStore, key: str, data: bytes) -> bool:
        self.write(key, data)
        return True

    monkeypatch.setattr("tidewheel.cluster.doctor.storage.LARGE_BYTES", 8 << 20)
    monkeypatch.setattr(LocalStore, "create", overwrites)
    check = only("storage conditional put", storage(str(tmp_path)))
    assert (check.status, "ignores If-None-Match" in check.detail) == ("warning", True)
    monkeypatch.setattr(LocalStore, "delete_tree", lambda self, prefix: None)
    check = only("storage delete", storage(str(tmp_path)))
    assert check.status == "failure"
    assert "by hand" in check.fix

    real = LocalStore.read

    def damaged(self: LocalStore, key: str, start: int = 0, length: int | None = None) -> bytes:
        return real(self, key, start, length)[:-1] + b"x"

    monkeypatch.setattr(LocalStore, "read", damaged)
    checks = storage(str(tmp_path))
    assert [(check.name, check.status) for check in checks] == [
        ("storage put", "failure"), ("storage delete", "failure")]
    assert "does not return what was written" in checks[0].detail


def test_a_clock_that_is_off_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shifted(datetime):
        ahead = timedelta()

        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + cls.ahead

    monkeypatch.setattr("tidewheel.cluster.doctor.storage.datetime", Shifted)
    monkeypatch.setattr("tidewheel.cluster.doctor.storage.LARGE_BYTES", 8 << 20)
    with S3Server() as server:
        bucket = server.create_bucket("clock")
        for seconds, status in ((5, "ok"), (-300, "warning"), (1200, "failure")):
            Shifted.ahead = timedelta(seconds=seconds)
            check = only("storage clock", storage(bucket))
            assert check.status == status
            offset = re.match(r"([+-]\d+) s off", check.detail.removeprefix(f"{bucket}: "))
            assert offset is not None
            assert seconds - 2 <= int(offset[1]) <= seconds + 30


@pytest.mark.usefixtures("quick")
def test_a_stale_ray_address_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert (stale.status, stale.fix) == ("failure", "unset RAY_ADDRESS, or start the cluster it names")


def test_a_token_is_detected_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (network.token().status, network.token().detail) == ("ok", "mode not set, token none")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    assert "can run any code" in network.token().detail
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert (network.token().status, "there is none" in network.token().detail) == ("failure", True)
    path = tmp_path / "secret"
    path.write_text("planted-credential")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    path.chmod(0o644)
    assert network.token().fix == f"chmod 600 {path}"
    path.chmod(0o600)
    assert network.token().status == "ok"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "planted-credential")
    check = network.token()
    assert check.status == "ok"
    assert "planted-credential" not in check.detail + check.fix


def test_busy_ports_of_a_head_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        monkeypatch.setattr(network, "RAY_PORTS", {port: "GCS"})
        assert only("ports", [*network.ports()]).detail == f"{port} are free"
        server.listen()
        busy = only("ports", [*network.ports()])
        assert (busy.status, busy.detail.startswith(f"in use: {port} (GCS)")) == ("warning", True)
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        assert only("ports", [*network.ports()]).status == "ok"


SMI = """#!/bin/sh
case "$1" in
--query-gpu*) cat {folder}/gpus ;;
topo) cat {folder}/topo ;;
*) echo "| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4 |" ;;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that installs a fake nvidia-smi: GPUs as lines of `gpus.FIELDS`, and their links."""
    def make(lines: list[str], link: str = "NV18", odd: str = "") -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(SMI.format(folder=tmp_path))
        program.chmod(0o755)
        (tmp_path / "gpus").write_text("\n".join(lines))
        count = len(lines)
        rows = ["\t" + "\t".join(f"\x1b[4mGPU{at}" for at in range(count)) + "\tNIC0\tCPU Affinity\x1b[0m"]
        for at in range(count):
            links = ["X" if peer == at else odd if odd and {at, peer} == {0, count - 1} else link
                     for peer in range(count)]
            rows.append(f"GPU{at}\t" + "\t".join(links) + "\tSYS\t0-63")
        (tmp_path / "topo").write_text("\n".join([*rows, "NIC0\tSYS\tSYS"]))
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return make


FINE = "NVIDIA H100 80GB HBM3, 550.54.15, 81559, 4, 0, 41"


def test_gpus_and_links_are_checked(smi) -> None:
    smi([FINE] * 4)
    assert [(check.name, check.status) for check in gpus.gpus()] == [("GPUs", "ok"), ("NVLink", "ok")]
    assert only("GPUs", [*gpus.gpus()]).detail == "4 x NVIDIA H100 80GB HBM3, driver 550.54.15, 81559 MiB each"
    assert only("NVLink", [*gpus.gpus()]).detail == "between all 4 GPUs: NV18"
    assert gpus.driver_cuda() == "12.4"
    smi([FINE] * 4, odd="PHB")
    assert only("NVLink", [*gpus.gpus()]).detail == "not between GPUs 0-3 (PHB)"
    smi([FINE] * 2, link="SYS")
    assert "none between the 2 GPUs (SYS)" in only("NVLink", [*gpus.gpus()]).detail
    smi([FINE, "NVIDIA A100-SXM4-80GB, 550.54.15, 81920, 70000, 3, 88"])
    checks = [*gpus.gpus()]
    assert [(check.name, check.status) for check in checks] == [
        ("GPUs", "warning"), ("GPU errors", "failure"), ("GPU memory", "warning"), ("GPU heat", "warning"),
        ("NVLink", "ok")]
    assert only("GPU errors", checks).detail == "GPU 1: 3 uncorrected memory errors"
    smi(["NVIDIA L40S, 550.54.15, 46068, 4, [N/A], 41"])  # one GPU, without error correction
    assert [(check.name, check.status) for check in gpus.gpus()] == [("GPUs", "ok")]
    smi([])
    assert only("GPUs", [*gpus.gpus()]).status == "failure"


def test_a_machine_without_gpus_has_no_gpu_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert [*gpus.gpus()] == []
    assert gpus.driver_cuda() is None


@pytest.mark.parametrize(("torch", "status", "message"), [
    ('{"built_for": "12.8", "gpus": ["H100"], "nccl": "2.27.3", "apart": []}', "ok", "NCCL 2.27.3"),
    ('{"built_for": "13.0", "gpus": [], "nccl": "", "apart": []}', "failure", "the driver runs CUDA 12.4 at most"),
    ('{"built_for": null, "gpus": [], "nccl": "", "apart": []}', "warning", "this machine has an NVIDIA driver"),
    ('{"built_for": "12.8", "gpus": ["H100"], "nccl": "", "apart": []}', "failure", "without NCCL"),
    ('{"built_for": "12.8", "gpus": ["H100", "H100"], "nccl": "2", "apart": [1]}', "warning", "memory of GPU 1")])
def test_torch_is_checked_against_the_driver(smi, torch: str, status: str, message: str) -> None:
    smi([FINE] * 2)
    answer = {"version": "2.13", "threads": 2, "gloo": True, **json.loads(torch)}
    check = software.torch(software.start(f"print({json.dumps(json.dumps(answer))})"))
    assert check.status == status
    assert message in check.detail


@pytest.mark.parametrize(("off", "status"), [(0.0, "ok"), (2.0, "warning"), (-60.0, "failure")])
def test_clocks_of_nodes_are_compared(off: float, status: str) -> None:
    check = nodes.clock_check({"a": (0.01, 0.001), "b": (off, 0.002), "c": (0.0, 0.001)})
    assert check.status == status
    assert nodes.clock_check({"a": (off, 0.001)}).status == "ok"
    assert nodes.clock_check({"a": (0.0, 5.0), "b": (4.0, 5.0)}).status == "ok", "within the error of the measurement"


def nodes_in_threads(examiners: dict[str, nodes.Examiner]) -> nodes.Asking:
    """Return a function that asks the examiners in parallel, as Ray would, and collects their errors."""
    pool = ThreadPoolExecutor(len(examiners))

    def ask(questions):
        futures = {name: pool.submit(getattr(examiners[question.to or name], question.method), *question.arguments)
                   for name, question in questions.items()}
        failed = {name: str(future.exception()) for name, future in futures.items() if future.exception()}
        return {name: future.result() for name, future in futures.items() if name not in failed}, failed

    return ask


@pytest.mark.usefixtures("quick")
def test_nodes_of_a_cluster_are_examined(tmp_path: Path) -> None:
    """Three examiners have loopback addresses and real sockets between them."""
    examiners = {f"node {index}": nodes.Examiner(f"127.0.0.{index}") for index in (1, 2, 3)}
    examined = nodes.examine(list(examiners), nodes_in_threads(examiners), str(tmp_path))
    assert [node.name for node in examined] == ["node 1", "node 2", "node 3", "all nodes"]
    rows = nodes.flat(examined)
    assert [row for row in rows if row["status"] == "failure"] == []
    names = {row["name"] for row in rows if row["node"] == "node 2"}
    assert {"memory", "torch", "ray", "storage conditional put"} <= names
    assert not {"ports", "RAY_ADDRESS"} & names, "nodes of a running cluster need no such checks"
    together = {row["name"]: row["detail"] for row in rows if row["node"] == "all nodes"}
    assert together["same versions"].startswith("3 nodes: python 3.")
    assert "ms apart" in together["clocks"]
    assert together["between nodes"] == "3 connections on free ports"
    assert not any(tmp_path.rglob("*"))


@pytest.mark.usefixtures("quick")
def test_nodes_that_are_lost_cut_off_or_late_are_reported() -> None:
    class Lost(nodes.Examiner):
        def versions(self):
            raise OSError("the node died")

    class CutOff(nodes.Examiner):
        def listen(self, token: str) -> tuple[str, int]:
            address, _ = super().listen(token)
            with socket.create_server((address, 0)) as closed:
                port = closed.getsockname()[1]
            return address, port  # nothing listens on this port any more

    class Late(nodes.Examiner):
        def clock(self) -> float:
            return super().clock() - 7200

    examiners = {"a": nodes.Examiner("127.0.0.1"), "b": CutOff("127.0.0.2"), "c": Late("127.0.0.3"),
                 "d": Lost("127.0.0.4")}
    examined = {node.name: node for node in nodes.examine(list(examiners), nodes_in_threads(examiners))}
    assert [(check.name, check.status, check.detail) for check in examined["d"].checks] == [
        ("node", "failure", "the node died")]
    together = {check.name: check for check in examined["all nodes"].checks}
    assert together["clocks"].status == "failure"
    assert re.fullmatch(r"[ab] is 7\d{3}\.\d s ahead of c", together["clocks"].detail)
    assert together["between nodes"].status == "failure"
    assert together["between nodes"].detail.startswith("a to b: ")
    assert "c to a" not in together["between nodes"].detail


def test_a_connection_without_the_token_is_not_answered() -> None:
    address, port = nodes.Examiner("127.0.0.1").listen("right")
    assert nodes.Examiner().reach(address, port, "wrong") == "another program answers"


def test_versions_of_nodes_are_compared() -> None:
    versions = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.13", "tidewheel": "0.1"}
    assert [check.status for check in nodes.same_versions({"a": versions, "b": versions})] == ["ok"]
    checks = nodes.same_versions({"a": versions, "b": {**versions, "ray": "2.59.0"}, "c": {"python": "3.11.7"}})
    assert [check.name for check in checks] == ["same ray", "same torch", "same tidewheel"]
    assert checks[0].detail == "2.59.0 on b; 2.60.0 on a; missing on c"


@pytest.mark.parametrize(("code", "message"), [
    ("raise ImportError('libcudart.so.12 is missing')", "libcudart.so.12 is missing"),
    ("import os; os.abort()", "the import ended with signal or code -6"),
    ("import time; time.sleep(60)", "did not end within"),
    ("print('nothing of use')", "code 0"),
])
def test_broken_installations_are_reported(monkeypatch: pytest.MonkeyPatch, code: str, message: str) -> None:
    monkeypatch.setattr(software, "PROBE_SECONDS", 1.0)
    monkeypatch.setattr(software, "TORCH", code)
    monkeypatch.setattr(software, "RAY", code)
    for name in ("torch", "ray"):
        check = only(name, diagnose())
        assert check.status == "failure"
        assert message in check.detail
        assert "Traceback" not in check.detail
        assert check.fix


@pytest.mark.usefixtures("quick")
def test_a_small_machine_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("usage", (), {"total": 64 << 20, "free": 1 << 20, "used": 63 << 20})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    checks = diagnose()
    assert only("shared memory", checks).status == "warning"
    assert only("open files", checks).fix == "ulimit -n 4096"
    assert only("processes", checks).fix == "ulimit -u 4096"
    assert only("temporary disk", checks).status == "failure"
    assert only("proxy", checks).fix == "export NO_PROXY=127.0.0.1,localhost"


@pytest.mark.usefixtures("quick")
def test_wrong_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software.metadata, "requires", lambda _: ["numpy>=99", "not-there>=1", "pyyaml>=5",
                                                                "moto>=99; extra == 'demo'"])
    check = only("packages", diagnose())
    assert check.status == "failure"
    assert check.fix == "pip install 'numpy>=99' 'not-there>=1'"
    assert "not-there missing" in check.detail
