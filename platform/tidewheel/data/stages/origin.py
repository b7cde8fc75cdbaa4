"""Record how an output was made: `recipe.json` (resolved recipe, versions, inputs) and `inputs.jsonl` (a line a file).

Both files are for people, for `tidewheel data diff`, and to detect that another recipe would replace an output. They
do not decide which units are reused; the keys of the units do.
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
    """Return the settings that decide a pipeline's result as JSON values, with defaults and without passwords."""
    settings: dict[str, Any] = without_secrets(
        {name: value for name, value in config.canonical().items() if name not in UNDECISIVE})
    return settings


def write(job: Job) -> dict[str, Any]:
    """Write both files; return the content of `recipe.json`."""
    lines = [json.dumps(line) for line in input_lines(job.files)]
    stamp = job.store.write(INPUTS, "".join(f"{line}\n" for line in lines).encode())
    value = {
        "format": FORMAT, "name": job.config.name, "recipe_hash": job.config.recipe_hash(),
        "recipe": settings_of(job.config),
        "input": {"uri": without_secrets(job.input), "files": len(lines),
                  "bytes": sum(file.bytes for file in job.files), "hash": stamp.hash, "listed": INPUTS,
                  **({"commits": dict(job.commits)} if job.commits else {})},
        "read_besides": _other_inputs(job),
        "versions": {"python": python_version(), **versions(PACKAGES)}, "commit": git_commit(),
        "partitions": job.partitions,
    }
    job.store.write_json(RECIPE, value)
    return value


def input_lines(files: Sequence[SourceFile]) -> list[dict[str, Any]]:
    """Return name, size and fingerprint of each input file."""
    return [{"file": without_secrets(member.name), "bytes": member.bytes, "fingerprint": member.fingerprint}
            for file in files for member in file.members or [file]]


def read(output: Store) -> dict[str, Any]:
    """Return `recipe.json` of an output; {} if an earlier version wrote none."""
    try:
        value = output.read_json(RECIPE)
    except FileNotFoundError:
        return {}
    return value if isinstance(value, dict) else {}


def read_inputs(output: Store) -> list[dict[str, Any]]:
    """Return the lines of `inputs.jsonl`; [] if an earlier version wrote none."""
    try:
        text = output.read(INPUTS).decode()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines()]


def _other_inputs(job: Job) -> dict[str, Any]:
    """Return the content hashes of all inputs other than the documents."""
    hashes: dict[str, Any] = {path: reference.partition("@")[0] for path, reference in sorted(job.references.items())}
    hashes |= {index.uri: index.hash for index in job.indexes}
    tokenizer = job.config.step("tokenize")
    if tokenizer is not None and tokenizer.file:
        hashes[tokenizer.file] = content_hash(job.tokenizer)
    if job.evals:
        hashes["evaluation items"] = content_hash(repr(job.evals).encode())
    cleaned: dict[str, Any] = without_secrets(hashes)
    return {without_secrets(name): value for name, value in cleaned.items()}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (dotted name, value before, value now) of each setting that differs; a missing value is None.

    Steps are named by their kind, so that an added step does not make all later ones differ.
    """
    first = _flat(_steps_named(before))
    second = _flat(_steps_named(now))
    names = [*first, *(name for name in second if name not in first)]
    return [(name, first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)]


def _steps_named(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with its steps by name ("filter", "filter_2"), and the order of these names as `steps`."""
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
    values: dict[str, Any] = {}
    for name, inner in enumerate(value) if isinstance(value, list | tuple) else value.items():
        if inner is None:  # not set
            continue
        is_list_of_dicts = isinstance(inner, list | tuple) and any(isinstance(item, dict) for item in inner)
        if isinstance(inner, dict) or is_list_of_dicts:
            values |= _flat(inner, f"{prefix}{name}.") or {f"{prefix}{name}": {}}
        else:
            values[f"{prefix}{name}"] = list(inner) if isinstance(inner, tuple) else inner
    return values
