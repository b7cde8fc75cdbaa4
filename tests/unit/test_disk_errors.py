"""Tests that errors of the operating system about files become StorageErrors that say what to do."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest

from tidewheel import time_limit
from tidewheel.disk_errors import Guarded, closing, readable, unlistable, writable
from tidewheel.errors import StorageAwayError, StorageError

PATH = Path("/somewhere/file")


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number), str(PATH))


@pytest.mark.parametrize(("number", "kind", "fix"), [
    (errno.ENOSPC, StorageError, "free some space"), (errno.EDQUOT, StorageError, "raise the quota"),
    (errno.EROFS, StorageError, "read-only"), (errno.EACCES, StorageError, "change its owner"),
    (errno.ESTALE, StorageAwayError, "mount the file system again"), (errno.EIO, StorageAwayError, "mount the file"),
    (errno.ENAMETOOLONG, StorageError, "a folder you own")])
def test_each_failed_write_says_what_to_do(number: int, kind: type[StorageError], fix: str):
    with pytest.raises(StorageError) as raised, writable(PATH):
        raise error(number)
    assert type(raised.value) is kind
    assert raised.value.where == str(PATH)
    assert fix in raised.value.fix


@pytest.mark.parametrize(("number", "what"), [
    (errno.EISDIR, "a folder, not a file"), (errno.EACCES, "no permission to read"), (errno.EIO, "cannot read")])
def test_each_failed_read_says_what_is_wrong(number: int, what: str):
    with pytest.raises(StorageError, match=what), readable(PATH):
        raise error(number)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR])
def test_a_missing_file_stays_a_missing_file(number: int):
    with pytest.raises(FileNotFoundError), readable(PATH):
        raise error(number)


def test_a_full_disk_at_the_end_of_a_write_does_not_hide_the_first_error():
    class Full(io.BytesIO):
        def close(self) -> None:
            super().close()
            raise error(errno.ENOSPC)

    with pytest.raises(ZeroDivisionError), closing(Full(), PATH):
        raise ZeroDivisionError
    with pytest.raises(StorageError, match="cannot write"), closing(Full(), PATH):
        pass


def test_a_write_to_a_full_device_fails_with_its_path():
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(StorageError, match="cannot write") as raised:
        Guarded(full, PATH).write(b"data")
    assert raised.value.where == str(PATH)


def test_a_write_stops_at_the_time_limit_of_its_thread():
    limit = time_limit.TimeLimit(what="the save")
    limit.end("the generation has ended")
    sink = io.BytesIO()
    with limit.applied(), pytest.raises(StorageAwayError, match="the generation has ended"):
        Guarded(sink, PATH).write(b"data")
    assert sink.getvalue() == b""


def test_a_folder_that_is_gone_is_empty_and_one_that_cannot_be_read_is_not():
    unlistable(error(errno.ENOENT))
    unlistable(error(errno.ENOTDIR))
    with pytest.raises(StorageError, match="cannot list"):
        unlistable(error(errno.EACCES))
