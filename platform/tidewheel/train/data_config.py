"""Settings of the data that a run trains on."""

from __future__ import annotations

import re

import pydantic
from pydantic import Field

from tidewheel.config import Config
from tidewheel.shards.config import MixtureConfig


class DataConfig(Config):
    """The data to train on, and their order."""

    uri: str = ""
    """URI of the training shard set (the folder with manifest.json)."""
    mixture: MixtureConfig | None = None
    """Several shard sets with given shares, instead of `uri`."""
    validation: str | dict[str, str] = ""
    """URI of the validation shard set, or several by domain, {web: URI, code: URI}; empty: no validation."""
    reference: str = ""
    """Preference pairs: folder of their log-probabilities under a reference model, as `tidewheel reference` printed it.
    It holds those of the training and validation sets."""
    teacher: str = ""
    """Distillation: folder of a teacher's most likely tokens, as `tidewheel teacher` printed it, of the training
    sets."""
    seed: int = Field(default=0, ge=0)
    """Seed of the order of sequences."""
    cache: str = ""
    """Local folder for shards read from an object store; default: a temporary one."""
    prefetch: int = Field(default=2, ge=0, le=64)
    """Batches read ahead."""
    wait_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Train on a set that a pipeline with `pack.waves` is still writing: start with the waves that exist, and fail when
    the next one has not come after this many seconds. 0: read finished sets only."""
    verify: bool = True
    """Hash each shard in the background when it is first read. No checkpoint is saved until the hashes are verified."""

    @pydantic.model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if self.uri and self.mixture is not None:
            raise ValueError("uri and mixture are both given: name one shard set, or the domains of a mixture")
        if self.wait_seconds and self.mixture is not None:
            raise ValueError("wait_seconds works only with uri: the sets of a mixture must be finished, because their "
                             "sizes determine the shares; leave it out")
        return self

    @pydantic.field_validator("validation")
    @classmethod
    def _named(cls, value: str | dict[str, str]) -> str | dict[str, str]:
        for name, uri in value.items() if isinstance(value, dict) else ():
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                raise ValueError(f"{name!r} is not a valid name of a validation set: use only letters, digits and "
                                 ". _ -")
            if not uri:
                raise ValueError(f"validation set {name!r} has no URI")
        return value

    @property
    def validation_sets(self) -> dict[str, str]:
        """URIs of the validation sets by domain; a single set's domain is ""."""
        if isinstance(self.validation, dict):
            return dict(self.validation)
        return {"": self.validation} if self.validation else {}

    @property
    def location(self) -> str:
        """Location of the data for messages: the URI, or the setting of the mixture."""
        return self.uri or ("data.mixture" if self.mixture else "data.uri")
