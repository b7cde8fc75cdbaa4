"""Public functions, methods and classes say what they do, what they take and what they raise.

The rules are those of CONTRIBUTING.md: a docstring starts with a verb, more than two arguments have an `Args:` section,
and a function that raises has a `Raises:` section. Commands (`tidewheel/commands`, `cli.py`) are exempt from sections,
since their docstrings are help texts. Compiled kernels are exempt, since their machine code goes by their source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import tidewheel
from tests.every import every
from tests.source import parsed

PACKAGE = Path(tidewheel.__file__).parent
COMMANDS = ("commands/", "cli.py")
MANY_ARGUMENTS = 2
"""More arguments than this have an `Args:` section."""
NOT_VERBS = {"a", "an", "the", "what", "whether", "which", "where", "when", "how", "of", "one", "all", "each", "every",
             "as", "if", "so", "these", "those", "this", "that", "true", "none", "in", "by", "for", "with", "its", "it",
             "they"}
"""Words that no imperative sentence starts with."""
COMPILED = {"compiled", "njit", "intrinsic"}
"""Decorators of kernels, whose machine code goes by their source, docstring included."""
SILENT_ERRORS = frozenset({"NotImplementedError", "AssertionError", "StopIteration", "SystemExit", "AttributeError"})
"""Errors that need no section: a base class's method, a bug, Python's own protocols."""


def modules() -> list[str]:
    """Return the paths of the package's modules, without compiled kernels."""
    paths = (path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
    return sorted(path for path in paths if not path.endswith("_kernels.py") and "/kernels/" not in path)


def decorators(node: ast.AST) -> set[str]:
    """Return the last names of a definition's decorators: {"property", "command"}."""
    names = set()
    for decorator in getattr(node, "decorator_list", ()):
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        names.add(target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", ""))
    return names


def public(tree: ast.Module) -> Iterator[tuple[str, ast.AST, ast.ClassDef | None]]:
    """Yield the public classes, functions and methods of a module: name, definition, and the class of a method."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node, None
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                    yield f"{node.name}.{member.name}", member, node


def arguments(function: ast.FunctionDef) -> list[str]:
    """Return the names of a function's arguments, without `self` and `cls`."""
    parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    parameters += [variable for variable in (function.args.vararg, function.args.kwarg) if variable is not None]
    names = [parameter.arg for parameter in parameters]
    return [name for name in names if name not in ("self", "cls")]


def raised(function: ast.FunctionDef) -> set[str]:
    """Return the names of the errors that a function raises in its own body."""
    errors = set()
    pending: list[ast.AST] = list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func).rpartition(".")[2]
            if name[:1].isupper():
                errors.add(name)
        pending += ast.iter_child_nodes(node)
    return errors - SILENT_ERRORS


def overrides(cls: ast.ClassDef | None) -> bool:
    """Return whether a class's methods may override those of a base class, which has their docstrings."""
    bases = [ast.unparse(base).partition("[")[0] for base in cls.bases] if cls else []
    return any(base not in ("Protocol", "Generic", "Config", "Part", "NamedTuple", "TypedDict") for base in bases)


def function_problems(name: str, node: ast.FunctionDef, cls: ast.ClassDef | None, is_command: bool) -> list[str]:
    """Return what is missing in the docstring of a function or method."""
    text = ast.get_docstring(node)
    if decorators(node) & {"overload", "setter"} | COMPILED & decorators(node):
        return []
    if text is None:
        return [] if overrides(cls) else [f"{name}: no docstring"]
    problems = []
    first = text.split()[0].strip("`.,:;\"'()").lower()
    if not decorators(node) & {"property", "cached_property"} and first in NOT_VERBS:
        problems.append(f"{name}: starts with {first!r}, not with a verb")
    if is_command or overrides(cls):
        return problems
    if len(arguments(node)) > MANY_ARGUMENTS and "Args:" not in text:
        problems.append(f"{name}: no Args section for {', '.join(arguments(node))}")
    if raised(node) and "Raises:" not in text and "Raise " not in text:
        problems.append(f"{name}: no Raises section for {', '.join(sorted(raised(node)))}")
    return problems


def class_problems(name: str, node: ast.ClassDef) -> list[str]:
    """Return what is missing in the docstring of a class."""
    text = ast.get_docstring(node)
    if text is None:
        return [f"{name}: no docstring"]
    for init in node.body:
        if isinstance(init, ast.FunctionDef) and init.name == "__init__":
            text += ast.get_docstring(init) or ""
            if len(arguments(init)) > MANY_ARGUMENTS and "Args:" not in text:
                return [f"{name}: no Args section for {', '.join(arguments(init))}"]
    return []


@every(modules())
def test_public_names_are_documented(module: str) -> None:
    tree = parsed(PACKAGE / module)
    problems = ["the module has no docstring"] if tree.body and not ast.get_docstring(tree) else []
    for name, node, cls in public(tree):
        if isinstance(node, ast.ClassDef):
            problems += class_problems(name, node)
        elif isinstance(node, ast.FunctionDef):
            problems += function_problems(name, node, cls, module.startswith(COMMANDS))
    assert not problems, "\n".join(problems)
