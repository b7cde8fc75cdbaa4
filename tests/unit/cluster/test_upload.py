"""The listing before an upload is what Ray packs: compared with the package that Ray makes of the same folder."""

from __future__ import annotations

import zipfile

import pytest

from tidewheel.cluster import upload
from tidewheel.cluster.jobs import Submission
from tidewheel.cluster.upload import EXCLUDES, survey
from tidewheel.errors import ConfigError

TREE = {"jobs/train.py": "x" * 10, "jobs/__pycache__/train.pyc": "y", "data/big.bin": "z" * 1000, ".env": "KEY=secret",
        "keys/server.pem": "secret", ".aws/credentials": "secret", "notes.txt": "n", ".git/config": "g",
        "sub/.gitignore": "*.tmp\n", "sub/a.tmp": "t", "sub/b.txt": "b", ".gitignore": "data/\n",
        "service_credentials_prod.json": "secret"}


@pytest.fixture
def folder(tmp_path):
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_listing_is_what_ray_packs(folder, tmp_path_factory):
    from ray._private import ray_constants
    from ray._private.runtime_env.packaging import create_package

    found = survey(str(folder))
    target = tmp_path_factory.mktemp("package") / "package.zip"
    create_package(str(folder), target, include_gitignore=True,
                   excludes=[*ray_constants.get_runtime_env_default_excludes(), *EXCLUDES])
    with zipfile.ZipFile(target) as package:
        packed = {entry.filename: entry.file_size for entry in package.infolist() if not entry.is_dir()}
    assert found.files == packed
    assert set(packed) == {"jobs/train.py", "notes.txt", ".gitignore", "sub/.gitignore", "sub/b.txt"}
    assert not [name for name in packed if "secret" in TREE[name]]


def test_rows_are_largest_first(folder):
    found = survey(str(folder), excludes=())
    sizes = [row["KB"] for row in found.rows()]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(row["files"] for row in found.rows()) == len(found.files)
    assert "MB from" in found.summary()


def test_too_much_is_refused_and_says_what_is_large(folder, monkeypatch):
    (folder / "weights.bin").write_bytes(bytes(3000))
    monkeypatch.setattr(upload, "LIMIT_BYTES", 2000)
    with pytest.raises(ConfigError, match=r"weights\.bin.*\n.*\.rayignore"):
        survey(str(folder))


def test_no_such_folder(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        survey(str(tmp_path / "nowhere"))


def test_the_runtime_environment_of_a_checkout_uses_its_code(tmp_path):
    assert "PYTHONPATH" not in Submission("x", str(tmp_path)).runtime_env()["env_vars"]
    (tmp_path / "platform/tidewheel").mkdir(parents=True)
    found = Submission("x", str(tmp_path), environment={"A": "b"}).runtime_env()
    assert found["env_vars"]["PYTHONPATH"] == "platform"
    assert found["env_vars"]["A"] == "b"
    assert int(found["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > 30
    assert ".env" in found["excludes"]
    assert "working_dir" not in Submission("x", "").runtime_env()
