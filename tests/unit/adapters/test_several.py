"""Several adapters on one base in one process: texts and scores are those of each adapter alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.unit.adapters.test_runs import run, settings
from tests.unit.train.helpers import write_shards
from tidewheel.checkpoint import adapter_files
from tidewheel.cli import run_command
from tidewheel.errors import ConfigError, InputError
from tidewheel.inference.adapters import named, read_prompts
from tidewheel.inference.evaluate import Evaluator
from tidewheel.inference.writer import Writer

SETTINGS = {"low": ("adapter.rank=2",), "factors": ('adapter={"kind": "ia3"}',)}
SAMPLING = {"tokens": 12, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the runs `base`, `low` and `factors`, and `other`, an adapter of another base."""
    path = tmp_path_factory.mktemp("several")
    write_shards(path / "shards")
    write_shards(path / "validation", shards=1, rows=4, seed=1)
    run(settings(path, "base", "adapter=null"))
    for name, more in SETTINGS.items():
        run(settings(path, name, f"model.init_from={path}/runs/base", "optimizer.learning_rate=0.1", *more))
    run(settings(path, "other", "steps=1"))
    return path


def test_each_prompt_is_continued_with_its_own_adapter(folder: Path, capsys: pytest.CaptureFixture[str]):
    adapter_files.export_adapter(f"{folder}/runs/low", f"{folder}/peft")
    prompts = folder / "prompts.jsonl"
    requests = [("ab", "low"), ("cd", ""), ("cd", "factors"), ("cd", "low"), ("cd", "copy")]
    prompts.write_text("\n".join(json.dumps({"prompt": text, "adapter": name}) for text, name in requests))
    chosen = {"low": f"{folder}/runs/low", "factors": f"{folder}/runs/factors", "copy": f"{folder}/peft"}
    options = [part for name, uri in chosen.items() for part in ("--adapter", f"{name}={uri}")]
    assert run_command(["generate", f"{folder}/runs/base", "--prompts", str(prompts), *options, "--tokens", "12",
                        "--temperature", "1", "--top-k", "0", "--seed", "3"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for (text, name), line in zip(requests, lines, strict=True):
        alone = Writer.open(f"{folder}/runs/{'low' if name == 'copy' else name or 'base'}")
        assert line == {"prompt": text, "adapter": name, "text": alone.write(text, **SAMPLING)}
    assert len({line["text"] for line in lines if line["prompt"] == "cd"}) == 3
    assert run_command(["generate", f"{folder}/runs/base", "--prompt", "cd", *options[:4], "--tokens", "12",
                        "--temperature", "1", "--top-k", "0", "--seed", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown == f"[low] {lines[3]['text']}\n[factors] {lines[2]['text']}\n"


def test_logits_have_the_bits_of_the_adapter_alone(folder: Path):
    several = Writer.open(f"{folder}/runs/base", adapters={name: f"{folder}/runs/{name}" for name in SETTINGS})
    tokens = torch.arange(2, 12)[None]
    inputs = tokens, torch.arange(10)[None], torch.zeros_like(tokens)
    for name in ("", *SETTINGS):
        alone = Writer.open(f"{folder}/runs/{name or 'base'}")
        with several.using(name):
            assert torch.equal(several.model(*inputs), alone.model(*inputs)), name


def test_evaluate_shows_the_losses_with_each_adapter(folder: Path, capsys: pytest.CaptureFixture[str]):
    options = [part for name in SETTINGS for part in ("--adapter", f"{name}={folder}/runs/{name}")]
    assert run_command(["evaluate", f"{folder}/runs/base", *options, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    found = {"base": shown["loss"], **{name: scores["loss"] for name, scores in shown["adapters"].items()}}
    assert found == {name: Evaluator(f"{folder}/runs/{name}").evaluate(f"{folder}/runs/{name}").loss
                     for name in ("base", *SETTINGS)}
    assert run_command(["evaluate", f"{folder}/runs/base", *options]) == 0
    table = capsys.readouterr().out
    assert all(word in table for word in ("(none)", *SETTINGS))
    assert run_command(["evaluate", f"{folder}/runs/low", *options[:2]]) == 2


def test_adapters_that_do_not_belong_are_refused(folder: Path):
    base = f"{folder}/runs/base"
    with pytest.raises(ConfigError, match=r"other was trained on initial values .* but .*runs/base.* has the hash"):
        Writer.open(base, adapters={"other": f"{folder}/runs/other"})
    with pytest.raises(ConfigError, match="holds a whole model"):
        Writer.open(base, adapters={"base": base})
    with pytest.raises(ConfigError, match="not NAME=URI"):
        named(["low=runs/low", "low=runs/other"])
    prompts = folder / "wrong.jsonl"
    prompts.write_text('{"prompt": "ab", "adapter": "lwo"}\n')
    with pytest.raises(InputError, match="no adapter 'lwo'; given: low"):
        read_prompts(str(prompts), ["low"])
