"""A pipeline whose storage fails waits, or ends with the cause. A second run gives the same bytes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.data.test_pipeline import recipe, shard_hashes, write
from tests.cluster.small_ray import small_ray
from tidewheel.cluster.s3_faults import Faults
from tidewheel.cluster.s3_server import S3Server
from tidewheel.data import pipeline
from tidewheel.errors import StorageError, root_cause

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server(faults=Faults(0.0)) as running:
        yield running


@pytest.fixture(scope="module")
def given(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Return the input and the hashes of its shards on intact storage, under one Ray that knows the server."""
    folder = tmp_path_factory.mktemp("given")
    write(folder / "in")
    with small_ray(2):
        pipeline.run(recipe(), input=str(folder / "in"), output=str(folder / "out"))
        yield str(folder / "in"), shard_hashes(folder / "out")


def test_a_store_is_silent_for_a_while(given: tuple[str, dict[str, list[str]]], server: S3Server) -> None:
    """After a hundred requests, it answers none until two have timed out."""
    output = server.create_bucket("silent") + "/out"
    over, before = threading.Event(), server.fault_counts()["requests"]

    def misbehave() -> None:
        while server.fault_counts()["requests"] < before + 100 and not over.wait(0.05):
            pass
        server.fail(Faults(1.0, 0, ("silent",)))
        while server.fault_counts().get("silent", 0) < 2 and not over.wait(0.05):
            pass
        server.fail(Faults(0.0))

    thread = threading.Thread(target=misbehave)
    thread.start()
    try:
        pipeline.run(recipe(), input=given[0], output=output)
        assert server.fault_counts()["silent"] >= 2
        assert shard_hashes(output) == given[1]
    finally:
        over.set()
        thread.join()


def test_a_disk_is_full(given: tuple[str, dict[str, list[str]]], tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)],
                                      check=False, capture_output=True).returncode:
        pytest.skip("mounting takes root")
    try:
        with (disk / "ballast").open("wb", buffering=0) as sink, contextlib.suppress(OSError):
            while True:
                sink.write(bytes(4096))
        with pytest.raises(Exception, match="No space left") as error:  # Ray wraps errors of tasks
            pipeline.run(recipe(), input=given[0], output=str(disk / "out"))
        cause = root_cause(error.value)
        assert isinstance(cause, StorageError)
        assert "free some space" in cause.fix
        (disk / "ballast").unlink()
        pipeline.run(recipe(), input=given[0], output=str(disk / "out"))
        assert shard_hashes(disk / "out") == given[1]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
