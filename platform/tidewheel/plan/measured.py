"""Times of recovery from files that the benchmarks write, in place of the defaults.

`python -m tests.benchmarks.measured_times --output FILE` runs the benchmarks and puts what they write into one file.
"""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from tidewheel import storage
from tidewheel.config import Config
from tidewheel.errors import ConfigError, StorageError
from tidewheel.plan.config import GoodputConfig

DETECTED_BY = "frozen"
"""Event of the benchmark: a node freezes."""
RECOVERED_FROM = "worker"
"""Event of the benchmark: a worker is killed."""
NEW_PROCESSES = "plain"
"""Event of the benchmark: a node is killed, and the recovery starts new processes for all workers."""


Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Agreement(Config):
    """Time from deaths until the last survivor has joined the next generation."""

    workers: int = Field(ge=2)
    deaths: int = Field(ge=1)
    seconds: Seconds


class ControlPlaneFile(Config):
    """What `python -m tests.benchmarks.control_plane --output FILE` writes."""

    kind: Literal["control_plane"]
    agreements: tuple[Agreement, ...] = Field(min_length=1)


class ElasticFile(Config):
    """What `python -m tests.benchmarks.elastic --output FILE` writes: seconds without a step, by event."""

    kind: Literal["elastic"]
    seconds: dict[str, Seconds]


class MemoryTierFile(Config):
    """What `python -m tests.benchmarks.memory_tier --output FILE` writes."""

    kind: Literal["memory_tier"]
    keep_seconds: Seconds
    """Time for which training stands still for one copy in memory."""
    save_seconds: Seconds | None = None
    """Time for which it stands still for a save to storage; None if not measured."""


class SilentCorruptionFile(Config):
    """What `python -m tests.benchmarks.silent_corruption --output FILE` writes."""

    kind: Literal["silent_corruption"]
    check_share: float = Field(ge=0, lt=1)
    """Processor time that the checks add to a step at the default share of checked steps, as a share of the step."""


class StormRow(Config):
    """One storm of kills."""

    kill_seconds: float = Field(gt=0, allow_inf_nan=False)
    """Average time between two kills of a node."""
    ranks: int = Field(ge=1)
    """Most workers in a generation."""
    workers: int = Field(ge=1)
    """All workers, also those that stand by."""
    step_seconds: float = Field(gt=0, allow_inf_nan=False)
    load_seconds: Seconds
    """Simulated time of new process groups and of loading the state from memory."""
    rejoined_seconds: Seconds
    """Median time from a kill until the next generation has formed."""
    effective: float = Field(ge=0)
    """Work of the committed steps, relative to all workers without a kill."""


class StormFile(Config):
    """What `python -m tests.benchmarks.storm --output FILE` writes; the simulator is compared with it."""

    kind: Literal["storm"]
    storms: tuple[StormRow, ...] = Field(min_length=1)


One = Annotated[ControlPlaneFile | ElasticFile | MemoryTierFile | SilentCorruptionFile | StormFile,
                Field(discriminator="kind")]


class Measurements(Config):
    """What `python -m tests.benchmarks.measured_times --output FILE` writes: the files of several benchmarks in one."""

    kind: Literal["measurements"]
    machine: str = ""
    """Where and when they were measured, for people."""
    parts: tuple[One, ...] = Field(min_length=1)


_ADAPTER: pydantic.TypeAdapter[One | Measurements] = pydantic.TypeAdapter(
    Annotated[ControlPlaneFile | ElasticFile | MemoryTierFile | SilentCorruptionFile | StormFile | Measurements,
              Field(discriminator="kind")])


def read(uri: str) -> tuple[One, ...]:
    """Return the measurements in a file.

    Args:
        uri: of the file.

    Raises:
        ConfigError: it is missing, cannot be read, or is no measurement.
    """
    folder, name = storage.split(uri)
    fix = "give a file that tests.benchmarks.measured_times, or one of its benchmarks, wrote with --output"
    try:
        content = _ADAPTER.validate_json(folder.read(name))
    except FileNotFoundError:
        raise ConfigError("there is no such file", where=uri, fix=fix) from None
    except StorageError as error:
        raise ConfigError(f"it cannot be read: {error.what}", where=uri, fix=error.fix) from None
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"no measurement: {place + ': ' if place else ''}{problem['msg']}", where=uri,
                          fix=fix) from None
    return content.parts if isinstance(content, Measurements) else (content,)


def applied(config: GoodputConfig, uris: list[str]) -> GoodputConfig:
    """Return the configuration with measured times in its first tier, which is that of recovery in place.

    The control plane's file gives `seconds_per_1000_ranks`: one death at the largest number of workers. The elastic
    one gives `detect_seconds` (a frozen node, which no closed connection gives away) and `restart_seconds` with the
    load (a killed worker, whose loss is noticed at once), and `new_processes_seconds` with the detection. That of the
    memory tier gives the stalls, that of silent corruption `check_share`.

    Args:
        config: the configuration.
        uris: measurement files.

    Raises:
        ConfigError: a file is missing, or no measurement.
    """
    name, tier = next(iter(config.tiers.items()))
    for measured in (part for uri in uris for part in read(uri)):
        match measured:
            case ControlPlaneFile():
                single = [item for item in measured.agreements if item.deaths == 1] or list(measured.agreements)
                largest = max(single, key=lambda item: item.workers)
                config = config.model_copy(update={"seconds_per_1000_ranks": 1000 * largest.seconds / largest.workers})
            case ElasticFile():
                tier = tier.model_copy(update=_recovery_times(measured.seconds))
            case MemoryTierFile():
                stalls = {"refresh_stall_seconds": measured.keep_seconds}
                if measured.save_seconds is not None:
                    stalls["save_stall_seconds"] = measured.save_seconds
                tier = tier.model_copy(update=stalls)
            case SilentCorruptionFile():
                tier = tier.model_copy(update={"check_share": measured.check_share})
    return config.model_copy(update={"tiers": {**config.tiers, name: tier}})


def storms(uris: list[str]) -> list[StormRow]:
    """Return the storms in some files.

    Args:
        uris: measurement files.

    Raises:
        ConfigError: a file is missing, or no measurement.
    """
    parts = [part for uri in uris for part in read(uri)]
    return [row for part in parts if isinstance(part, StormFile) for row in part.storms]


def _recovery_times(seconds: dict[str, float]) -> dict[str, float]:
    """Return the times of a tier from the seconds without a step, by event."""
    times: dict[str, float] = {}
    if RECOVERED_FROM in seconds:
        times |= {"restart_seconds": seconds[RECOVERED_FROM], "load_seconds": 0.0}
    if DETECTED_BY in seconds:
        times["detect_seconds"] = max(0.0, seconds[DETECTED_BY] - seconds.get(RECOVERED_FROM, 0.0))
    if NEW_PROCESSES in seconds:
        times["new_processes_seconds"] = seconds[NEW_PROCESSES]
    return times
