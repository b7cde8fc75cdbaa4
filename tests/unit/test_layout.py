"""The house rules that a machine can check: what shadows nothing, who imports whom, where Ray may appear."""

from __future__ import annotations

import ast
import functools
import platform
import re
import sysconfig
from pathlib import Path

import pytest

import tidewheel
from tidewheel.data.filter import FILTERS

PACKAGE = Path(tidewheel.__file__).parent
ROOT = Path(__file__).parents[2]

# Rooms in the order in which data flows; a room imports only rooms to its left (and itself). The tuple is one level.
LEVELS = [
    ("errors", "printable"), ("time_limit",), ("daemon", "disk_errors", "private_folders"), ("storage",),
    ("s3_problems",), ("s3_requests",), ("s3", "hub"), ("config", "conditional_create", "provenance"), ("parts",),
    ("jsonlog", "console", "placement", "autoscaler", "lease", "commit_protocol"),
    ("commit_log", "stopping"), ("ownership",),
    ("shards",),
    ("data", "models"),
    ("train",),
    ("checkpoint", "cluster"),
    ("report", "inference"),
    ("elastic", "plan", "kubernetes"),
    ("workflow", "demo", "filters"),
    ("commands",),
    ("cli",),
]
LEVEL_OF = {room: depth for depth, rooms in enumerate(LEVELS) for room in rooms}
# The imports that are made inside a function because they point back: storage opens s3 and hf URIs with them.
ALLOWED_BACKWARDS = {("storage", "s3"), ("storage", "hub")}
RAY_ROOMS = ("autoscaler.py", "data/pipeline.py", "data/stages/", "elastic/", "cluster/", "workflow/", "demo/")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def imports(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions; not those under TYPE_CHECKING."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner) for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            found |= {first.value for first in node.args[:1] if isinstance(first, ast.Constant)}
    return found


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_platform_is_the_standard_librarys():
    assert Path(platform.__file__).parent == Path(sysconfig.get_path("stdlib"))
    entries = {entry.name for entry in (ROOT / "platform").iterdir() if entry.name != "__pycache__"}
    assert entries == {"tidewheel"}


def test_top_level_is_what_the_owner_fixed():
    for name in ("pyproject.toml", "README.md", "platform", "pipelines", "jobs", "tests", "cluster", "k8s"):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    here = room(path)
    if here == "__init__":
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "tidewheel" or len(parts) < 2 or parts[1] not in LEVEL_OF:
            continue
        there = parts[1]
        if there == here or (here, there) in ALLOWED_BACKWARDS:
            continue
        assert LEVEL_OF[there] < LEVEL_OF[here], f"{path.name} in {here} imports {name}: {there} is to its right"


@pytest.mark.parametrize("statement", [
    "from tidewheel.elastic.policy import Move",
    "import tidewheel.elastic.policy",
    "def late():\n    from tidewheel.elastic import policy",
    "def late():\n    return importlib.import_module('tidewheel.elastic.policy')",
])
@pytest.mark.parametrize("folder", ["report", "plan"])
def test_reports_and_plans_that_import_elastic_are_refused(tmp_path, monkeypatch, folder, statement):
    path = tmp_path / folder / "module.py"
    path.parent.mkdir()
    path.write_text(statement)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    with pytest.raises(AssertionError, match="is to its right"):
        test_imports_point_one_way(path)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_ray_stays_at_the_edges(path):
    inside = str(path.relative_to(PACKAGE))
    if inside.startswith(RAY_ROOMS):
        return
    assert not [name for name in imports(path) if name.split(".")[0] == "ray"], f"{inside} imports ray"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_unpickled(path):
    names = imports(path)
    assert not {name for name in names if name.split(".")[0] in ("pickle", "cloudpickle", "dill", "shelve")}
    text = path.read_text()
    assert not re.search(r"(?<!safetensors\.)torch\.load\(", text) or "weights_only=True" in text


FILTER_ROOM, FACADE = "data/filters/", "filters.py"
ENGLISH = {"urls", "language", "words", "classifier"}
"""Filters whose names are words that stand for other things too; their classes are not."""


def identifiers_and_strings(path: Path) -> set[str]:
    """Names, attributes, arguments and the words in strings of a file, docstrings aside."""
    tree = ast.parse(path.read_text())
    plain = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.update((node.asname or node.name).split("."))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in plain:
            found.update(re.findall(r"\w+", node.value))
    return found


def part_imports(path: Path) -> set[str]:
    """Built-in filters that a file imports, also for types."""
    tree = ast.parse(path.read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    modules |= {f"{node.module}.{alias.name}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                for alias in node.names}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return {name for name in FILTERS.built_in() if f"tidewheel.data.filters.{name}" in modules}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_second_list_of_filters(path):
    """What else must know of a filter asks the filter: only its own module, and the facade for editors, names it."""
    inside = str(path.relative_to(PACKAGE))
    if inside.startswith(FILTER_ROOM) or inside == FACADE:
        return
    classes = {FILTERS.find(name).__name__ for name in FILTERS.built_in()}
    named = identifiers_and_strings(path) & {*set(FILTERS.built_in()) - ENGLISH, *classes}
    assert not named | part_imports(path), f"{inside} names built-in filters"


def test_the_facade_for_editors_has_every_filter():
    tree = ast.parse((PACKAGE / FACADE).read_text())
    listed = {alias.asname: (node.module, alias.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
              for alias in node.names if alias.asname}
    assert listed == {name: (part.__module__, part.__name__) for name in FILTERS.built_in()
                      if (part := FILTERS.find(name))}
    assert sorted(tidewheel.filters.__all__) == sorted(listed)
    assert all(getattr(tidewheel.filters, name) is FILTERS.find(name) for name in listed)
