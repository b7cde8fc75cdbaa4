"""Tests of prompts that are answered while a model trains: the model's own answers, each once, and no other bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.train.chat_run import chat_config, chats, write_chats
from tests.unit.train.helpers import FileCheckpoints, Replaced, Script, config, two_processes, write_shards
from tidewheel import jsonlog, storage
from tidewheel.data.tokenize.chat import ChatTemplate
from tidewheel.errors import ConfigError, InputError
from tidewheel.inference.answers import answer
from tidewheel.inference.chat import encode_messages
from tidewheel.models.decoder import Decoder
from tidewheel.report import answers as report
from tidewheel.shards.manifest import read_manifest
from tidewheel.shards.tokenizer import of_manifest
from tidewheel.train.answers import ANSWERS, read_prompts
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.runtime import Runtime

pytestmark = pytest.mark.timeout(900)
ASKED = [{"role": "user", "content": "ask 3"}]
PROMPTS = [{"messages": ASKED}, {"prompt": "ask <b>"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a chat set and prompts."""
    folder = tmp_path_factory.mktemp("answers")
    write_chats(folder, chats(60), {"sequence_length": 64})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    (folder / "runs").mkdir()
    return folder


def settings(folder: Path, run: str, *overrides: str) -> TrainConfig:
    """Return 6 steps with answers at steps 0, 2, 4 and 6, and checkpoints at 3 and 6."""
    return chat_config(folder, run, "steps=6", "evaluation.every_steps=2", "reproducible=true",
                       f"evaluation.answers.prompts={folder}/prompts.jsonl", "evaluation.answers.new_tokens=6",
                       *overrides)


def alone(wanted: TrainConfig, generation: int = 0, **script: int) -> None:
    saved = Path(wanted.run.uri) / f"{wanted.run.id}.npz"
    train(wanted, Runtime(generation=generation, control=Script(**script), checkpoints=FileCheckpoints(saved),
                          answerer=answer))


def lines(wanted: TrainConfig) -> list[dict[str, Any]]:
    """Return answers.jsonl without times."""
    read = jsonlog.read(storage.store(wanted.run_uri), ANSWERS)
    return [{name: value for name, value in line.items() if name != "time"} for line in read]


def state(folder: Path, run: str) -> dict[str, np.ndarray]:
    with np.load(folder / "runs" / f"{run}.npz") as saved:
        return {name: saved[name] for name in saved if name != "extra"}


@pytest.fixture(scope="module")
def whole(folder: Path) -> TrainConfig:
    wanted = settings(folder, "whole")
    alone(wanted)
    return wanted


def test_the_answers_are_the_models_most_likely_tokens(folder: Path, whole: TrainConfig):
    assert [(line["step"], "messages" in line) for line in lines(whole)] == [
        (step, is_chat) for step in (0, 2, 4, 6) for is_chat in (True, False)]
    manifest = read_manifest(storage.store(folder / "out" / "shards"))
    tokenizer = of_manifest(storage.store(folder / "out" / "shards"), manifest.tokenizer)
    template = ChatTemplate(manifest.chat_template, tuple(tokenizer.special))
    model = Decoder(whole.model, manifest.vocabulary_size)
    model.load_state_dict({name.removeprefix("model/"): torch.from_numpy(value)
                           for name, value in state(folder, "whole").items() if name.startswith("model/")})
    ids = encode_messages(tokenizer, template, ASKED, where="test")
    begin, turn = len(ids), tokenizer.special["<|im_end|>"]
    with torch.no_grad():
        while len(ids) < begin + 6 and ids[-1] not in (turn, tokenizer.eos):
            tokens = torch.tensor([ids])
            ids.append(int(model(tokens, torch.arange(len(ids))[None], torch.zeros_like(tokens))[0, -1].argmax()))
    expected = tokenizer.decode([token for token in ids[begin:] if token not in (turn, tokenizer.eos)])
    assert lines(whole)[-2]["answer"] == expected


def test_answers_change_no_bit(folder: Path, whole: TrainConfig):
    alone(settings(folder, "silent", "evaluation.answers.prompts=''"))
    with_answers, without = state(folder, "whole"), state(folder, "silent")
    assert with_answers.keys() == without.keys()
    for name, value in without.items():
        assert np.array_equal(value, with_answers[name]), name
    assert not (folder / "runs" / "silent" / ANSWERS).exists()
    assert whole.recipe_hash() == settings(folder, "x", "evaluation.answers.prompts=''").recipe_hash()


def test_killed_and_resized_runs_have_each_answer_once(folder: Path, whole: TrainConfig):
    killed, resized = settings(folder, "killed"), settings(folder, "resized")
    with pytest.raises(Replaced):
        alone(killed, die=5)
    assert [line["step"] for line in lines(killed)][-1] == 4
    alone(killed, generation=1)  # from step 3
    two_processes(resized, folder / "runs" / "resized.npz", leave=3)
    alone(resized, generation=1)
    assert lines(killed) == lines(whole)
    assert lines(resized) == lines(whole)


@pytest.mark.parametrize(("content", "message"), [
    ("", "0 prompts"), ("{", "not JSON"), ('{"text": "a"}', "neither"), ('{"messages": []}', "neither")])
def test_wrong_files_are_refused(tmp_path: Path, content: str, message: str):
    (tmp_path / "prompts.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(str(tmp_path / "prompts.jsonl"))


def test_what_cannot_be_answered_is_refused_before_a_step(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="no file"):
        alone(settings(folder, "wrong", f"evaluation.answers.prompts={folder}/none.jsonl"))
    with pytest.raises(ConfigError, match="separate false"):
        settings(folder, "wrong", "evaluation.separate=true")
    write_shards(tmp_path / "shards", rows=20)
    with pytest.raises(ConfigError, match="no chat template"):
        alone(config(tmp_path, "wrong", "data.validation=''", f"evaluation.answers.prompts={folder}/prompts.jsonl"))
    (folder / "long.jsonl").write_text(json.dumps({"prompt": "ask 3 " * 40}))
    long = settings(folder, "long", f"evaluation.answers.prompts={folder}/long.jsonl")
    with pytest.raises(InputError, match="the model's context 64"):
        alone(long)
    assert not jsonlog.read(storage.store(long.run_uri), "metrics.jsonl")


def test_the_report_has_a_row_for_each_prompt_and_escapes_it(whole: TrainConfig):
    (table,) = report.section(lines(whole))
    assert table.count("<tr>") == 3
    assert "ask &lt;b&gt;" in table
    assert "<b>user: </b>" in table
    assert [f"step {step}" in table for step in (0, 2, 4, 6)] == [True] * 4
    assert report.section([]) == []
    tall = report.section([{"step": 0, "id": "a", "prompt": "ask", "answer": "the\n" * 40}])[0]
    assert (tall.count("the\n"), tall.count("…")) == (report.MAX_LINES - 1, 1)
    assert report.chosen_steps(range(0, 101, 10)) == [0, 20, 50, 80, 100]
