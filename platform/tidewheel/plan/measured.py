"""Times of recovery from files that the benchmarks write, in place of the defaults."""

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


class Agreement(Config):
    """Time from deaths until the last survivor has joined the next generation."""

    workers: int = Field(ge=2)
    deaths: int = Field(ge=1)
    seconds: float = Field(ge=0, allow_inf_nan=False)


class ControlPlaneFile(Config):
    """What `python -m tests.benchmarks.control_plane --output FILE` writes."""

    kind: Literal["control_plane"]
    agreements: tuple[Agreement, ...] = Field(min_length=1)


class ElasticFile(Config):
    """What `python -m tests.benchmarks.elastic --output FILE` writes: seconds without a step, by event."""

    kind: Literal["elastic"]
    seconds: dict[str, float]


_ADAPTER: pydantic.TypeAdapter[ControlPlaneFile | ElasticFile] = pydantic.TypeAdapter(
    Annotated[ControlPlaneFile | ElasticFile, Field(discriminator="kind")])


def read(uri: str) -> ControlPlaneFile | ElasticFile:
    """Return the content of a measurement file.

    Args:
        uri: of the file.

    Raises:
        ConfigError: it is missing, or no measurement.
    """
    folder, name = storage.split(uri)
    fix = "give a file that tests.benchmarks.control_plane or tests.benchmarks.elastic wrote with --output"
    try:
        return _ADAPTER.validate_json(folder.read(name))
    except (FileNotFoundError, StorageError):
        raise ConfigError("there is no such file", where=uri, fix=fix) from None
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"no measurement: {place + ': ' if place else ''}{problem['msg']}", where=uri,
                          fix=fix) from None


def applied(config: GoodputConfig, uris: list[str]) -> GoodputConfig:
    """Return the configuration with measured times in its first tier, which is that of recovery in place.

    The control plane's file gives `seconds_per_1000_ranks`: one death at the largest number of workers. The elastic
    one gives `detect_seconds` (a frozen node, which no closed connection gives away) and `restart_seconds` with the
    load (a killed worker, whose loss is noticed at once).

    Args:
        config: the configuration.
        uris: measurement files.

    Raises:
        ConfigError: a file is missing, or no measurement.
    """
    name, tier = next(iter(config.tiers.items()))
    for uri in uris:
        measured = read(uri)
        if isinstance(measured, ControlPlaneFile):
            single = [item for item in measured.agreements if item.deaths == 1] or list(measured.agreements)
            largest = max(single, key=lambda item: item.workers)
            config = config.model_copy(update={"seconds_per_1000_ranks": 1000 * largest.seconds / largest.workers})
            continue
        times: dict[str, float] = {}
        if RECOVERED_FROM in measured.seconds:
            times |= {"restart_seconds": measured.seconds[RECOVERED_FROM], "load_seconds": 0.0}
        if DETECTED_BY in measured.seconds:
            recovery = measured.seconds.get(RECOVERED_FROM, 0.0)
            times["detect_seconds"] = max(0.0, measured.seconds[DETECTED_BY] - recovery)
        tier = tier.model_copy(update=times)
    return config.model_copy(update={"tiers": {**config.tiers, name: tier}})
