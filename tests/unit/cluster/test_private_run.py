"""A private run has its own folder and token."""

from __future__ import annotations

import os
import socket
import sys
from types import SimpleNamespace

import pytest

from tidewheel.cluster import private_run
from tidewheel.cluster.doctor import network


@pytest.fixture
def run(monkeypatch, tmp_path):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # the end of the test then restores it
        monkeypatch.delenv(name)
    monkeypatch.setattr(private_run, "TMP", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    private_run._folder_of_process.cache_clear()
    yield tmp_path
    private_run._folder_of_process.cache_clear()


def test_a_private_run_has_its_own_token_and_folder(run, monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    arguments = private_run.private_arguments()
    token = private_run.Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.parent.stat().st_mode & 0o777 == 0o700
    assert len(token.read_text()) == 64
    assert arguments["_temp_dir"] == str(token.parent / "ray")
    assert arguments.get("_node_ip_address", "127.").startswith("127.")
    assert private_run.private_arguments() == arguments, "Ray reads the token only once in a process"


def test_rays_own_token_is_closed_when_ray_was_imported_before(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    private_run.private_arguments()
    token = run / "home/.ray/auth_token"
    assert token.stat().st_mode & 0o777 == 0o600
    token.chmod(0o644)
    private_run.private_arguments()
    assert token.stat().st_mode & 0o777 == 0o600
    assert "RAY_AUTH_MODE" not in os.environ


def test_a_token_that_the_environment_names_is_left_alone(run, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    private_run.private_arguments()
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ
    assert not (run / "home/.ray").exists()


def test_the_doctor_shows_what_listens_beyond_loopback(monkeypatch):
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen(1)
        inode = os.readlink(f"/proc/self/fd/{server.fileno()}")[len("socket:["):-1]
        monkeypatch.setattr(network, "_ray_process", lambda path: (
            ("raylet", {inode}) if path.name == str(os.getpid()) else ("", set())))
        check = network.listening()
        assert check.status == "warning"
        assert f"raylet {server.getsockname()[1]}" in check.detail
    with socket.socket() as server:
        server.bind(("127.0.0.2", 0))
        server.listen(1)
        inode = os.readlink(f"/proc/self/fd/{server.fileno()}")[len("socket:["):-1]
        assert inode not in network._open_ports()
    assert network.listening().status == "ok"
