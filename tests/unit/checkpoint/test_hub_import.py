"""Importing a model of the Hugging Face hub by its name, from a server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.hub_server import HubServer
from tests.oracles import ORACLES
from tidewheel import storage
from tidewheel.checkpoint import conversion
from tidewheel.checkpoint.manifest import read_manifest
from tidewheel.errors import CheckpointError, StorageError
from tidewheel.retry import RetryPolicy
from tidewheel.stores.hub import calls
from tidewheel.stores.hub.uri import parse

NAME = "hf://owner/tiny-model"


@pytest.fixture(autouse=True)
def short_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "POLICY", RetryPolicy(request_seconds=5, budget_seconds=0.1, pause_seconds=0.001))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setenv("HF_TOKEN", "")
        yield running


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    ORACLES["gpt2"].build().save_pretrained(folder)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    checkpoints = storage.store(run).child("checkpoints")
    manifest = read_manifest(checkpoints, "step_00000000")
    names = [name.removeprefix("model/") for name in manifest.tensors]
    return conversion.read_weights(checkpoints, "step_00000000", manifest, names)


def test_a_model_is_imported_by_name_at_the_commit_of_its_branch(server: HubServer, saved: Path, tmp_path: Path):
    first = server.commit("owner/tiny-model", files_of(saved))
    made = conversion.import_(NAME, str(tmp_path / "by_name"))
    assert made.source == f"{NAME}@{first}"
    assert f"parameters of {NAME}@{first}" in made.settings()
    manifest = read_manifest(storage.store(tmp_path / "by_name").child("checkpoints"), "step_00000000")
    assert manifest.extra["imported"]["from"] == f"{NAME}@{first}"
    conversion.import_(str(saved), str(tmp_path / "from_folder"))
    from_folder = weights_of(tmp_path / "from_folder")
    for name, value in weights_of(tmp_path / "by_name").items():
        assert torch.equal(value, from_folder[name]), name

    server.commit("owner/tiny-model", {**files_of(saved), "config.json": b"{}"})  # the branch moves on
    again = conversion.import_(f"{NAME}@{first}", str(tmp_path / "pinned"))
    assert again.source == f"{NAME}@{first}"
    assert again.config == made.config


def test_pickled_weights_and_missing_models_are_refused(server: HubServer, saved: Path, tmp_path: Path):
    pickled = {"config.json": files_of(saved)["config.json"], "pytorch_model.bin": b"pickle"}
    server.commit("owner/tiny-model", pickled)
    with pytest.raises(CheckpointError, match="there is neither") as refused:
        conversion.import_(NAME, str(tmp_path / "run"))
    assert "pickled weights are not loaded" in refused.value.fix
    assert not any("pytorch_model.bin" in request for request in server.requests)
    with pytest.raises(StorageError, match="there is no such model"):
        conversion.import_("hf://owner/other", str(tmp_path / "run"))
    with pytest.raises(StorageError, match="the model has no such revision"):
        conversion.import_(f"{NAME}@v2", str(tmp_path / "run"))


def test_the_forms_of_a_uri():
    model, data = parse("hf://owner/name@v1/sub"), parse("hf://datasets/owner/name@v1/sub")
    assert (model.kind, model.id, model.revision, model.path) == ("model", "owner/name", "v1", "sub")
    assert (data.kind, data.id, data.revision, data.path) == ("dataset", "owner/name", "v1", "sub")
    assert str(model.at("v2")) == "hf://owner/name@v2/sub"
    assert str(data.at("v2")) == "hf://datasets/owner/name@v2/sub"
    with pytest.raises(StorageError, match="not the URI of a data set or a model"):
        parse("hf://datasets/owner")
