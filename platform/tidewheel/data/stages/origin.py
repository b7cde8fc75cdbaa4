"""How an output was made: `recipe.json` with the resolved recipe, versions and inputs; `inputs.jsonl`, a line a file.

Both are for people, for `tidewheel data diff`, and to see that another recipe is about to replace an output. What is
reused is decided by the keys of units, not by these.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tidewheel.config import Config
from tidewheel.data.config import UNDECISIVE
from tidewheel.provenance import git_commit, python_version, versions, without_secrets
from tidewheel.storage import Store, content_hash

if TYPE_CHECKING:
    from tidewheel.data.stages.job import Job
    from tidewheel.data.stages.sources import SourceFile

RECIPE, INPUTS = "recipe.json", "inputs.jsonl"
FORMAT = 1
PACKAGES = ("tidewheel", "ray", "pyarrow", "numpy", "numba", "tokenizers", "blake3", "zstandard", "trafilatura", "lxml")


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings that decide what a pipeline makes, defaults included, without passwords, as JSON values."""
    found: dict[str, Any] = without_secrets(
        {name: value for name, value in config.canonical().items() if name not in UNDECISIVE})
    return found


def write(job: Job) -> dict[str, Any]:
    """Write both files; return what summary.json holds of them."""
    lines = [json.dumps(line) for line in input_lines(job.files)]
    stamp = job.store.write(INPUTS, "".join(f"{line}\n" for line in lines).encode())
    value = {
        "format": FORMAT, "name": job.config.name, "recipe_hash": job.config.recipe_hash(),
        "recipe": settings_of(job.config),
        "input": {"uri": without_secrets(job.input), "files": len(lines),
                  "bytes": sum(file.bytes for file in job.files), "hash": stamp.hash, "listed": INPUTS,
                  **({"commits": dict(job.commits)} if job.commits else {})},
        "read_besides": _besides(job),
        "versions": {"python": python_version(), **versions(PACKAGES)}, "commit": git_commit(),
        "partitions": job.partitions,
    }
    job.store.write_json(RECIPE, value)
    return value


def input_lines(files: Sequence[SourceFile]) -> list[dict[str, Any]]:
    """Return what is known of each input file."""
    return [{"file": without_secrets(one.name), "bytes": one.bytes, "fingerprint": one.fingerprint}
            for file in files for one in file.members or [file]]


def read(place: Store) -> dict[str, Any]:
    """Return `recipe.json` of an output; {} where an earlier version wrote none."""
    try:
        value = place.read_json(RECIPE)
    except FileNotFoundError:
        return {}
    return value if isinstance(value, dict) else {}


def read_inputs(place: Store) -> list[dict[str, Any]]:
    """Return the lines of `inputs.jsonl`; [] where an earlier version wrote none."""
    try:
        text = place.read(INPUTS).decode()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines()]


def _besides(job: Job) -> dict[str, Any]:
    """Content hashes of what is read beside the documents."""
    found: dict[str, Any] = {path: reference.partition("@")[0] for path, reference in sorted(job.references.items())}
    found |= {index.uri: index.hash for index in job.indexes}
    tokenizer = job.config.step("tokenize")
    if tokenizer is not None and tokenizer.file:
        found[tokenizer.file] = content_hash(job.tokenizer)
    if job.evals:
        found["evaluation items"] = content_hash(repr(job.evals).encode())
    cleaned: dict[str, Any] = without_secrets(found)
    return {without_secrets(name): value for name, value in cleaned.items()}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (dotted name, value before, value now) of each setting that differs; None where there is none.

    A step is named by its kind, so that a step more is not a difference of all that follow.
    """
    first, second = _flat(_steps_named(before)), _flat(_steps_named(now))
    names = [*first, *(name for name in second if name not in first)]
    return [(name, first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)]


def _steps_named(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with its steps by name, "filter", "filter_2", and their order."""
    steps: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for step in recipe.get("steps", ()):
        for kind, settings in step.items():
            if settings is not None:
                counts[kind] += 1
                steps[kind if counts[kind] == 1 else f"{kind}_{counts[kind]}"] = settings
    return {**{name: value for name, value in recipe.items() if name != "steps"}, "steps": list(steps), **steps}


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the plain values in nested groups and lists, by dotted name."""
    found: dict[str, Any] = {}
    for name, inner in enumerate(value) if isinstance(value, list | tuple) else value.items():
        if inner is None:  # not set, as the rules that a filter has not
            continue
        if isinstance(inner, dict) or (isinstance(inner, list | tuple) and any(isinstance(one, dict) for one in inner)):
            found |= _flat(inner, f"{prefix}{name}.") or {f"{prefix}{name}": {}}
        else:
            found[f"{prefix}{name}"] = list(inner) if isinstance(inner, tuple) else inner
    return found
