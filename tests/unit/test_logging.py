"""Every package logs through the standard library's `logging`, with one logger per module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import tidewheel
from tests.every import every
from tests.source import parsed

PACKAGE = Path(tidewheel.__file__).parent
PACKAGES = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
#: Modules that print to the terminal: commands, what they show, and programs with their own `main`.
TALKS_TO_PEOPLE = ("commands/", "cli.py", "console.py", "demo/", "plan/tables.py", "kubernetes/vendor.py",
                   "data/kernel_build.py", "cluster/doctor/", "cluster/s3_faults.py", "cluster/s3_server.py",
                   "cluster/jobs.py")
#: Modules that print why the driver waits for the owner of its output.
WAITS = ("elastic/trainer.py", "data/pipeline.py")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


QUIET = ("commands", "environments", "imports", "launch", "storage")
"""Packages that talk to people, or do nothing but convert texts. Around storage, `retry` and `stores` log."""


@pytest.mark.parametrize("name", [name for name in PACKAGES if name not in QUIET])
def test_every_package_logs(name: str):
    sources = "\n".join(path.read_text() for path in (PACKAGE / name).rglob("*.py"))
    assert "logger = logging.getLogger(__name__)" in sources
    assert re.search(r"logger\.(debug|info|warning|error|critical)\(", sources)


@every(modules())
def test_a_module_has_one_logger_of_its_name_and_prints_nothing(path: Path):
    inside = str(path.relative_to(PACKAGE))
    text = path.read_text()
    loggers = re.findall(r"^logger = logging\.getLogger\((.*)\)$", text, re.MULTILINE)
    assert loggers in ([], ["__name__"])
    if inside.startswith(TALKS_TO_PEOPLE):
        return
    prints = [node.lineno for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)
              and isinstance(node.func, ast.Name) and node.func.id == "print"]
    assert len(prints) <= (inside in WAITS), f"{inside}:{prints} prints; use the module's logger"
