"""Rules of the code base that a test can check: names, import directions, and which rooms may import Ray."""

from __future__ import annotations

import ast
import functools
import graphlib
import platform
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

import tidewheel
from tests.conftest import LONGEST_FIRST
from tests.every import every
from tests.source import parsed
from tidewheel.data.filter import FILTERS
from tidewheel.data.reader import READERS

PACKAGE = Path(tidewheel.__file__).parent
ROOT = Path(__file__).parents[2]

# Rooms in the order in which data flows. A room imports only from itself and from earlier levels, also in functions.
LEVELS = [
    ("errors", "printable", "secret_patterns", "unauthenticated", "versions", "yaml_text", "daemon", "expressions"),
    ("time_limit",),
    ("disk_errors", "private_folders", "retry"), ("storage",),
    ("config", "conditional_create", "provenance"), ("parts",), ("stores",),
    ("jsonlog", "console", "placement", "autoscaler", "lease", "commit_protocol"),
    ("commit_record",), ("commit_log", "stopping"), ("ownership",),
    ("shards",),
    ("data", "models"),
    ("rewards",), ("environments", "engines"),
    ("train",),
    ("checkpoint", "cluster"), ("outer",),
    ("inference",), ("post",),
    ("report",),
    ("elastic", "plan", "kubernetes", "imports", "launch"),
    ("workflow", "demo", "filters"),
    ("commands",),
    ("cli",), ("__main__",),
]
# The levels inside `data`. A name stands for a module or a folder; for each module the longest matching name counts.
DATA_LEVELS = [
    ("compression", "document", "languages", "progress", "quarantine", "text_template", "thresholds", "url"),
    ("resources",),
    ("verdicts", "text"),
    ("dedup", "decontaminate"),
    ("textpass",),
    ("filter",),
    ("readers.packed", "readers.messages"), ("readers.conversations",), ("readers.record",),
    ("reader",),
    ("read_config", "filter_step", "dedup_steps", "output_steps"), ("step_config",),
    ("config",),
    ("readers",),
    ("formats", "fasttext", "tokenize", "product"),
    ("filters",),
    ("warm_up", "stage", "pipeline_summary"),
    ("stages",),
    ("pipeline", "similar", "preview", "kernel_build"),
    ("pipeline_plan", "clean", "diff"),
]
# Imports inside functions that point backwards: importing module, imported module, reason.
ALLOWED_BACKWARDS = {
    ("storage", "stores"): "`store` opens URIs with the parts for their schemes",
}
ALLOWED_CIRCLES = ALLOWED_BACKWARDS | {
    ("storage.base", "storage"): "a store opens the stores below it by their URIs",
    ("models.family", "models.families"): "the registry of model families imports the built-in ones on first use",
    ("cluster.background", "cluster.supervisor"): "the background cluster runs its supervisor as `python -m`",
}

RAY_ROOMS = ("autoscaler.py", "data/pipeline.py", "data/stages/", "elastic/", "cluster/", "workflow/", "demo/",
             "post/pool.py")


tree_of = functools.cache(parsed)


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return every node of a file's syntax tree."""
    return tuple(ast.walk(tree_of(path)))


def called(node: ast.Call) -> str:
    """Return the dotted name of what is called, such as "np.random.rand"; "" for what has no such name."""
    parts: list[str] = []
    function = node.func
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    return ".".join([function.id, *reversed(parts)]) if isinstance(function, ast.Name) else ""


@functools.cache
def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    """Return the name of a module below `tidewheel`; "" for the package itself."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


MODULES = frozenset(dotted(path) for path in modules()) - {""}


@functools.cache
def imports(path: Path) -> set[str]:
    """Return every module that a file imports, also inside functions, without those under TYPE_CHECKING."""
    names: set[str] = set()
    typing_only = {
        id(inner) for node in nodes_of(path) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in nodes_of(path):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and called(node).endswith(("import_module", "__import__")):
            names |= {first.value for first in node.args[:1] if isinstance(first, ast.Constant)}
    return names


@functools.cache
def imported_modules(path: Path) -> set[str]:
    """Return the modules of the package that a file uses: of `from a import b`, `a.b` if that is a module, else `a`."""
    known = MODULES
    modules_used: set[str] = set()
    names = {name.removeprefix("tidewheel.") for name in imports(path) if name.startswith("tidewheel.")} & known
    from_package = {(node.module or "").removeprefix("tidewheel."): {alias.name for alias in node.names}
                    for node in nodes_of(path) if isinstance(node, ast.ImportFrom)}
    for name in names:
        names_taken = from_package.get(name)
        if names_taken is None or any(f"{name}.{item}" not in known for item in names_taken):
            modules_used.add(name)
    return modules_used - {dotted(path)}


def level(name: str, levels: Sequence[tuple[str, ...]]) -> int:
    """Return the level of the longest entry that is a module, or a folder that holds it."""
    fitting = {entry: depth for depth, entries in enumerate(levels) for entry in entries
               if name == entry or name.startswith(f"{entry}.")}
    assert fitting, f"{name} has no level: add it to the levels in {Path(__file__).name}"
    return fitting[max(fitting, key=len)]


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_platform_is_the_standard_librarys():
    assert Path(platform.__file__).parent == Path(sysconfig.get_path("stdlib"))
    entries = {entry.name for entry in (ROOT / "platform").iterdir() if entry.name != "__pycache__"}
    assert entries == {"tidewheel"}


def test_the_required_folders_exist_at_the_top_level():
    for name in ("pyproject.toml", "README.md", "platform", "pipelines", "jobs", "tests", "cluster", "k8s"):
        assert (ROOT / name).exists(), name


def check_imports(path):
    """Fail if a module imports one of a later level."""
    name = dotted(path)
    for imported in imported_modules(path) if name else ():
        importing_room = name.split(".")[0]
        imported_room = imported.split(".")[0]
        if (name, imported) in ALLOWED_BACKWARDS:
            continue
        if importing_room != imported_room:
            assert level(imported_room, LEVELS) < level(importing_room, LEVELS), \
                f"{name} imports {imported}, which is to its right"
        elif importing_room == "data":
            inner, target = name.removeprefix("data."), imported.removeprefix("data.")
            if inner.split(".")[0] != target.split(".")[0]:
                assert level(target, DATA_LEVELS) < level(inner, DATA_LEVELS), f"{name} imports {imported}"


test_imports_point_one_way = every(modules())(check_imports)


@pytest.mark.parametrize("name", LONGEST_FIRST)
def test_files_that_run_first_exist(name):
    assert (ROOT / "tests" / name).is_file()


def test_every_room_has_a_level():
    for name in {dotted(path) for path in modules()} - {"", "data"}:
        level(name, LEVELS)
        if name.startswith("data."):
            level(name.removeprefix("data."), DATA_LEVELS)


def test_modules_do_not_import_in_circles():
    """Imports inside functions count."""
    graph = {dotted(path): set(imported_modules(path)) for path in modules() if dotted(path)}
    for importer, imported in ALLOWED_CIRCLES:
        graph.get(importer, set()).discard(imported)
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail("modules import one another: " + " -> ".join(reversed(error.args[1])))


@pytest.mark.parametrize(("importer", "imported"), sorted(ALLOWED_CIRCLES))
def test_each_exception_is_needed(importer, imported):
    graph = {dotted(path): imported_modules(path) for path in modules()}
    assert imported in graph[importer], f"{importer} does not import {imported} any more: remove the exception"


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
        check_imports(path)


@every(modules())
def test_ray_stays_at_the_edges(path):
    inside = str(path.relative_to(PACKAGE))
    if inside.startswith(RAY_ROOMS):
        return
    assert not [name for name in imports(path) if name.split(".")[0] == "ray"], f"{inside} imports ray"


@every(modules())
def test_the_shared_random_generators_are_left_alone(path):
    # a retry that draws from them would change what a user's transform draws after it
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            name = called(node)
            assert not re.fullmatch(r"((np|numpy)\.)?random\.(?!default_rng)[a-z]\w*", name), name


@every(modules())
def test_nothing_is_unpickled(path):
    names = imports(path)
    assert not {name for name in names if name.split(".")[0] in ("pickle", "cloudpickle", "dill", "shelve")}
    text = path.read_text()
    assert not re.search(r"(?<!safetensors\.)torch\.load\(", text) or "weights_only=True" in text


FILTER_ROOM, FACADE = "data/filters/", "filters.py"
ENGLISH = {"urls", "language", "words", "classifier"}
"""Filters whose names are words with other meanings too; the names of their classes are not."""


def identifiers_and_strings(path: Path) -> set[str]:
    """Return the names, attributes, arguments and words in strings of a file, without docstrings."""
    plain = {id(node.value) for node in nodes_of(path) if isinstance(node, ast.Expr)}
    identifiers: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Name):
            identifiers.add(node.id)
        elif isinstance(node, ast.Attribute):
            identifiers.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            identifiers.add(node.arg)
        elif isinstance(node, ast.alias):
            identifiers.update((node.asname or node.name).split("."))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            identifiers.add(node.target.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in plain:
            identifiers.update(re.findall(r"\w+", node.value))
    return identifiers


def part_imports(path: Path) -> set[str]:
    """Return the built-in filters that a file imports, also under TYPE_CHECKING."""
    nodes = nodes_of(path)
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    modules |= {f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom)
                for alias in node.names}
    modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name for name in FILTERS.built_in() if f"tidewheel.data.filters.{name}" in modules}


@functools.cache
def filter_classes() -> set[str]:
    """Return the names of the classes of all built-in filters."""
    return {FILTERS.find(name).__name__ for name in FILTERS.built_in()}


@every(modules())
def test_no_second_list_of_filters(path):
    """Code that must know something about a filter asks the filter. Only its module and the editor facade name it."""
    inside = str(path.relative_to(PACKAGE))
    if inside.startswith(FILTER_ROOM) or inside == FACADE:
        return
    classes = filter_classes()
    named = identifiers_and_strings(path) & {*set(FILTERS.built_in()) - ENGLISH, *classes}
    assert not named | part_imports(path), f"{inside} names built-in filters"


def test_the_facade_for_editors_has_every_filter():
    tree = tree_of(PACKAGE / FACADE)
    listed = {alias.asname: (node.module, alias.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
              for alias in node.names if alias.asname}
    assert listed == {name: (part.__module__, part.__name__) for name in FILTERS.built_in()
                      if (part := FILTERS.find(name))}
    assert sorted(tidewheel.filters.__all__) == sorted(listed)
    assert all(getattr(tidewheel.filters, name) is FILTERS.find(name) for name in listed)


READER_ROOM = "data/formats/"
RECOGNITION = ("data/reader.py", "data/readers/__init__.py", "data/readers/sniff.py")
WRITTEN = ("data/product/", "data/output_steps.py", "data/config.py")
"""Module of the step `write`, which has its own output formats."""
AMBIGUOUS = {"code", "json", "text"}
"""Formats whose names are words with other meanings too, except where files are recognised."""


@functools.cache
def reader_modules() -> set[str]:
    """Return the modules that hold the code of single readers: those that `data/formats` imports."""
    inside = [path for path in modules() if str(path.relative_to(PACKAGE)).startswith(READER_ROOM)]
    prefix = "tidewheel.data.readers."
    return {name.removeprefix(prefix) for path in inside for name in imports(path) if name.startswith(prefix)}


def strings(path: Path) -> set[str]:
    return {node.value for node in nodes_of(path)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@every(modules())
def test_only_readers_name_formats(path):
    inside = str(path.relative_to(PACKAGE))
    module = inside.removeprefix("data/readers/").removesuffix(".py")
    if inside.startswith((READER_ROOM, *WRITTEN)) or module in reader_modules():
        return
    names = set(READERS.built_in())
    if inside not in RECOGNITION:
        names -= AMBIGUOUS
    assert not strings(path) & names, f"{inside} names a format; the reader should declare what other code must know"
