"""Every module of the package that logs has one logger, named after the module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import tidewheel
from tests.source import parsed

ROOT = Path(tidewheel.__file__).parent
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield the name behind `logging.` and the call."""
    for node in ast.walk(tree):
        if (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name) and node.func.value.id == "logging"):
            yield node.func.attr, node


def test_modules_log_to_a_logger_of_their_own_name():
    logging_modules = 0
    for path in ROOT.rglob("*.py"):
        tree = parsed(path)
        root_calls = [name for name, _ in calls(tree) if name in LEVELS or name == "basicConfig"]
        assert root_calls == [], f"{path} logs to the root logger"
        loggers = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)
                   and any(name == "getLogger" for name, _ in calls(node))]
        assert loggers in ([], ["logger = logging.getLogger(__name__)"]), path
        logging_modules += len(loggers)
    assert logging_modules > 15
