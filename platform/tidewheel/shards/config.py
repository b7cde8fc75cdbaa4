"""Configuration of a mixture of shard sets. This module imports neither numpy nor pyarrow."""

from __future__ import annotations

import re

import pydantic
from pydantic import Field

from tidewheel.config import Config

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class DomainConfig(Config):
    """One named shard set of a mixture."""

    shards: str = Field(min_length=1)
    """URI of the set (the folder with manifest.json)."""
    weight: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Share of the sequences, relative to the other domains' weights. Give one to all domains or to none; see
    `temperature`."""


class PhaseConfig(Config):
    """A phase of the run with its own weights."""

    until_tokens: int = Field(ge=1)
    """The phase ends when this many tokens, padding included, have been read since the start of the run: at the first
    sequence at or after that."""
    weights: dict[str, float] = Field(min_length=1)
    """Weight of each domain. A domain without a weight is not read in this phase."""


class MixtureConfig(Config):
    """The share of the sequences that comes from each domain."""

    domains: dict[str, DomainConfig] = Field(min_length=1)
    """Shard sets by name: letters, digits, dashes and underscores."""
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Without weights, a domain of n tokens has the weight n ** (1 / temperature): 1 is proportional to size, larger
    values are closer to equal shares (Arivazhagan et al., arXiv:1907.05019)."""
    max_repetitions: float = Field(default=4.0, ge=0, allow_inf_nan=False)
    """Read a domain at most this many times, then divide its share among the others; 0: no limit. Up to four epochs are
    nearly as good as new data (Muennighoff et al., arXiv:2305.16264)."""
    phases: tuple[PhaseConfig, ...] = ()
    """Curriculum: phases in order of time. After the last one, and in a run without phases, the domains' own weights
    apply."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> MixtureConfig:
        for name in self.domains:
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a valid name for a domain: letters, digits, '-' and '_', at most 64")
        given = [name for name, domain in self.domains.items() if domain.weight is not None]
        if given and len(given) < len(self.domains):
            missing = sorted(set(self.domains) - set(given))
            raise ValueError(f"domains without a weight: {', '.join(missing)}; give one to all domains or to none")
        if given and self.temperature != 1.0:
            raise ValueError("temperature has no effect when weights are given: leave one of the two out")
        if given and not any(domain.weight for domain in self.domains.values()):
            raise ValueError("all weights are 0")
        self._check_phases()
        return self

    def _check_phases(self) -> None:
        before = 0
        for phase in self.phases:
            if phase.until_tokens <= before:
                raise ValueError("phases: until_tokens must grow from phase to phase")
            before = phase.until_tokens
            unknown = sorted(set(phase.weights) - set(self.domains))
            if unknown:
                raise ValueError(f"phases: there is no domain {', '.join(unknown)}; known: "
                                 f"{', '.join(sorted(self.domains))}")
            if not all(0 <= weight < float("inf") for weight in phase.weights.values()) \
                    or not any(phase.weights.values()):
                raise ValueError("phases: weights are 0 or more, and at least one is more")
