"""YAML that expands to more than it shows is refused wherever the package reads YAML."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml

from tidewheel import yaml_text
from tidewheel.cluster.jobs import command_of
from tidewheel.config import Config, build, load
from tidewheel.errors import ConfigError
from tidewheel.kubernetes import documents
from tidewheel.yaml_text import MAX_ALIASED, MAX_DEPTH

NAMES = "abcdefghij"
LISTS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in itertools.pairwise(NAMES))
MERGES = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 10)}]}}\n"
    for before, name in itertools.pairwise(NAMES))
LONG = f"a: &a {'x' * 10_000}\nb: [{', '.join(['*a'] * 200)}]\n"
ITSELF = "a: &a [*a]\n"
DEEP = "[" * 2_000 + "]" * 2_000
BOMBS = {"lists": LISTS, "merges": MERGES, "a long text": LONG, "itself": ITSELF, "deep": DEEP}


class Anything(Config):
    a: object = None


@pytest.mark.parametrize("bomb", BOMBS)
def test_every_yaml_reader_refuses_a_bomb(bomb: str, tmp_path: Path):
    text = BOMBS[bomb]
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    with pytest.raises(yaml.YAMLError):
        yaml_text.load(text)
    with pytest.raises(ConfigError, match="not valid YAML"):
        load(Anything, path)
    with pytest.raises(ConfigError, match="not valid YAML"):
        build(Anything, {}, [f"a={text}"])
    with pytest.raises(ConfigError, match="not valid YAML"):
        documents.read(text, "bomb.yaml")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        command_of([str(path)])


def test_the_message_names_the_limit():
    with pytest.raises(ConfigError, match=f"aliases stand for more than {MAX_ALIASED:,} values"):
        documents.read(LISTS, "bomb.yaml")


def test_depth_is_refused_before_it_costs_time():
    within = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert yaml_text.load(within) != []
    with pytest.raises(yaml.YAMLError, match=f"nested deeper than {MAX_DEPTH} levels"):
        yaml_text.load(f"[{within}]")


def test_aliases_and_large_files_without_them_are_read():
    assert yaml_text.load("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]\n") == {
        "a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": [{"x": 1}, {"x": 1}]}
    large = f"a: {'x' * (2 * MAX_ALIASED)}\n"
    assert documents.read(large, "large.yaml") == [{"a": "x" * (2 * MAX_ALIASED)}]


def test_no_module_reads_yaml_without_these_checks():
    sources = Path(yaml_text.__file__).parent.rglob("*.py")
    readers = {path.name for path in sources if "yaml.safe_load" in (text := path.read_text()) or "yaml.load" in text}
    assert readers == {"yaml_text.py"}
