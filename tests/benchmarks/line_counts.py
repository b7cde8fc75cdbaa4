"""Lines of code of adapters and preferences, here and in the libraries with the same features.

    python -m tests.benchmarks.line_counts

A line counts if it has a token other than a comment or a docstring. Files of peft and TRL are those of the installed
versions; a file that also holds methods that Tidewheel lacks counts in full.
"""

from __future__ import annotations

import ast
import io
import tokenize
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tests.source import parsed_text
from tidewheel.console import print_table

EMPTY = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
OURS: dict[str, dict[str, tuple[str, ...]]] = {
    "adapters": {
        "settings, shapes and files of each kind": ("models/adapter.py", "models/adapters/*.py"),
        "what they add to a model, merging, names": tuple(f"models/adapting/{name}.py" for name in (
            "added", "attach", "bottleneck", "counts", "factors", "low_rank", "merge", "names", "prefix", "prompt",
            "shards")),
        "stacked experts": ("models/adapting/experts.py", "models/adapting/peft_experts.py"),
        "bases in 4 bits": ("models/adapting/nf4.py",),
        "files of peft, runs merged and unmerged": (
            "models/adapting/peft_files.py", "models/adapting/peft_names.py", "checkpoint/adapter_files.py"),
        "checkpoints, values in a run, a kept base": (
            "checkpoint/adapters.py", "train/parallel/adapter_weights.py", "train/parallel/kept_base.py"),
        "several on one base, planning": ("inference/adapters.py", "plan/adapters.py"),
    },
    "preferences": {
        "losses and objectives": ("train/preferences/*.py", *(f"train/objectives/{name}.py" for name in (
            "dpo", "kto", "orpo", "cpo", "simpo", "reward_model"))),
        "the reference model": ("train/parallel/base_reference.py", "inference/reference.py", "commands/reference.py",
                                "shards/references.py"),
        "judges": ("inference/judges.py", "inference/judging.py", "commands/judge.py"),
        "pairs as data": ("data/tokenize/preferences.py", "shards/preferences.py", "shards/pairs.py"),
    },
}
"""Files below platform/tidewheel, by feature."""
THEIRS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "adapters": ("peft", {
        "LoRA, DoRA, PiSSA, IA3": (*(f"tuners/lora/{name}.py" for name in ("config", "layer", "model", "dora")),
                                   "tuners/ia3/[!b]*.py"),
        "prefix and prompt tuning": ("tuners/prefix_tuning/*.py", "tuners/prompt_tuning/*.py"),
        "LoRA and IA3 of a base in bits": ("tuners/lora/bnb.py", "tuners/ia3/bnb.py"),
        "attaching, merging, names": ("tuners/tuners_utils.py",),
        "models with adapters, files": ("peft_model.py", "config.py", "utils/save_and_load.py"),
    }),
    "preferences": ("trl", {
        "DPO": ("trainer/dpo_*.py",), "KTO": ("trainer/kto_*.py",), "reward model": ("trainer/reward_*.py",),
        "ORPO, CPO, SimPO": ("experimental/orpo/*.py", "experimental/cpo/*.py"), "data": ("data_utils.py",),
    }),
}
"""Of each library: its name, and files by feature."""


def code_lines(text: str) -> int:
    """Return the number of lines of a Python file without blank lines, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in EMPTY:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(parsed_text(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                lines.difference_update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return len(lines)


def counted(package: str, patterns: tuple[str, ...]) -> int:
    """Return the lines of some files of a package, which is not imported.

    Args:
        package: its name.
        patterns: of paths in its folder; each matches a file.

    Raises:
        FileNotFoundError: a pattern matches none: the package has moved its code.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{package} is not installed")
    files: set[Path] = set()
    for pattern in patterns:
        matching = set(Path(spec.submodule_search_locations[0]).glob(pattern))
        if not matching:
            raise FileNotFoundError(f"{package}: no file {pattern}")
        files |= matching
    return sum(code_lines(file.read_text()) for file in files)


def main() -> None:
    """Print a row for each feature."""
    for group, features in OURS.items():
        package, others = THEIRS[group]
        sides = {"tidewheel": ("tidewheel", features), f"{package} {version(package)}": (package, others)}
        for side, (name, rows) in sides.items():
            lines = {feature: counted(name, patterns) for feature, patterns in rows.items()}
            table = [{group: feature, side: count} for feature, count in {**lines, "all": sum(lines.values())}.items()]
            print_table(table)


if __name__ == "__main__":
    main()
