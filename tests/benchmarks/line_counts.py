"""Lines of code of features, here and in the libraries that have them too.

    python -m tests.benchmarks.line_counts

A line counts if it has a token other than a comment or a docstring. Files of the libraries are those of the installed
versions; a file that also holds methods that Tidewheel lacks counts in full. Of DeepSpeed and torchft the sources are
enough, unpacked into a folder on PYTHONPATH; without them their tables are left out.
"""

from __future__ import annotations

import ast
import io
import tokenize
from importlib.metadata import PackageNotFoundError, version
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
    "methods": {
        "compressed gradients": (
            "train/compression.py", "train/compressions/**/*.py", "plan/compressed.py",
            *(f"train/parallel/{name}.py" for name in ("coded", "compressing", "wire"))),
        "DiLoCo, local SGD": ("outer/*.py", "train/outer*.py"),
        "pipelines that never empty, as parts": ("train/stage_s*.py",),
        "communication that is not hidden": (
            "train/metrics/hidden.py", "train/metrics/waits.py", "train/parallel/traffic.py"),
        "offload to host and disk": (
            *(f"train/memory/{name}.py" for name in (
                "input_stores", "inputs_config", "kept_inputs", "scratch_file", "side_stream")),
            *(f"train/optim/{name}.py" for name in ("disk_*", "overlapped*", "some_parameters")),
            "train/optimizers/rules/host_*.py", "train/parallel/offloaded.py"),
        "what a plan proposes and knows of GPUs": (
            *(f"plan/{name}.py" for name in ("byte_models", "gpus", "offload", "proposals")),),
        "optimizers": (*(f"train/optimizers/{name}.py" for name in ("adam", "ademamix", "sgd")),
                       "train/optimizers/rules/ademamix.py", "train/optimizers/rules/sgd.py", "train/curvature.py"),
        "longer runs, branches, rates, averages": (
            *(f"train/{name}.py" for name in ("branching", "continuing", "rates", "average", "averages")),
            "train/callbacks/ema.py", "train/callbacks/lawa.py", "report/lineage.py"),
        "configurations of other tools": ("imports/*.py", "commands/import_config.py"),
        "job files": ("launch/*.py", "commands/launch.py"),
        "modules of the user's own": (
            "models/own_module.py", "models/wrapped.py", "train/parallel/own_module.py"),
        "shares by speed, equal attention": tuple(f"train/{name}.py" for name in (
            "speed_shares", "pass_time", "equal_attention")),
    },
}
"""Files below platform/tidewheel, by feature."""
THEIRS: dict[str, list[tuple[str, dict[str, tuple[str, ...]]]]] = {
    "adapters": [("peft", {
        "LoRA, DoRA, PiSSA, IA3": (*(f"tuners/lora/{name}.py" for name in ("config", "layer", "model", "dora")),
                                   "tuners/ia3/[!b]*.py"),
        "prefix and prompt tuning": ("tuners/prefix_tuning/*.py", "tuners/prompt_tuning/*.py"),
        "LoRA and IA3 of a base in bits": ("tuners/lora/bnb.py", "tuners/ia3/bnb.py"),
        "attaching, merging, names": ("tuners/tuners_utils.py",),
        "models with adapters, files": ("peft_model.py", "config.py", "utils/save_and_load.py"),
    })],
    "preferences": [("trl", {
        "DPO": ("trainer/dpo_*.py",), "KTO": ("trainer/kto_*.py",), "reward model": ("trainer/reward_*.py",),
        "ORPO, CPO, SimPO": ("experimental/orpo/*.py", "experimental/cpo/*.py"), "data": ("data_utils.py",),
    })],
    "methods": [
        ("torch", {"compressed gradients, local SGD, updates during the backward pass": (
            "distributed/algorithms/ddp_comm_hooks/*.py", "distributed/algorithms/model_averaging/*.py")}),
        ("torchft", {"DiLoCo, local SGD": ("local_sgd.py", "collectives.py", "quantization.py")}),
        ("deepspeed", {
            "1 bit, compressed collectives": ("runtime/fp16/onebit/*.py", "runtime/comm/*.py",
                                              "runtime/compression/*.py"),
            "state and parameters on disk, without the C++ part": ("runtime/swap_tensor/*.py",),
            "updates on the CPU, without the C++ part": ("ops/adam/*.py",),
            "overlapped updates": ("runtime/superoffload/*.py", "runtime/zenflow/*.py"),
            "activations": ("runtime/activation_checkpointing/*.py",),
            "schedules": ("runtime/lr_schedules.py",),
            "optimizers": ("ops/lamb/*.py", "ops/lion/*.py", "ops/adagrad/*.py"),
        }),
    ],
}
"""Of each group: libraries, with files by feature."""


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
    """Print a table for each group and library."""
    for group, features in OURS.items():
        _show(group, "tidewheel", "tidewheel", features)
        for package, others in THEIRS[group]:
            if find_spec(package) is None:
                print(f"{package} is not installed: its table is left out")
            else:
                _show(group, f"{package} {_version(package)}", package, others)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # sources on PYTHONPATH
        return ""


def _show(group: str, title: str, package: str, features: dict[str, tuple[str, ...]]) -> None:
    lines = {feature: counted(package, patterns) for feature, patterns in features.items()}
    print_table([{group: feature, title: count} for feature, count in {**lines, "all": sum(lines.values())}.items()])


if __name__ == "__main__":
    main()
