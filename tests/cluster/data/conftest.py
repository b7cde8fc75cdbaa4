"""A small Ray cluster shared by all tests of pipelines, so that its workers stay warm."""

from __future__ import annotations

import pytest

from tests.cluster.small_ray import small_ray
from tidewheel.cluster.s3_server import S3Server


@pytest.fixture(scope="package")
def s3():
    with S3Server() as server:  # before Ray, so that its workers have the credentials
        yield server


@pytest.fixture(scope="package")
def cluster(s3):
    with small_ray(2):
        yield
