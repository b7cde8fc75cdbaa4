from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, field_validator

from tidewheel import config
from tidewheel.config import Config, build, load, recipe_hash
from tidewheel.errors import ConfigError, StorageError


class Optimizer(Config):
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)


class Step(Config):
    bands: int = Field(14, gt=0)
    name: str | None = None


class Job(Config):
    steps: int = 100
    optimizer: Optimizer = Optimizer()
    stages: tuple[Step, ...] = ()
    by_name: dict[str, Step] = Field(default_factory=dict)
    extra: Optimizer | None = None

    @field_validator("steps")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("steps must be even")
        return value


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


def test_file_then_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "steps: 10\noptimizer: {learning_rate: 1e-3}\nstages: [{bands: 3}, {}]\n")
    job = load(Job, path, ["optimizer.learning_rate=0.5", "stages.1.bands=7", "by_name.a.bands=2", "extra.betas=[0,1]"])
    assert (job.steps, job.optimizer.learning_rate, job.stages[1].bands) == (10, 0.5, 7)
    assert (job.by_name["a"].bands, job.extra) == (2, Optimizer(betas=(0, 1)))
    assert load(Job, write(tmp_path, "")) == Job()


def test_recipe_hash_is_of_the_resolved_settings(tmp_path: Path) -> None:
    written = load(Job, write(tmp_path, "optimizer: {betas: [0.9, 0.95]}\nsteps: 100"))
    assert written.recipe_hash() == Job().recipe_hash() == build(Job, {}, ["steps=100"]).recipe_hash()
    assert build(Job, {}, ["steps=102"]).recipe_hash() != Job().recipe_hash()
    assert len(Job().recipe_hash()) == 16


@given(st.dictionaries(st.text(max_size=5), st.recursive(st.integers() | st.text(max_size=5), st.lists, max_leaves=5)))
def test_recipe_hash_ignores_key_order(value: dict[str, Any]) -> None:
    assert recipe_hash(value) == recipe_hash(dict(reversed(value.items())))


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Job().steps = 5  # type: ignore[misc]


@pytest.mark.parametrize(("overrides", "message"), [
    (["stepps=1"], "unknown key 'stepps', did you mean 'steps'?"),
    (["optimizer.learning_rat=1"], "unknown key 'optimizer.learning_rat', did you mean 'learning_rate'?"),
    (["by_name.x.band=1"], "unknown key 'by_name.x.band', did you mean 'bands'?"),
    (["extra.beta=1"], "did you mean 'betas'?"),
    (["zzz=1"], "known keys: by_name, extra"),
    (["steps=many"], "steps: Input should be a valid integer"),
    (["steps=3"], "steps: steps must be even (got 3)"),
    (["steps"], "is not of the form key=value"),
    (["=3"], "is not of the form key=value"),
    (["steps=[1"], "is not valid YAML"),
    (["stages.0.bands=1"], "an empty list"),
    (["steps.x=1"], "it has no keys"),
    (["steps.x.y=1"], "does not lead to a group"),
])
def test_wrong_overrides_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Job, {"steps": 2, "stages": []}, overrides)
    assert message in str(caught.value)
    assert caught.value.fix


def test_an_unknown_key_in_a_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'stages.0.band', did you mean 'bands'"):
        load(Job, write(tmp_path, "stages: [{band: 3}]"))


@pytest.mark.parametrize(("text", "message"), [
    ("steps: [1\n", "not valid YAML"),
    ("- 1\n- 2\n", "expected keys and values, found list"),
    ("just text", "expected keys and values, found str"),
    ("0", "expected keys and values, found int"),
    ("[]", "expected keys and values, found list"),
    ("a: !!python/object/apply:os.system ['true']", "not valid YAML"),
    ("steps: 10\nsteps: 20\n", "'steps' occurs twice"),
    ("optimizer:\n  betas: [0, 1]\n  betas: [0, 2]\n", "job.yaml:3"),
    ("steps: \x07", "not valid YAML"),
])
def test_wrong_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Job, write(tmp_path, text))
    assert message in str(caught.value)
    assert "job.yaml" in str(caught.value)


def test_yaml_merge_keys_still_work(tmp_path: Path) -> None:
    job = load(Job, write(tmp_path, "by_name:\n  a: &a {bands: 3}\n  b: {<<: *a, name: x}\n"))
    assert job.by_name["b"] == Step(bands=3, name="x")


def test_missing_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such configuration file"):
        load(Job, tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes("name: é".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(Job, tmp_path / "latin.yaml")
    with pytest.raises(StorageError, match="folder"):
        load(Job, tmp_path)
    with pytest.raises(StorageError):
        load(Job, f"{tmp_path}/")


def test_building_leaves_its_arguments_unchanged() -> None:
    values = {"optimizer": {"learning_rate": 1.0}, "stages": [{"bands": 1}]}
    build(Job, values, ["optimizer.learning_rate=2", "stages.0.bands=5"])
    assert values == {"optimizer": {"learning_rate": 1.0}, "stages": [{"bands": 1}]}


def test_importing_is_cheap() -> None:
    heavy = "{'torch', 'ray', 'numba', 's3fs', 'pyarrow', 'matplotlib'}"
    subprocess.run([sys.executable, "-c", f"import sys, tidewheel.config, tidewheel.storage, tidewheel.jsonlog\n"
                    f"assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"],
                   check=True, env={"PYTHONPATH": str(Path(config.__file__).parents[1])})


def test_a_setting_that_a_later_version_adds_leaves_hashes_as_they_were() -> None:
    class Inner(Config):
        size: int = 1

    class Before(Config):
        name: str
        inner: Inner = Inner()
        many: tuple[Inner, ...] = ()

    class LaterInner(Inner):
        names: tuple[str, ...] = Field(default_factory=tuple)

    class After(Before):
        inner: LaterInner = LaterInner()
        many: tuple[LaterInner, ...] = ()
        table: dict[str, LaterInner] = Field(default_factory=dict)

    values = {"name": "x", "inner": {"size": 2}, "many": [{}, {"size": 3}]}
    old, new = build(Before, values), build(After, values)
    assert old.decisive() == new.decisive() == values
    assert old.recipe_hash() == new.recipe_hash()
    assert build(After, {"name": "x"}).decisive() == {"name": "x"}
    assert build(After, {**values, "table": {"a": {"names": ["b"]}}}).decisive()["table"] == {"a": {"names": ["b"]}}
