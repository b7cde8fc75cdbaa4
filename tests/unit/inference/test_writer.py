"""Tests of text from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.train.helpers import config, write_shards
from tidewheel.cli import run_command
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import CheckpointError, ConfigError
from tidewheel.inference.writer import Writer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("generation")
    write_shards(folder / "shards")
    settings = config(folder, "run", "data.validation=''", "steps=6", "evaluation.temperature=0")
    fit_local(settings)
    return settings.run_uri


def test_the_command_writes_the_sample_of_the_run(run: str, capsys: pytest.CaptureFixture[str]):
    from tidewheel.storage import store
    from tidewheel.train.record import read_result

    result = read_result(store(run))
    assert result is not None
    assert run_command(["generate", run, "--prompt", "abc", "--tokens", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == result.sample + "\n"


def test_a_seed_determines_the_text_with_and_without_cache(run: str):
    writer = Writer.open(run + "/checkpoints/step_00000003", device="cpu")
    assert writer.checkpoint.endswith("step_00000003")
    options = {"tokens": 40, "temperature": 1.0, "top_k": 0, "top_p": 0.9}
    one = writer.write("abc", seed=1, **options)
    assert one == writer.write("abc", seed=1, cache=False, **options)
    assert len({writer.write("abc", seed=seed, **options) for seed in range(4)}) > 1


def test_a_missing_checkpoint_or_tokenizer_is_refused(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        Writer.open(str(tmp_path))
    with pytest.raises(ConfigError, match="no such file"):
        Writer.open(run, tokenizer=str(tmp_path / "tokenizer.json"))
    assert run_command(["generate", run, "--top-p", "0"]) == 2
