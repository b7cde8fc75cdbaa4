"""The list of Ray's private names is complete and correct, and the installed Ray has them.

These tests read the source of the modules that use Ray's private names. A name that is used and not listed fails, and
so does a name that is listed and not used.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.source import parsed, parsed_text
from tidewheel import autoscaler, elastic
from tidewheel.elastic import ray_adapter, ray_contract, ray_group, ray_process, ray_workers
from tidewheel.elastic.ray_contract import CONTRACT, KNOWN_RELEASES, PROVIDED, USED, Name, check_ray
from tidewheel.errors import ClusterError

SOURCES = (*sorted(Path(elastic.__path__[0]).glob("*.py")), Path(autoscaler.__file__))
TREES = [parsed(path) for path in SOURCES]
PRIVATE = re.compile(r"ray\.(train\.v2|core\.generated|_)|ray\..*\._")
#: Ray Train's group has these too. The controller calls them for an aborted run, for groups of replicas and for Ray's
#: own watcher of preemptions; the adapter ends the controller instead, and has neither of the others.
NEVER_CALLED = {"abort", "replace_replica_group", "set_required_barrier_ranks"}
OF_EVERY_CLASS = {"__module__", "__doc__", "__dict__", "__weakref__", "__init__", "__parameters__",
                  "__abstractmethods__", "_abc_impl"}
PUBLIC = {"fit"}
"""Documented methods of Ray Train's trainer."""
BEFORE = 55
"""Number of names in the list when the worker group was still a subclass of Ray Train's."""


def test_the_installed_ray_fits():
    check_ray()


def test_an_unknown_release_is_refused(monkeypatch):
    monkeypatch.setattr(ray, "__version__", "2.99.0")
    with pytest.raises(ClusterError, match=r"version 2\.99\.0; known to work: .*2\.60\.0"):
        check_ray()


def test_names_and_parameters_that_are_gone_are_listed(monkeypatch):
    missing = (Name("ray.train.v2._internal.execution.scaling_policy", "ScalingPolicy.no_such_method"),
               Name("ray.train.v2._internal.execution.failure_handling", "FailurePolicy.make_decision", ("renamed",)),
               Name("ray.train.v2.no_such_module", "Thing"))
    monkeypatch.setattr(ray_contract, "CONTRACT", missing)
    with pytest.raises(ClusterError) as caught:
        check_ray()
    assert "no_such_method is gone" in str(caught.value)
    assert "no longer takes renamed" in str(caught.value)
    assert "no_such_module.Thing is gone" in str(caught.value)


def test_the_list_is_at_most_half_as_long_as_before():
    assert len(CONTRACT) <= BEFORE // 2
    assert len({(name.module, name.attribute) for name in CONTRACT}) == len(CONTRACT)


def test_every_private_import_is_listed_and_every_listed_module_is_imported():
    imported = {module for tree in TREES for module, _ in imports(tree)}
    listed = {name.module for name in CONTRACT}
    classes = {(name.module, name.attribute.partition(".")[0]) for name in CONTRACT}
    for module, name in (pair for tree in TREES for pair in imports(tree)):
        assert module in listed, f"{module} is imported and not listed"
        assert name is None or (module, name) in classes or is_module(module, name), f"{module}.{name} is not listed"
    # `ray._private.worker` is reached as an attribute of `ray`
    assert {name.module for name in USED} - imported == {"ray._private.worker"}


def test_every_listed_name_is_used():
    words = {word for tree in TREES for word in identifiers(tree)}
    for name in USED:
        owner, _, attribute = name.attribute.rpartition(".")
        used = owner if attribute == "__init__" else attribute
        if owner == "GlobalState":  # used through its instance, `ray._private.state.state`
            assert "state" in words
        assert used in words, f"{name.attribute} is listed and not used"


def test_every_override_and_every_inherited_call_is_listed():
    listed = {name.attribute for name in CONTRACT}
    for module in (ray_adapter, ray_group, ray_process, ray_workers):
        for own in vars(module).values():
            if not (inspect.isclass(own) and own.__module__ == module.__name__):
                continue
            bases = [base for base in own.__mro__[1:] if base.__module__.startswith("ray.train.v2")]
            for base in bases:
                overridden = {member for member in vars(own) if member in vars(base)} - OF_EVERY_CLASS
                called = {name for name in inherited_calls(own) if any(name in vars(owner) for owner in bases)}
                for member in (overridden | called) - PUBLIC:
                    assert any(f"{owner.__name__}.{member}" in listed for owner in bases), f"{own.__name__}.{member}"


def test_no_unlisted_private_attribute_of_rays_objects_is_used():
    listed = {name.attribute.rpartition(".")[2] for name in CONTRACT}
    for module in (ray_adapter, ray_group, ray_process, ray_workers):
        for node in ast.walk(parsed_text(inspect.getsource(module))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                ours = isinstance(node.value, ast.Name) and node.value.id == "self"
                assert ours or node.attr in listed, f"{module.__name__}:{node.lineno} uses {node.attr}"


def test_the_group_has_every_method_that_the_controller_calls():
    from ray.train.v2._internal.execution.controller import TrainController

    tree = parsed_text(inspect.getsource(inspect.getmodule(TrainController)))
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_group(node.value)}
    listed = {name.attribute.partition(".")[2] for name in PROVIDED if name.attribute.startswith("WorkerGroup.")}
    assert called - NEVER_CALLED == listed - {"create"}
    for method in listed - {"create"}:
        assert callable(getattr(ray_group.ElasticWorkerGroup, method))
    assert callable(ray_group.WorkerGroups.create)
    assert callable(ray_adapter.RunFailures.make_decision)


def test_settings_of_ray_train_in_the_environment_exist():
    """They are Ray Train's documented interface; Ray ignores an unknown variable without a warning."""
    constants = vars(importlib.import_module("ray.train.v2._internal.constants")).values()
    known = {value for value in constants if isinstance(value, str)}
    assert {*ray_adapter.TRAIN_ENVIRONMENT, ray_group.SILENT_SECONDS_VARIABLE} <= known


def test_the_newest_known_release_is_the_one_that_the_package_installs():
    pins = re.findall(r"ray\[[^]]*\]==([\d.]+)", Path("pyproject.toml").read_text())
    assert pins == [KNOWN_RELEASES[-1]]


def imports(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Yield the private modules of Ray that a module imports, with the name imported from each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and PRIVATE.match(node.module + "."):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole, None) if is_module(node.module, alias.name) else (node.module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if PRIVATE.match(alias.name + "."):
                    yield alias.name, None


def is_module(package: str, name: str) -> bool:
    """Return whether `name` is a module inside `package`."""
    try:
        importlib.import_module(f"{package}.{name}")
    except ImportError:
        return False
    return True


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield every name that is read, called or defined."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


def inherited_calls(own: type) -> set[str]:
    """Return the names of the methods that a class calls on itself or on its base class."""
    tree = parsed_text(inspect.getsource(own))
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    methods = [function for function in called if isinstance(function, ast.Attribute)]
    return {method.attr for method in methods if ast.unparse(method.value) in ("self", "super()")} - {"__init__"}


def is_group(node: ast.expr) -> bool:
    """Return whether an expression in the controller's source is its worker group."""
    return ast.unparse(node) in ("self._worker_group", "self.get_worker_group()")
