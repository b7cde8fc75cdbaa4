"""The bytes of shards depend only on input and recipe, not on CPUs, file order or a store's faults."""

from __future__ import annotations

import pytest

from tests.cluster.data.test_pipeline import recipe, shard_hashes, write
from tests.cluster.small_ray import small_ray
from tidewheel.cluster.s3_faults import KINDS, Faults
from tidewheel.cluster.s3_server import S3Server
from tidewheel.data import pipeline
from tidewheel.storage import store

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def server():
    with S3Server(faults=Faults(0.05, 2)) as running:
        yield running


@pytest.fixture(scope="module")
def hashes(server, tmp_path_factory):
    """Return the hashes of one input's shards: from a folder, and from a store that fails 5 % of its requests."""
    folder, uri = tmp_path_factory.mktemp("bytes"), server.create_bucket("pipeline")
    write(folder / "in")
    folder_store = store(uri)
    for path in sorted((folder / "in").rglob("*.*")):
        folder_store.write(path.relative_to(folder / "in").as_posix(), path.read_bytes())
    with small_ray(2):
        pipeline.run(recipe(), input=str(folder / "in"), output=str(folder / "out"))
        pipeline.run(recipe(), input=uri, output=f"{uri}/out")
    return shard_hashes(folder / "out"), shard_hashes(f"{uri}/out")


def test_faults_of_an_object_store(hashes, server):
    on_folder, on_store = hashes
    assert on_store == on_folder
    counts = server.fault_counts()
    assert all(counts[kind] > 0 for kind in KINDS), counts


def test_another_number_of_cpus_and_any_file_order(hashes, tmp_path):
    """More CPUs and a larger corpus: `python -m tests.benchmarks.same_bytes`."""
    with small_ray(1):
        pipeline.run(recipe(), input=str(write(tmp_path / "in", files=4, seed=1)), output=str(tmp_path / "out"))
    assert shard_hashes(tmp_path / "out") == hashes[0]
