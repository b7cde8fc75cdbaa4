"""A module of the user's own is trained as a built-in model is; what needs to know its inside is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.train import own_modules
from tests.unit.train.helpers import FileCheckpoints, Script, config, two_processes, write_shards
from tidewheel import jsonlog
from tidewheel.cli import run_command
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import ConfigError
from tidewheel.storage import store
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.run import Run
from tidewheel.train.runtime import Runtime

TINY = "tests.unit.train.own_modules:Tiny"
NEOX = "tests.unit.train.own_modules:NeoX"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("own")
    write_shards(path / "shards")
    write_shards(path / "validation", shards=1, seed=1)
    return path


def of(folder: Path, run: str, *overrides: str, kind: str = TINY) -> TrainConfig:
    return config(folder, run, f"model={{kind: '{kind}'}}", "evaluation.sample_tokens=2", *overrides)


def alone(settings: TrainConfig, file: Path) -> None:
    train(settings, Runtime(checkpoints=FileCheckpoints(file), control=Script()))


def losses(settings: TrainConfig) -> list[float]:
    return [line["loss"] for line in jsonlog.read(store(settings.run_uri), "metrics.jsonl") if "loss" in line]


def saved(file: Path) -> dict[str, np.ndarray]:
    with np.load(file) as values:
        return {name: values[name] for name in values.files if name != "extra"}


def same_in_every_layout(folder: Path, kind: str, layouts: tuple[str, ...]) -> None:
    """Train in one process and in two, and compare losses, parameters and optimizer states bit by bit."""
    reference = of(folder, f"one-{kind[-4:]}", "reproducible=true", kind=kind)
    alone(reference, folder / f"one-{kind[-4:]}.npz")
    expected, values = losses(reference), saved(folder / f"one-{kind[-4:]}.npz")
    assert expected[-1] < expected[0] - 0.02
    for data in layouts:
        name = f"{data}-{kind[-4:]}"
        settings = of(folder, name, "reproducible=true", f"parallel.data={data}", kind=kind)
        two_processes(settings, folder / f"{name}.npz")
        assert losses(settings) == expected, data
        found = saved(folder / f"{name}.npz")
        assert found.keys() == values.keys()
        for tensor, value in values.items():
            assert np.array_equal(found[tensor], value), f"{data} {tensor}"


def test_one_process_and_two_give_the_same_bits(folder):
    same_in_every_layout(folder, TINY, ("ddp", "zero3"))


def test_fast_mode_is_close_and_zero1_too(folder):
    reference = of(folder, "fast")
    alone(reference, folder / "fast.npz")
    settings = of(folder, "fast-zero1", "parallel.data=zero1", "precision=fp32")
    two_processes(settings, folder / "fast-zero1.npz")
    np.testing.assert_allclose(losses(settings), losses(reference), rtol=2e-5)


def test_stopped_on_two_and_resumed_on_one(folder):
    reference = of(folder, "whole", "reproducible=true")
    alone(reference, folder / "whole.npz")
    settings = of(folder, "stopped", "reproducible=true", "parallel.data=zero3")
    two_processes(settings, folder / "stopped.npz", leave=5)
    assert len(losses(settings)) == 5
    train(settings, Runtime(generation=1, checkpoints=FileCheckpoints(folder / "stopped.npz"), control=Script()))
    assert losses(settings) == losses(reference)
    for name, value in saved(folder / "whole.npz").items():
        assert np.array_equal(saved(folder / "stopped.npz")[name], value), name


def test_the_loss_is_torchs_own(folder):
    """Next-token cross-entropy of each document by itself, computed by hand."""
    from tidewheel.models.decoder import next_tokens
    from tidewheel.models.wrapped import Wrapped

    wrapped = Wrapped(own_modules.Tiny(), 28, None, 3)
    torch.manual_seed(0)
    tokens = torch.randint(0, 28, (2, 12))
    segments = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [-1] * 3])
    positions = torch.tensor([[*range(5), *range(7)], [*range(9), 0, 0, 0]])
    total = wrapped(tokens, positions, segments, next_tokens(tokens, segments))
    by_hand = torch.zeros(())
    for row, begin, end in ((0, 0, 5), (0, 5, 12), (1, 0, 9)):
        document = tokens[row:row + 1, begin:end]
        logits = wrapped.module(document, position_ids=torch.arange(end - begin)[None]).logits
        by_hand = by_hand + torch.nn.functional.cross_entropy(logits[0, :-1], document[0, 1:], reduction="sum")
    torch.testing.assert_close(total, by_hand, rtol=1e-5, atol=1e-5)


def test_a_run_with_real_checkpoints_resumes_and_validates(folder, monkeypatch, capsys):
    settings = of(folder, "real", "steps=4")
    fit_local(Run.open(settings))
    again = of(folder, "real", "steps=6")
    fit_local(Run.open(again))
    assert len(losses(again)) == 6
    assert run_command(["evaluate", settings.run_uri]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert run_command(["checkpoint", "export", settings.run_uri, "--output", str(folder / "exported")]) == 2


@pytest.mark.parametrize(("override", "nearest"), [
    ("parallel.tensor=2", "parallel.tensor 1"), ("parallel.pipeline=2", "parallel.pipeline 1"),
    ("parallel.context=2", "parallel.context 1"), ("compile=true", "compile false"),
    ("memory.activation_checkpointing=full", "memory.activation_checkpointing none"), ("adapter=lora", "no adapter"),
    ("parallel={data: zero2, offload: true}", "parallel.offload false"), ("neftune_alpha=5", "neftune_alpha 0"),
    ("precision=fp8", "no precision fp8"), ("objective=reward_model", "an objective of logits")])
def test_what_needs_its_inside_is_refused(folder, override, nearest):
    with pytest.raises(ConfigError, match=f"is a module of your own.*{nearest}|does not have.*{nearest}"):
        of(folder, "refused", "elastic.max_workers=4", override)


def test_settings_of_the_decoder_are_refused(folder):
    with pytest.raises(ConfigError, match=r"dim is a setting of Tidewheel's decoder"):
        config(folder, "refused", f"model={{kind: '{TINY}', dim: 64}}")


@pytest.mark.parametrize(("kind", "message"), [
    ("Leaky", "sees earlier documents of its row, and takes no position_ids"), ("Ahead", "sees those after it"),
    ("Dropping", "drops out with p = 0.1"), ("Narrow", "forward returned")])
def test_modules_that_would_train_wrongly_are_refused_before_a_step(folder, kind, message):
    settings = of(folder, f"wrong-{kind}", kind=f"tests.unit.train.own_modules:{kind}")
    with pytest.raises(ConfigError, match=message):
        alone(settings, folder / "wrong.npz")
    assert losses(settings) == []


def test_documents_may_be_ignored_knowingly(folder):
    settings = config(folder, "knowing", "model={kind: 'tests.unit.train.own_modules:Leaky', "
                                         "attend_across_documents: true}", "evaluation.sample_tokens=2", "steps=2")
    alone(settings, folder / "knowing.npz")
    assert len(losses(settings)) == 2


def test_flops_are_told_or_there_is_no_mfu():
    from tidewheel.train.metrics.meter import Meter

    def mfu(model: own_modules.Tiny) -> float | None:
        meter = Meter(1, 1, 1, torch.device("cpu"), model.flops_per_token(28, 16), peak=1000.0)
        line = meter.step(1, tokens=5, seconds=1.0, waited=0.0)
        assert line is not None
        return line.get("mfu")

    assert mfu(own_modules.Tiny()) is None
    assert mfu(own_modules.Tiny(training_flops_per_token=120.0)) == pytest.approx(0.6)


@pytest.mark.long
def test_a_model_of_transformers_in_every_layout(folder):
    pytest.importorskip("transformers")
    same_in_every_layout(folder, NEOX, ("ddp", "zero3"))


@pytest.mark.long
def test_the_first_loss_of_a_model_of_transformers_is_transformers_own(folder):
    """Of documents one by one, with the labels that transformers shifts itself."""
    pytest.importorskip("transformers")
    from tidewheel.models.decoder import next_tokens
    from tidewheel.models.wrapped import Wrapped

    wrapped: Any = Wrapped(own_modules.NeoX(), 28, None, 0)
    tokens = torch.randint(0, 28, (1, 16), generator=torch.Generator().manual_seed(0))
    segments = torch.tensor([[0] * 7 + [1] * 9])
    positions = torch.tensor([[*range(7), *range(9)]])
    total = wrapped(tokens, positions, segments, next_tokens(tokens, segments))
    theirs = sum(wrapped.module(input_ids=part, labels=part).loss * (part.shape[1] - 1)
                 for part in (tokens[:, :7], tokens[:, 7:]))
    torch.testing.assert_close(total, theirs, rtol=1e-5, atol=1e-5)
