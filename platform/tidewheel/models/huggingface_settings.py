"""Reading and writing config.json: what most families share.

A family reads the settings that it knows. Whatever it has not read must be harmless (`HARMLESS`, or off), or the import
is refused with its name and value: a setting that is passed over could change what the model computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import pydantic

from tidewheel.errors import ConfigError
from tidewheel.models import rope_scaling

if TYPE_CHECKING:
    from tidewheel.models.family import Model

M = TypeVar("M", bound="Model")

HARMLESS = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout",
    "attn_implementation", "attn_pdrop", "auto_map", "bos_token_id", "cache_implementation", "dtype", "embd_pdrop",
    "eos_token_id", "id2label", "initializer_range", "label2id", "max_length", "max_window_layers", "model_type",
    "n_ctx", "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type",
    "resid_pdrop", "return_dict", "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version",
    "use_cache", "vocab_size"})
"""Settings that do not change the logits of a forward pass: dropout, which only their training has, tokens, formats."""
REQUIRED = object()


class Settings:
    """The content of a config.json, while a family reads it.

    Args:
        values: the content.
        where: its URI, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self._where = values, where
        self._read: set[str] = set()
        self._odd: list[str] = []

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a setting; without a default it must be there.

        Raises:
            ConfigError: it is missing.
        """
        self._read.add(name)
        if name not in self._values and default is REQUIRED:
            raise self._incomplete(f"{name!r} is missing")
        return self._values.get(name, default)

    def must_be(self, **only: Any) -> None:
        """Refuse other values of settings than these, which are also their defaults."""
        for name, value in only.items():
            if (given := self.get(name, value)) != value:
                self._odd.append(f"{name}: {given!r} (only {value!r})")

    def refuse(self, reason: str) -> None:
        """Refuse the import for a reason, "name: value"."""
        self._odd.append(reason)

    def rope(self, values: Mapping[str, Any] | None = None, theta: float = 10_000.0) -> dict[str, Any]:
        """Return `rope_theta` and `rope_scaling` as a family has them.

        Args:
            values: settings of one kind of layer; default: those of all layers, in the form of transformers 4 or 5.
            theta: where none is given.
        """
        if values is None:
            values = {"rope_theta": self.get("rope_theta", theta), **(self.get("rope_scaling", None) or {}),
                      **(self.get("rope_parameters", None) or {})}
        partial = values.get("partial_rotary_factor", self.get("partial_rotary_factor", 1.0))
        if partial != 1.0:
            self._odd.append(f"partial_rotary_factor: {partial!r}")
        scaling = None
        try:
            scaling = rope_scaling.from_hugging_face(values, self.get("max_position_embeddings", 0))
        except ValueError as error:
            self._odd.append(str(error))
        return {"rope_theta": values.get("rope_theta", theta), "rope_scaling": scaling}

    def common(self) -> dict[str, Any]:
        """Return the settings of a decoder with RoPE and grouped-query attention, in the usual names."""
        heads = self.get("num_attention_heads")
        return {
            "dim": self.get("hidden_size"), "num_layers": self.get("num_hidden_layers"), "num_heads": heads,
            "num_kv_heads": self.get("num_key_value_heads", None) or heads, "head_dim": self.get("head_dim", None),
            "ffn_dim": self.get("intermediate_size"), "max_sequence_length": self.get("max_position_embeddings"),
            "norm_epsilon": self.get("rms_norm_eps"), "tie_embeddings": self.get("tie_word_embeddings", False)}

    def build(self, family: type[M], settings: Mapping[str, Any]) -> M:
        """Return the model of a family.

        Args:
            family: its class.
            settings: what was read, in the family's names.

        Raises:
            ConfigError: a setting is not known, has another value than the family computes, or is wrong.
        """
        for name, value in self._values.items():
            is_off = value is None or value is False or value in ("", {}, [])
            if name not in self._read and name not in HARMLESS and not is_off:
                self._odd.append(f"{name}: {value!r}")
        if self._odd:
            raise ConfigError(f"not known: {', '.join(self._odd)}"[:500], where=self._where,
                              fix="a model that computes something else cannot be imported; if a setting does not "
                              "change what the model computes, remove it from config.json")
        try:
            return family.model_validate(dict(settings))
        except pydantic.ValidationError as error:
            raise self._incomplete(" ".join(str(error).split())) from None

    def _incomplete(self, reason: str) -> ConfigError:
        return ConfigError(f"config.json is not complete: {reason[:300]}", where=self._where,
                           fix="download the model again")


def common_settings(model: Model, architecture: str, model_type: str, vocabulary_size: int, eos: int | None,
                    dtype: str) -> dict[str, Any]:
    """Return the content of config.json for `Settings.common`, for transformers 4 and 5.

    Args:
        model: to export.
        architecture: name of the class in transformers.
        model_type: of config.json.
        vocabulary_size: rows of the embedding.
        eos: id of the token that ends a document.
        dtype: of the weights.

    Raises:
        ConfigError: transformers would scale RoPE in another way.
    """
    scaling = model.rope_scaling
    if isinstance(scaling, rope_scaling.DynamicScaling) and scaling.original_length != model.max_sequence_length:
        raise ConfigError("transformers scales RoPE dynamically by the length of each batch, this model by "
                          f"max_sequence_length {model.max_sequence_length}", where="model.rope_scaling",
                          fix="set max_sequence_length to the original length before an export")
    rope = {"rope_type": "default"} if scaling is None else scaling.to_hugging_face()
    return {
        "architectures": [architecture], "model_type": model_type, "vocab_size": vocabulary_size,
        "hidden_size": model.dim, "intermediate_size": model.ffn_width, "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads, "num_key_value_heads": model.kv_heads, "head_dim": model.head_width,
        "max_position_embeddings": model.max_sequence_length, "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings, "hidden_act": "silu", "attention_bias": False,
        "attention_dropout": 0.0, "initializer_range": model.weight_std,
        "rope_theta": model.rope_theta, "rope_scaling": rope if scaling else None,  # transformers 4
        "rope_parameters": {**rope, "rope_theta": model.rope_theta},  # transformers 5
        "bos_token_id": None, "eos_token_id": eos, "torch_dtype": dtype}
