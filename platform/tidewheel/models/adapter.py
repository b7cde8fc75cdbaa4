"""The base of adapters: a part that adds a few trainable parameters to a model whose own parameters are frozen.

    class Scale(tw.Adapter):
        "One factor for each output of a linear layer."
        def build(self, name, module):
            return MyScale(module)          # an nn.Module: forward(layer, base, x) -> the layer's new output

An adapter is attached to modules of the decoder, which keep their names. Its own parameters are at "NAME.adapter.*".
Nothing here imports torch before an adapter is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from tidewheel.config import Setting
from tidewheel.errors import ConfigError
from tidewheel.models.adapting.counts import adaptable
from tidewheel.models.adapting.names import MARK as MARK
from tidewheel.models.adapting.names import matches
from tidewheel.parts import Part, name_of
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tidewheel.models.adapting.peft_names import Form
    from tidewheel.models.decoder import Decoder
    from tidewheel.models.family import Model

Place = Literal["linear", "output", "attention", "embedding"]
"""Modules that an adapter can be attached to. linear: linear layers of blocks, and the embedding if `EMBEDDING`.
output: the attention and the feed-forward as a whole. attention: the attention alone. embedding: the embedding."""
Dimension = Literal["tensor", "pipeline", "context"]


class Adapter(Part):
    """Base of every adapter."""

    VERSION: ClassVar[Version] = Version("adapter")
    """Version of what all adapters share: targets, and how initial values are drawn."""
    PLACE: ClassVar[Place] = "linear"
    """Modules that it can be attached to."""
    EMBEDDING: ClassVar[bool] = False
    """Whether it can be attached to the embedding too."""
    EXPERTS: ClassVar[bool] = False
    """Whether it can be attached to the stacked matrices of experts: `build` is given an `experts.StackedLinear`."""
    PEFT: ClassVar[str] = ""
    """Its `peft_type` in the library peft; "": peft has no such adapter."""
    WORKS_WITH: ClassVar[tuple[Dimension, ...]] = ("tensor", "pipeline", "context")
    """Kinds of parallelism that it works with, besides data parallelism."""
    CONSTANT: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of its tensors that stay as they were at the start. Checkpoints hold them too."""
    PROPOSED: ClassVar[Mapping[str, Any]] = {}
    """Settings with which a plan proposes it when memory is short; {}: it does not."""

    targets: tuple[str, ...] = Field(default=("attention", "ffn"), min_length=1)
    """Modules to adapt: whole components of their names with `*` for any characters, such as wq, attention.w*,
    blocks.0, ffn, experts or embedding. Each must match a module."""
    base: Literal["plain", "nf4"] = "plain"
    """How the frozen linear layers of blocks are kept. nf4: in 4 bits with 8-bit scales, 4.13 bits a parameter, as in
    QLoRA (https://arxiv.org/abs/2305.14314)."""

    init_from: str = ""
    """Start with the values of an adapter of equal shape: the URI of a run, of RUN/checkpoints/step_00000100, or of
    an imported adapter (`tidewheel checkpoint import-adapter`)."""

    def build(self, name: str, module: nn.Module) -> nn.Module:
        """Return the adapter of one module with uninitialised fp32 parameters, perhaps on the meta device.

        Its forward pass takes the module, the module's own forward pass and that pass's arguments. It returns the
        module's new output.

        Args:
            name: of the module in the whole model, "blocks.3.attention.wq".
            module: to adapt.
        """
        raise NotImplementedError

    @property
    def can_be_off(self) -> bool:
        """Whether the model computes as its base when no module calls its adapter."""
        return type(self).prepare is Adapter.prepare

    def parameters(self, model: Model, vocabulary_size: int) -> int:
        """Return the number of trainable parameters, without building them.

        Args:
            model: settings of the base.
            vocabulary_size: rows of its embedding.
        """
        total = 0
        for name, (number, inputs, outputs) in adaptable(self, model, vocabulary_size).items():
            if self.chooses(name):
                shapes = self.shapes(name, inputs, outputs)
                total += number * sum(math.prod(shapes[key]) for key in shapes if f".{key}" not in self.CONSTANT)
        return total

    def chooses(self, name: str) -> bool:
        """Return whether the targets include the module `name` of the whole model."""
        return any(matches(pattern, name) for pattern in self.targets)

    def shapes(self, name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters that are added to one module, by their names in the adapter.

        Args:
            name: of the module in the whole model.
            inputs: width of its input; of an embedding, its rows.
            outputs: width of its output; for an attention, of its keys.
        """
        raise NotImplementedError

    def prepare(self, model: Decoder) -> None:
        """Change the decoder itself, after the adapter was attached to its targets.

        Args:
            model: a decoder or a pipeline stage.
        """

    def distribution(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        """Return the mean and the standard deviation of the initial values of a parameter.

        Args:
            name: in the whole model, "blocks.3.attention.wq.adapter.a".
            shape: of the whole parameter.
        """
        raise NotImplementedError

    def to_peft(self, config: Model, values: Mapping[str, torch.Tensor]) -> Form:
        """Return the content of adapter_config.json and the tensors for the library peft.

        Args:
            config: of the model.
            values: the whole parameters, by their names in the whole model.

        Raises:
            ConfigError: peft has no such adapter.
        """
        raise ConfigError(f"peft has no adapter like {name_of(type(self))}", where="adapter.kind",
                          fix="keep the run's checkpoint, or choose another kind")

    @classmethod
    def reads_peft(cls, settings: Mapping[str, Setting]) -> bool:
        """Return whether `from_peft` reads an adapter with this adapter_config.json."""
        return settings["peft_type"] == cls.PEFT

    @classmethod
    def from_peft(cls, settings: Mapping[str, Setting], tensors: dict[str, torch.Tensor], config: Model,
                  where: str) -> Form:
        """Return settings of this class and parameters by their names in the whole model; see `to_peft`.

        Args:
            settings: content of adapter_config.json.
            tensors: of adapter_model.safetensors.
            config: of the model.
            where: location for messages.

        Raises:
            ConfigError: the adapter has parts that are not known here, or is of another model.
        """
        raise NotImplementedError

    def rate_factor(self, name: str) -> float:
        """Return the factor of the learning rate of a parameter.

        Args:
            name: in the whole model.
        """
        return 1.0
