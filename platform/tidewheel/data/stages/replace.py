"""Detect that a run would replace results of another recipe, or of the same recipe with other input."""

from __future__ import annotations

import json
import time
from typing import Any

from tidewheel.config import build
from tidewheel.data.config import PipelineConfig
from tidewheel.data.stages import origin
from tidewheel.data.stages.job import Job
from tidewheel.errors import ConfigError, InputError
from tidewheel.storage import Store

SUMMARY, UNITS, UNFINISHED = "summary.json", "units.json", "unfinished.json"
SHOWN = 6
"""Number of differing settings that a message lists."""


def would_replace(job: Job) -> str:
    """Describe the results in the output and how they were made differently; "" if a run would replace nothing.

    A run with the same recipe updates its output, since input files may have been added or changed; it replaces
    nothing.
    """
    try:
        previous = job.store.read_json(SUMMARY)
    except FileNotFoundError:
        return ""
    made = origin.read(job.store)
    if not _same_recipe(previous, made, job.config):
        difference = _settings(made, job)
    elif _nothing_in_common(job):
        difference = f"no file of its input, {made['input']['uri']}, is in this one"
    else:
        return ""
    return (f"{previous.get('name', 'a pipeline')}: {previous.get('documents', 0):,} documents, "
            f"{previous.get('tokens', 0):,} tokens; {difference}")


def _same_recipe(previous: dict[str, Any], made: dict[str, Any], config: PipelineConfig) -> bool:
    """Return whether an output was made with the recipe `config`; settings unknown to it count as defaults."""
    if previous.get("recipe_hash") == config.recipe_hash():
        return True
    try:
        return build(PipelineConfig, made.get("recipe", {})).recipe_hash() == config.recipe_hash()
    except ConfigError:  # the recipe was not recorded, or has settings of another version
        return False


def refuse(job: Job) -> None:
    """Check that a run replaces nothing.

    Raises:
        ConfigError: it would.
    """
    if description := would_replace(job):
        raise would_be_replaced(description, job.output)


def would_be_replaced(description: str, output: str) -> ConfigError:
    """Return the error for a non-empty result of `would_replace`."""
    return ConfigError(f"the output was made in another way, and would be replaced: {description}", where=output,
                       fix="give --replace to replace it, or another --output to keep both")


def _settings(made: dict[str, Any], job: Job) -> str:
    if "recipe" not in made:
        return "its recipe is another one, and was not recorded"
    differences = origin.differences(made["recipe"], origin.settings_of(job.config))
    only_in_one = {step for name, before, now in differences if name == "steps" for step in {*before} ^ {*now}}
    differences = [setting for setting in differences if setting[0].partition(".")[0] not in only_in_one]
    shown = [f"{name} was {_value(before)}, now {_value(now)}" for name, before, now in differences[:SHOWN]]
    if len(differences) > SHOWN:
        shown.append(f"and {len(differences) - SHOWN} settings more")
    return "; ".join(shown) or "settings of this version that its own did not have"


def _value(value: Any) -> str:
    text = "not set" if value is None else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _nothing_in_common(job: Job) -> bool:
    before = {line["fingerprint"] for line in origin.read_inputs(job.store)}
    return bool(before) and before.isdisjoint(file.fingerprint for file in job.files)


def begin(job: Job) -> None:
    """Record that a run has begun, so that `data clean` keeps its units until it has finished."""
    job.store.write_json(UNFINISHED, {"name": job.config.name, "recipe_hash": job.config.recipe_hash(),
                                      "began": time.time()})


def finish(output: Store, completed: list[str]) -> None:
    """Record the keys of the manifests of the output's units, and that the run has finished."""
    output.write_json(UNITS, {"format": origin.FORMAT, "units": sorted(set(completed))})
    output.delete(UNFINISHED)


def read_units(output: Store) -> list[str]:
    """Return the keys of the manifests of an output's units.

    Raises:
        InputError: no pipeline of this version has finished in this output.
    """
    try:
        keys: list[str] = output.read_json(UNITS)["units"]
    except FileNotFoundError:
        raise InputError("no units.json: no pipeline of this version has finished here", where=output.uri,
                         fix="run the pipeline again, which reuses finished units; or give its --output") from None
    return keys
