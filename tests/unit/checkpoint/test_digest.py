"""The digest of a checkpoint depends only on its values."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from tests.unit.checkpoint.helpers import manager, state
from tidewheel.checkpoint.digest import digest
from tidewheel.cli import run_command
from tidewheel.errors import CheckpointError
from tidewheel.storage import store


def saved(root: Path, seed: int = 1) -> str:
    """Save a checkpoint of `state(seed)` and return its run's URI."""
    manager(store(root / "checkpoints"), asynchronous=False).save(1, state(seed), {"time": str(root)})
    return str(root)


def expected(values: dict[str, dict[str, torch.Tensor]]) -> str:
    """Compute the digest from tensors in memory, as the docstring of `digest` defines it."""
    sha256 = hashlib.sha256()
    for path, tensor in sorted((f"{group}/{name}", t) for group in values for name, t in values[group].items()):
        sha256.update(f"{path} {str(tensor.dtype)[6:]} {list(tensor.shape)}\n".encode())
        sha256.update(bytes(tensor.reshape(-1).view(torch.uint8).tolist()))
    return sha256.hexdigest()


def test_equal_values_have_equal_digests(tmp_path: Path):
    first, second = (digest(saved(tmp_path / name)) for name in ("a", "b"))
    assert first == second
    assert first.step == 1
    assert first.checkpoint != second.checkpoint
    assert first.state == expected(state(1))
    assert set(first.groups) == {"model", "optimizer"}


def test_one_changed_bit_changes_the_digest(tmp_path: Path):
    values = state(1)
    values["model"]["wide"].view(torch.int32)[2, 1, 3] ^= 1
    manager(store(tmp_path / "b" / "checkpoints"), asynchronous=False).save(1, values, {})
    first, second = digest(saved(tmp_path / "a")), digest(str(tmp_path / "b"))
    assert first != second
    assert first.state != second.state
    assert first.groups["model"] != second.groups["model"]
    assert first.groups["optimizer"] == second.groups["optimizer"]


def test_a_damaged_checkpoint_has_no_digest(tmp_path: Path):
    run = saved(tmp_path)
    [file] = Path(run).rglob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(CheckpointError):
        digest(run)


def test_the_command_prints_the_digest(tmp_path: Path, capsys):
    expected_digest = digest(saved(tmp_path))
    assert run_command(["checkpoint", "digest", str(tmp_path / "checkpoints" / "step_00000001"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == expected_digest.state
    assert run_command(["checkpoint", "digest", str(tmp_path)]) == 0
    assert expected_digest.groups["model"] in capsys.readouterr().out
