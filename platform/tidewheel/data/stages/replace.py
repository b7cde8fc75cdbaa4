"""Whether a run would replace what another recipe, or the same one with other input, has made in its output."""

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
"""Settings that are named one by one."""


def would_replace(job: Job) -> str:
    """Return what is in the output and how its making differs, for people; "" where nothing is replaced.

    A run on an output of the same recipe brings it up to date: files may have come or changed since.
    """
    try:
        there = job.store.read_json(SUMMARY)
    except FileNotFoundError:
        return ""
    made = origin.read(job.store)
    if not _same_recipe(there, made, job.config):
        how = _settings(made, job)
    elif _nothing_in_common(job):
        how = f"no file of its input, {made['input']['uri']}, is in this one"
    else:
        return ""
    return (f"{there.get('name', 'a pipeline')}: {there.get('documents', 0):,} documents, {there.get('tokens', 0):,} "
            f"tokens; {how}")


def _same_recipe(there: dict[str, Any], made: dict[str, Any], config: PipelineConfig) -> bool:
    """Return whether an output was made with the recipe `config`; settings it did not know had their defaults."""
    if there.get("recipe_hash") == config.recipe_hash():
        return True
    try:
        return build(PipelineConfig, made.get("recipe", {})).recipe_hash() == config.recipe_hash()
    except ConfigError:  # not recorded, or of a version with other settings
        return False


def refuse(job: Job) -> None:
    """Raise ConfigError if a run would replace something."""
    if told := would_replace(job):
        raise would_be_replaced(told, job.output)


def would_be_replaced(told: str, output: str) -> ConfigError:
    """Return what is raised where `would_replace` has something to tell."""
    return ConfigError(f"the output was made in another way, and would be replaced: {told}", where=output,
                       mend="give --replace to replace it, or another --output to keep both")


def _settings(made: dict[str, Any], job: Job) -> str:
    if "recipe" not in made:
        return "its recipe is another one, and was not recorded"
    found = origin.differences(made["recipe"], origin.settings_of(job.config))
    only_one_has = {step for name, before, now in found if name == "steps" for step in {*before} ^ {*now}}
    found = [setting for setting in found if setting[0].partition(".")[0] not in only_one_has]
    told = [f"{name} was {_value(before)}, now {_value(now)}" for name, before, now in found[:SHOWN]]
    return "; ".join([*told, *([f"and {len(found) - SHOWN} settings more"] if len(found) > SHOWN else [])]
                     ) or "settings of this version that its own did not have"


def _value(value: Any) -> str:
    text = "not set" if value is None else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _nothing_in_common(job: Job) -> bool:
    before = {line["fingerprint"] for line in origin.read_inputs(job.store)}
    return bool(before) and before.isdisjoint(file.fingerprint for file in job.files)


def begin(job: Job) -> None:
    """Note that a run has begun: its units are not cleaned away before it has finished."""
    job.store.write_json(UNFINISHED, {"name": job.config.name, "recipe_hash": job.config.recipe_hash(),
                                      "began": time.time()})


def finish(place: Store, completed: list[str]) -> None:
    """Note which units the output is made of: their manifests' keys, and that the run is over."""
    place.write_json(UNITS, {"format": origin.FORMAT, "units": sorted(set(completed))})
    place.delete(UNFINISHED)


def read_units(place: Store) -> list[str]:
    """Return the keys of the manifests of the units that an output is made of.

    Raises:
        InputError: no pipeline of this version has finished here.
    """
    try:
        found: list[str] = place.read_json(UNITS)["units"]
    except FileNotFoundError:
        raise InputError("no units.json: no pipeline of this version has finished here", where=place.uri,
                         mend="run the pipeline once more, which does nothing twice; or give its --output") from None
    return found
