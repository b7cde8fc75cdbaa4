"""The ways in which RoPE is scaled for sequences longer than a model was trained on. Nothing here imports torch.

`rope.frequencies` computes them. The names of Hugging Face's settings are those of transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Discriminator, Field, Tag

from tidewheel.config import Config

DEFAULT = "llama3"
"""The kind of settings without `kind`."""


class LinearScaling(Config):
    """Divide all frequencies (https://arxiv.org/abs/2306.15595, position interpolation)."""

    kind: Literal["linear"]
    """linear."""
    factor: float = Field(default=2.0, ge=1)
    """Frequencies are divided by this."""

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the settings in config.json."""
        return {"rope_type": "linear", "factor": self.factor}


class DynamicScaling(Config):
    """Raise the base of the frequencies by the length of sequences (dynamic NTK, https://arxiv.org/abs/2309.00071,
    appendix B.1).

    The length is `max_sequence_length` and not that of each batch, so the keys in a cache stay valid, and neither
    packing nor the number of workers changes a result.
    """

    kind: Literal["dynamic"]
    """dynamic."""
    factor: float = Field(default=2.0, ge=1)
    """A sequence of this many times the original length has a base of theta * factor ** 2, nearly."""
    original_length: int = Field(default=2048, ge=2)
    """Sequence length before scaling."""

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the settings in config.json."""
        return {"rope_type": "dynamic", "factor": self.factor}


class YarnScaling(Config):
    """YaRN (https://arxiv.org/abs/2309.00071, section 3): divide slow frequencies, sharpen attention."""

    kind: Literal["yarn"]
    """yarn."""
    factor: float = Field(default=4.0, ge=1)
    """Slow frequencies are divided by this."""
    original_length: int = Field(default=4096, ge=2)
    """Sequence length before scaling."""
    beta_fast: float = Field(default=32.0, gt=0)
    """Frequencies with more turns than this in `original_length` positions stay."""
    beta_slow: float = Field(default=1.0, gt=0)
    """Frequencies with fewer turns than this are divided by `factor`; those between are interpolated."""
    attention_factor: float | None = Field(default=None, gt=0)
    """Factor of queries and keys; default: 0.1 ln(factor) + 1, or the ratio of that of the two scales below."""
    mscale: float | None = None
    """Scale of ln(factor) above the line of the ratio, as DeepSeek-V3 has it."""
    mscale_all_dim: float | None = None
    """Scale of ln(factor) below the line."""
    truncate: bool = True
    """Round the limits between the kinds of frequencies to whole pairs."""

    @property
    def magnitude(self) -> float:
        """Return the factor of cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_magnitude(self.factor, self.mscale) / yarn_magnitude(self.factor, self.mscale_all_dim)
        return yarn_magnitude(self.factor)

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the settings in config.json."""
        values: dict[str, Any] = {
            "rope_type": "yarn", "factor": self.factor, "original_max_position_embeddings": self.original_length,
            "beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "truncate": self.truncate}
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if (value := getattr(self, name)) is not None:
                values[name] = value
        return values


class Llama3Scaling(Config):
    """Llama 3.1's scaling of RoPE for longer sequences (https://arxiv.org/abs/2407.21783); see `rope.frequencies`."""

    kind: Literal["llama3"] = Field(default="llama3", exclude=True)
    """llama3, also without this line."""
    factor: float = Field(default=8.0, ge=1)
    """Slow frequencies are divided by this."""
    low_frequency_factor: float = Field(default=1.0, gt=0)
    """Frequencies with fewer turns than this in `original_length` positions are divided by `factor`."""
    high_frequency_factor: float = Field(default=4.0, gt=0)
    """Frequencies with more turns than this in `original_length` positions stay; those between are interpolated."""
    original_length: int = Field(default=8192, ge=2)
    """Sequence length before scaling."""

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> Llama3Scaling:
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(f"low_frequency_factor {self.low_frequency_factor:g} is not below "
                             f"high_frequency_factor {self.high_frequency_factor:g}")
        return self

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the settings in config.json."""
        return {"rope_type": "llama3", "factor": self.factor, "low_freq_factor": self.low_frequency_factor,
                "high_freq_factor": self.high_frequency_factor,
                "original_max_position_embeddings": self.original_length}


def _kind(given: Any) -> str:
    return str(given.get("kind", DEFAULT)) if isinstance(given, Mapping) else getattr(given, "kind", DEFAULT)


RopeScaling = Annotated[
    Annotated[LinearScaling, Tag("linear")] | Annotated[DynamicScaling, Tag("dynamic")]
    | Annotated[YarnScaling, Tag("yarn")] | Annotated[Llama3Scaling, Tag("llama3")],
    Discriminator(_kind, custom_error_type="rope_scaling", custom_error_message=(
        "kind of scaling is not known; there are linear, dynamic, yarn and llama3"))]
"""Settings of one kind of scaling; those without `kind` are Llama 3's."""

_NAMES = {"low_freq_factor": "low_frequency_factor", "high_freq_factor": "high_frequency_factor",
          "original_max_position_embeddings": "original_length"}
KINDS: dict[str, type[Config]] = {"linear": LinearScaling, "dynamic": DynamicScaling, "yarn": YarnScaling,
                                  "llama3": Llama3Scaling}
"""The class of each kind, which are also Hugging Face's names of them."""


def from_hugging_face(values: Mapping[str, Any], max_length: int) -> dict[str, Any] | None:
    """Return the settings of config.json's RoPE; None: it is not scaled.

    Args:
        values: `rope_parameters`, or `rope_scaling` of transformers 4.
        max_length: `max_position_embeddings`.

    Raises:
        ValueError: the kind, or one of its settings, is not known.
    """
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind == "default":
        return None
    if kind not in KINDS:
        raise ValueError(f"rope_type: {kind!r}")
    settings: dict[str, Any] = {"kind": kind}
    known = KINDS[kind].model_fields
    for name, value in values.items():
        if name in ("rope_type", "type", "rope_theta", "partial_rotary_factor") or value is None:
            continue
        ours = _NAMES.get(name, name)
        if ours not in known and ours != "original_length":  # which others may have, and do not use
            raise ValueError(f"{name}: {value!r} of rope_type {kind!r}")
        if ours in known:
            settings[ours] = value
    if kind == "dynamic":
        settings["original_length"] = max_length  # transformers scales from it, whatever else is given
    return settings


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """Return 0.1 x scale x ln(factor) + 1, equation 22 of https://arxiv.org/abs/2309.00071 for a scale of 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
