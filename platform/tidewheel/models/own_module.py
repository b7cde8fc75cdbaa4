"""A model family whose model is an `nn.Module` of the user's own, with a forward pass as Hugging Face's.

    class NeoX(tw.OwnModule):
        "GPT-NeoX of transformers."
        width: int = 64

        def module(self, vocabulary_size):
            from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
            return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=vocabulary_size, hidden_size=self.width, ...))

It is trained on one worker or with data parallelism of every kind, with everything that does not need to know its
inside: data, checkpoints, recovery, elasticity, precision, optimizers, validation. `train/parallel/own_module.py`
refuses what needs more. Nothing here imports torch before the module is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pydantic
from pydantic import Field

from tidewheel.errors import ConfigError
from tidewheel.models.costs import FeedForwardShape, LayerCosts
from tidewheel.models.family import Model
from tidewheel.parts import name_of
from tidewheel.versions import Version

if TYPE_CHECKING:
    from torch import nn

USED = {"vocabulary_size", "max_sequence_length", "init_from"}
"""Settings of `Model` that have a meaning for a module of one's own."""


class OwnModule(Model):
    """Base of a model that is a module of the user's own."""

    VERSION: ClassVar[Version] = Version("own_module")
    FEED_FORWARD: ClassVar[FeedForwardShape] = FeedForwardShape(inputs=0, kept=0, kept_compiled=0)

    attend_across_documents: bool = False
    """Train although a token sees earlier documents of its row. Otherwise the module must keep the documents of a row
    apart, given `position_ids` that begin at 0 in each, as the models of transformers 5 do."""
    training_flops_per_token: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """FLOPs of a forward and backward pass for one token, for MFU; 0: unknown, and no MFU is reported."""

    @pydantic.model_validator(mode="after")
    def _own_settings(self) -> OwnModule:
        own = {name for cls in type(self).__mro__ if issubclass(cls, OwnModule) and cls is not OwnModule
               for name in vars(cls).get("__annotations__", {})}
        foreign = sorted(name for name, field in Model.model_fields.items()  # run.json has those with defaults too
                         if name not in USED | own and getattr(self, name) != field.default)
        if foreign:
            raise ValueError(f"{foreign[0]} is a setting of Tidewheel's decoder, which {name_of(type(self))} is not; "
                             f"leave it out, or declare it in the class and use it in module()")
        return self

    def module(self, vocabulary_size: int) -> nn.Module:
        """Return the module with its initial values, on CPU; torch's generator is seeded before.

        Its forward pass takes `input_ids` [B, L] by that name, and `position_ids` [B, L] if it has such an argument. It
        returns logits [B, L, vocabulary_size], or an object whose `logits` they are.

        Args:
            vocabulary_size: number of logits.
        """
        raise NotImplementedError

    def parameters(self, vocabulary_size: int) -> int:
        """Return the number of parameters, those shared by several layers once."""
        import torch

        with torch.device("meta"):
            module = self.module(vocabulary_size)
        return sum(parameter.numel() for parameter in module.parameters())

    def matmul_parameters(self, vocabulary_size: int) -> int:
        """Return the number of parameters, as nothing is known of what they multiply."""
        return self.parameters(vocabulary_size)

    def flops_per_token(self, vocabulary_size: int, sequence_length: int) -> int:
        """Return `training_flops_per_token`."""
        return int(self.training_flops_per_token)

    def layer_costs(self, layer: int) -> LayerCosts:
        raise self._without_inside()

    def block(self, layer: int) -> nn.Module:
        raise self._without_inside()

    def _without_inside(self) -> ConfigError:
        return ConfigError(f"{name_of(type(self))} is a module of your own, whose blocks nothing here knows",
                           where="model.kind", fix="plan, generate, export and adapt models of a built-in family; "
                           "load the weights of this one into the module itself")
