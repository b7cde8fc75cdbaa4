"""Tests of optimizers and schedules as parts: users bring their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pydantic
import pytest
import torch

import tidewheel
import tidewheel as tw
from tests.unit.train.optim.test_optimizers import Weights
from tidewheel import parts, rewards
from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.parts import Kind, Part
from tidewheel.plan.layout import Job
from tidewheel.train import callbacks, objectives, optimizers, schedules, trackers
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.starts import settings_of
from tidewheel.workflow.model_kinds import TrainKind

PACKAGE = Path(tidewheel.__file__).parent
KINDS = [optimizers.KIND, schedules.KIND, objectives.KIND, trackers.KIND, callbacks.KIND, rewards.KIND]

OWN = '''
import torch
import tidewheel as tw


class Momentum(tw.Optimizer):
    STATE = ("momentum_buffer",)
    NOT_REPRODUCIBLE = ""
    learning_rate: float = 0.1
    momentum: float = 0.9

    def build(self, groups):
        return torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.momentum, foreach=True)


class Forgetful(tw.Optimizer):
    "Does not say what it keeps."
    NOT_OFFLOADABLE = "needs its device"

    def build(self, groups):
        return torch.optim.SGD(groups, lr=self.learning_rate, momentum=0.9)


class Halves(tw.Schedule):
    every: int = 10

    def factor(self, done, total, start):
        return 0.5 ** ((done - start) // self.every)
'''


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.noun)
def test_a_part_in_the_package_is_offered_by_it(kind: Kind[Part]):
    offered = {value for value in vars(sys.modules[kind.package]).values()
               if isinstance(value, type) and issubclass(value, kind.base) and value is not kind.base}
    assert {parts.name_of(part) for part in offered} == set(kind.built_in())


def test_configuration_does_not_import_torch():
    code = "import sys, tidewheel.train.config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(PACKAGE.parent)})


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a user's module into the working folder."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def config(**values: object) -> TrainConfig:
    return build(TrainConfig, values)


def test_a_part_is_given_by_name_settings_or_object(own: str):
    named = config(optimizer=f"{own}:Momentum", schedule={"kind": f"{own}:Halves", "every": 3, "warmup_steps": 0})
    assert type(named.optimizer).__name__ == "Momentum"
    assert [named.schedule.learning_rate(step, 6, 1.0) for step in range(1, 7)] == [1, 1, 0.5, 0.5, 0.5, 0.25]
    assert config(optimizer={"kind": "lion", "learning_rate": 1e-4}) == TrainConfig(
        optimizer=optimizers.Lion(learning_rate=1e-4))
    assert build(TrainConfig, named.canonical()) == named, "what is written down is read as the same"
    assert build(TrainConfig, {}, ["optimizer.kind=lion"]).optimizer == optimizers.Lion()
    assert build(TrainConfig, {"optimizer": {"epsilon": 1e-6}}, [
        "optimizer=lion", "optimizer.learning_rate=1e-4"]).optimizer == optimizers.Lion(learning_rate=1e-4)


def test_the_recipe_hash_depends_on_the_source_of_a_users_part(own: str):
    with_own = config(optimizer=f"{own}:Momentum")
    assert with_own.decisive()["optimizer"]["code"] == parts.source_hash(type(with_own.optimizer))
    assert config(optimizer={"learning_rate": 1e-4}).decisive() == {"optimizer": {"learning_rate": 1e-4}}, (
        "the default's name goes without saying: recipes made before parts keep their hash")
    assert config().recipe_hash() == config(optimizer="adamw", schedule="cosine").recipe_hash()


def test_reproducibility_and_state_bytes_come_from_the_part(own: str):
    momentum = config(optimizer=f"{own}:Momentum", reproducible=True)
    assert Job(momentum, 128, 16).optimizer_bytes == 4
    with pytest.raises(ConfigError, match=r"updates each element by itself.*choice: adam, adamw, ademamix, lion"):
        config(optimizer=f"{own}:Forgetful", reproducible=True)
    assert config(optimizer="adamw8bit", parallel={"data": "zero3", "offload": True}).parallel.offload
    with pytest.raises(ConfigError, match=r"Forgetful needs its device.*choice: optimizer.kind adafactor, adam"):
        config(optimizer=f"{own}:Forgetful", parallel={"data": "zero3", "offload": True})


def test_a_users_optimizer_saves_and_restores(own: str):
    rule = config(optimizer=f"{own}:Momentum").optimizer
    weights = Weights()
    optimizer = build_optimizer(weights, rule)
    weights.take(optimizer, range(3))
    saved = {name: tensor.clone() for name, tensor in training_state(weights, optimizer)["optimizer"].items()}
    assert set(saved) == {f"{name}.momentum_buffer" for name in weights.held}
    weights.take(optimizer, range(3, 4))
    again = Weights()
    restored = build_optimizer(again, rule)
    for name, tensor in training_state(again, restored)["optimizer"].items():
        tensor.copy_(saved[name])
    restored.restored()
    for name, tensor in training_state(again, restored)["optimizer"].items():
        assert torch.equal(tensor, saved[name])


def test_undeclared_optimizer_state_is_refused_when_a_checkpoint_is_saved(own: str):
    weights = Weights()
    optimizer = build_optimizer(weights, config(optimizer=f"{own}:Forgetful").optimizer)
    training_state(weights, optimizer)
    weights.take(optimizer, range(1))
    with pytest.raises(ConfigError, match=r"keeps momentum_buffer of embedding\.weight"):
        training_state(weights, optimizer)


def test_an_optimizer_that_omits_parameters_is_refused():
    class Some(optimizers.AdamW):
        def build_all(self, named):
            return super().build_all(named[1:])

    with pytest.raises(ConfigError, match=r"updates embedding\.weight 0 times"):
        build_optimizer(Weights(), Some())


@pytest.mark.parametrize(("settings", "message"), [
    ({"optimizer": {"learning_rat": 1}}, "unknown key 'optimizer.learning_rat', did you mean 'learning_rate'"),
    ({"optimizer": {"kind": "lion", "momentum": 0.9}}, "unknown key 'optimizer.momentum'"),
    ({"optimizer": {"kind": "lyon"}}, "there is no optimizer 'lyon'; did you mean 'lion'"),
    ({"optimizer": {"learning_rate": -1}}, "optimizer.learning_rate: Input should be greater than 0"),
    ({"schedule": {"kind": "cosin"}}, "there is no schedule 'cosin'; did you mean 'cosine'"),
    ({"optimizer": "no_such_module:Optimizer"}, "there is no module 'no_such_module'"),
    ({"optimizer": "tests.unit.train.optim.test_parts:Path"}, "'Path' is no optimizer"),
    ({"optimizer": 3}, "optimizer: Input should be an instance of Optimizer"),
])
def test_an_error_names_the_wrong_setting(settings: dict[str, object], message: str):
    with pytest.raises(ConfigError) as error:
        build(TrainConfig, settings)
    assert message in str(error.value)


def test_a_users_learning_rate_must_be_positive(own: str):
    with pytest.raises(pydantic.ValidationError, match="greater than 0"):
        optimizers.KIND.build(f"{own}:Momentum", {"learning_rate": 0})


def test_a_part_of_an_installed_package_is_found_by_name(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    described = tmp_path / "offers-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: offers\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[tidewheel.optimizers]\nmomentum = {own}:Momentum\n")
    parts._entry_points.cache_clear()
    try:
        offered = config(optimizer={"kind": "momentum", "learning_rate": 0.2})
        assert offered == config(optimizer={"kind": f"{own}:Momentum", "learning_rate": 0.2})
        assert "momentum" in optimizers.KIND.names()
    finally:
        parts._entry_points.cache_clear()


def test_an_error_in_a_users_part_is_reported_with_file_and_line(own: str, tmp_path: Path):
    (tmp_path / f"{own}_2.py").write_text(
        "import tidewheel as tw\n\n\nclass Wrong(tw.Optimizer):\n    def build(self, groups):\n"
        "        return groups.nothing\n\n\nclass Below(tw.Schedule):\n    def factor(self, done, total, start):\n"
        "        return 1 / (done - 3) if done < 5 else -0.5\n")
    with pytest.raises(ConfigError, match="Wrong failed: AttributeError") as error:
        build_optimizer(Weights(), optimizers.KIND.build(f"{own}_2:Wrong"))
    assert error.value.where == f"{tmp_path}/{own}_2.py:6"
    below = schedules.KIND.build(f"{own}_2:Below", {"warmup_steps": 1})
    with pytest.raises(ConfigError, match="Below failed: ZeroDivisionError"):
        below.learning_rate(3, 6, 1.0)
    with pytest.raises(ConfigError, match=r"gives -0.5 at 5 of 6 steps"):
        below.learning_rate(5, 6, 1.0)


def test_a_node_with_another_source_of_a_part_is_refused(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    entry = tw.Train({}, optimizer=f"{own}:Momentum").entry()
    for name in [name for name in sys.path if name == str(tmp_path)]:
        sys.path.remove(name)
    monkeypatch.delitem(sys.modules, own)
    monkeypatch.chdir("/")
    parts._load.cache_clear()
    assert TrainKind().recipe(entry)["optimizer"]["kind"] == f"{own}:Momentum", "found where the workflow was made"
    entry["code"][0]["hash"] = "other"
    with pytest.raises(ConfigError, match="on this node differs from"):
        TrainKind().recipe(entry)


def test_a_users_source_hash_is_compared_as_a_setting(own: str):
    assert settings_of(config(optimizer=f"{own}:Momentum"))["optimizer.code"]
    assert "optimizer.code" not in settings_of(config())
