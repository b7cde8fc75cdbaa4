"""List the modules of the package that no test imports, largest first.

    python -m tests.untested

A listed module may still be tested through others; a module with its own test is imported by that test.
"""

from __future__ import annotations

import ast
from pathlib import Path

from tests.source import parsed

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "platform"


def module_name(path: Path) -> str:
    """Return the dotted name of a module of the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> set[str]:
    """Return every module that a file may import or names in a string, as commands do."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("tidewheel."):
            parts = node.value.split(".")
            names |= {".".join(parts[:count]) for count in range(2, len(parts) + 1)}
    return names


def untested() -> list[tuple[int, str]]:
    """Return the lines and names of the modules that no test imports, largest first."""
    tests: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        tests |= imported(path)
    modules = {module_name(path): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    return sorted(((lines, name) for name, lines in modules.items() if lines and name not in tests), reverse=True)


def main() -> None:
    """Print the untested modules."""
    for lines, name in untested():
        print(f"{lines:5} {name}")


if __name__ == "__main__":
    main()
