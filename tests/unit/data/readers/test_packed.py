"""Opening source files: errors of damaged files differ from errors of storage."""

from __future__ import annotations

import pytest

from tidewheel.data.readers.packed import UnreadableFile, file_errors, opened
from tidewheel.errors import InputError, StorageError
from tidewheel.storage import store


@pytest.mark.parametrize(("error", "becomes"), [
    (OSError("broken"), UnreadableFile), (EOFError(), UnreadableFile), (MemoryError(), InputError),
    (FileNotFoundError(), InputError), (StorageError("the store failed"), StorageError)])
def test_a_damaged_file_raises_another_error_than_failing_storage(tmp_path, error, becomes):
    with pytest.raises(becomes), file_errors(store(tmp_path), "a.jsonl"):
        raise error


def test_a_missing_file_raises_input_error(tmp_path):
    with pytest.raises(InputError, match="has been removed"), opened(store(tmp_path), "none.gz") as stream:
        stream.read()
