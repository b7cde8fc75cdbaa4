"""Private cache and temporary folders: those of other users are refused, and those of killed runs are removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from blake3 import blake3

from tidewheel import storage
from tidewheel.errors import StorageError
from tidewheel.private_folders import (
    is_private,
    open_file,
    private_folder,
    remove_abandoned,
    temporary_folder,
    user_folder,
)
from tidewheel.shards.cache import ShardFiles
from tidewheel.shards.manifest import ShardInfo

CONTENT = b"the shard's content" * 1000


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def shard(content: bytes = CONTENT) -> ShardInfo:
    return ShardInfo("a.arrow", rows=1, tokens=1, bytes=len(content), hash="blake3-" + blake3(content).hexdigest())


class Remote:
    """A store without local files."""

    def __init__(self, store, content=CONTENT):
        self._store = store
        self._store.write("a.arrow", content)
        self.reads = 0

    def local_path(self, key):
        return None

    def at(self, key):
        return key

    def open(self, key):
        self.reads += 1
        return self._store.open(key)


@pytest.mark.parametrize("spoil", [
    lambda path: path.mkdir(mode=0o777) or path.chmod(0o777),
    lambda path: path.symlink_to(path.parent),
    lambda path: path.write_text(""),
    pytest.param(lambda path: path.mkdir() or os.chown(path, 12345, -1),
                 marks=pytest.mark.skipif(os.getuid() != 0, reason="needs root")),
], ids=["writable by all", "a link", "a file", "another user's"])
def test_a_folder_that_someone_else_made_is_refused(temporary, spoil):
    spoil(temporary / f"tidewheel-shards-{os.getuid()}")
    with pytest.raises(StorageError, match="must belong to this user"):
        user_folder("shards")
    with pytest.raises(StorageError), ShardFiles(Remote(storage.store(temporary / "remote"))).opened(shard()):
        pass


def test_a_shared_folder_gets_a_private_subfolder(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    own = private_folder(shared)
    assert own.parent == shared.resolve()
    assert is_private(own, secret=True)
    assert private_folder(tmp_path / "new") == (tmp_path / "new").resolve()


def test_only_this_user_can_read_copies(tmp_path):
    files = ShardFiles(Remote(storage.store(tmp_path / "remote")), tmp_path / "cache")
    with files.opened(shard()) as (path, readable):
        assert readable.read_bytes() == CONTENT
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["a.arrow"]


def test_the_bytes_read_are_the_bytes_hashed(tmp_path):
    remote = Remote(storage.store(tmp_path / "remote"))
    files = ShardFiles(remote, tmp_path / "cache")
    for _ in range(2):  # a download, then the cached copy
        with files.opened(shard()) as (path, readable):
            path.unlink()
            path.write_bytes(b"replaced")
            assert readable.read_bytes() == CONTENT
        path.unlink()
        with files.opened(shard()):
            pass
    assert remote.reads == 3


def test_a_copy_that_others_could_have_written_is_downloaded_again(tmp_path):
    remote = Remote(storage.store(tmp_path / "remote"))
    files = ShardFiles(remote, tmp_path / "cache")
    with files.opened(shard()) as (path, _):
        path.chmod(0o666)
    with files.opened(shard()) as (path, _):
        assert path.stat().st_mode & 0o777 == 0o600
    assert remote.reads == 2


def test_links_are_not_followed(tmp_path):
    (tmp_path / "target").write_bytes(CONTENT)
    (tmp_path / "a.arrow").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        open_file(tmp_path / "a.arrow")


def test_a_killed_run_leaves_its_folder_to_the_next(temporary):
    code = ("import os, signal, sys; from tidewheel.private_folders import temporary_folder\n"
            "with temporary_folder('train') as folder:\n"
            "    (folder / 'state').write_text('x'); print(folder, flush=True)\n"
            "    sys.stdin.read() if len(sys.argv) > 1 else os.kill(os.getpid(), signal.SIGKILL)")
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": ":".join(sys.path)}
    alive = subprocess.Popen([sys.executable, "-c", code, "stay"], env=environment, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    assert alive.stdout is not None
    standing = Path(alive.stdout.readline().strip())
    killed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL
    abandoned = Path(killed.stdout.strip())
    foreign = temporary / "tidewheel-foreign"
    foreign.mkdir(mode=0o700)
    assert abandoned.exists()
    with temporary_folder("train") as own:
        assert not abandoned.exists()
        assert standing.exists(), "the process that made it is alive"
        assert foreign.exists(), "the process that made it is unknown, and may be alive"
        assert own.stat().st_mode & 0o777 == 0o700
        assert remove_abandoned() == []
    assert not own.exists()
    alive.communicate("")
    assert not standing.exists()


def test_a_killed_download_is_removed_by_the_next(tmp_path):
    cache = private_folder(tmp_path / "cache")
    (cache / ".tmp-killed").write_bytes(b"half")
    (cache / ".tmp-killed").chmod(0o600)
    with ShardFiles(Remote(storage.store(tmp_path / "remote")), cache).opened(shard()):
        assert sorted(path.name for path in cache.iterdir()) == ["a.arrow"]
