"""What a model family declares of its form at Hugging Face: names, weights and config.json, both ways."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Self

from tidewheel.config import Setting
from tidewheel.errors import ConfigError
from tidewheel.models.conversion import Conversion
from tidewheel.parts import Part, name_of


class HuggingFaceForm(Part):
    """The half of `Model` that import and export use. A family without it cannot be exported."""

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ()
    """Values of `model_type` in the config.json files that `from_hugging_face` reads."""
    HUGGING_FACE_PREFIX: ClassVar[str] = "model."
    """Begin of all names but the output's; checkpoints of a model without output lack it."""
    HUGGING_FACE_LAYER: ClassVar[str] = "model.layers.{}."
    """Begin of a layer's names, with {} for its index."""
    HUGGING_FACE_ENDS: ClassVar[Mapping[str, str]] = {
        "embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight"}
    """{name here: name at Hugging Face} outside blocks."""
    HUGGING_FACE_IGNORED: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)
    """Ends of names of buffers that follow from the configuration."""

    def hugging_face_names(self) -> dict[str, str]:
        """Return {name here: name at Hugging Face} of a block's modules: {"attention.wq": "self_attn.q_proj", ...}.

        Raises:
            ConfigError: transformers has no such model.
        """
        raise self._unknown_elsewhere()

    def hugging_face_weights(self, layer: int, present: Collection[str] | None = None) -> Sequence[Conversion]:
        """Return the weights of a layer that are more than renamed at Hugging Face; see `models.conversion`.

        Args:
            layer: index of the block.
            present: names in the layer of the checkpoint that is read, "mlp.experts.gate_up_proj", where a family has
                several forms; None: a checkpoint is written.
        """
        return ()

    def to_hugging_face(self, vocabulary_size: int, *, eos: int | None, dtype: str) -> dict[str, Setting]:
        """Return the content of config.json, for transformers 4 and 5.

        Args:
            vocabulary_size: rows of the embedding.
            eos: id of the token that ends a document.
            dtype: of the weights, "float32".

        Raises:
            ConfigError: transformers has no such model.
        """
        raise self._unknown_elsewhere()

    @classmethod
    def from_hugging_face(cls, values: Mapping[str, Setting], where: str) -> Self:
        """Return the configuration of a config.json whose `model_type` is one of `MODEL_TYPES`.

        Args:
            values: content of config.json.
            where: its URI, for messages.

        Raises:
            ConfigError: the variant of the model is computed differently, or a setting is missing.
        """
        raise NotImplementedError

    def _unknown_elsewhere(self) -> ConfigError:
        return ConfigError(f"the model family {name_of(type(self))} has no counterpart at Hugging Face",
                           where="model.kind", fix="export models of a family that has one, or implement "
                           "hugging_face_names and to_hugging_face in the family")
