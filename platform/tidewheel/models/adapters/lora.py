"""LoRA, with its variants rsLoRA (scale), LoRA+ (learning rates) and PiSSA (start)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from tidewheel.config import Setting
from tidewheel.errors import ConfigError
from tidewheel.models.adapter import Adapter
from tidewheel.models.adapting.names import by_module, first_match, parameter_name
from tidewheel.versions import Version

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tidewheel.models.adapting.peft_names import Form
    from tidewheel.models.family import Model


_KEYS, _EMBEDDING_KEYS = ("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")
_LENGTHS = "lora_magnitude_vector"
_UNKNOWN = ("modules_to_save", "layer_replication", "fan_in_fan_out", "lora_bias", "trainable_token_indices")
"""Settings of peft that are not supported."""


class Lora(Adapter):
    """y = W x + scale B A x with A [rank, inputs] and B [outputs, rank] (https://arxiv.org/abs/2106.09685).

    Each expert of a mixture has an A and a B of its own.
    """

    VERSION = Version("adapter_lora", uses=(Adapter.VERSION,))
    EMBEDDING = True
    PEFT = "LORA"
    PROPOSED: ClassVar[Mapping[str, Any]] = {"rank": 64, "targets": "[attention, ffn]"}
    # of QLoRA's appendix B.2 (arXiv:2305.14314)
    EXPERTS = True
    CONSTANT: ClassVar[tuple[str, ...]] = (".a0", ".b0")
    DIRECTED: ClassVar[bool] = False
    """Whether the rows of the sum are scaled to a learned length."""

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B."""
    alpha: float = Field(default=32.0, gt=0)
    """The scale is alpha / rank."""
    ranks: dict[str, int] = Field(default_factory=dict)
    """Ranks by pattern, as in `targets`, in place of `rank`; the first pattern that matches counts."""
    alphas: dict[str, float] = Field(default_factory=dict)
    """The same of alpha."""
    rank_stabilized: bool = False
    """The scale is alpha / sqrt(rank), so that high ranks learn as fast (rsLoRA, https://arxiv.org/abs/2312.03732)."""
    b_rate: float = Field(default=1.0, gt=0)
    """Learning rate of B as a multiple of A's. LoRA+ (https://arxiv.org/abs/2402.12354) proposes 16."""
    start: Literal["zero", "pissa"] = "zero"
    """zero: A is random and B is 0. pissa: A and B begin as the largest singular values and vectors of W, and what
    they began with is taken off W (https://arxiv.org/abs/2404.02948)."""

    @pydantic.model_validator(mode="after")
    def _positive(self) -> Lora:
        wrong: Mapping[str, Any] = {**self.ranks, **self.alphas}
        for pattern, value in wrong.items():
            if value <= 0:
                raise ValueError(f"{value} for {pattern!r}: ranks and alphas are above 0")
        return self

    def build(self, name: str, module: nn.Module) -> nn.Module:
        from tidewheel.models.adapting.low_rank import Directed, LowRank

        kind = Directed if self.DIRECTED else LowRank
        return kind(self, name, module, scale=self.size(name)[1], pissa=self.start == "pissa")

    def size(self, name: str) -> tuple[int, float]:
        """Return the rank and the scale of the module `name`."""
        rank = first_match(self.ranks, name, self.rank)
        alpha = first_match(self.alphas, name, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def shapes(self, name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
        rank, _ = self.size(name)
        a, b = (rank, inputs), (outputs, rank)
        return {"a": a, "b": b, "a0": a, "b0": b} if self.start == "pissa" else {"a": a, "b": b}

    def distribution(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        # the variance of peft's Kaiming-uniform A, 1 / (3 inputs)
        return 0.0, (3 * shape[-1]) ** -0.5 if name.endswith(".a") else 0.0

    def to_peft(self, config: Model, values: Mapping[str, torch.Tensor]) -> Form:
        import torch

        from tidewheel.models.adapting import peft_names
        from tidewheel.models.adapting.peft_experts import LAST, fused_parameters

        names = peft_names.their_modules(config)
        tensors: dict[str, torch.Tensor] = {}
        ranks: dict[str, int] = {}
        alphas: dict[str, float] = {}
        factors = {}
        for name, parts in by_module(values).items():
            a, b = parts["a"].float(), parts["b"].float()
            if "a0" in parts:  # what it began with, subtracted: twice the rank
                a, b = torch.cat((a, parts["a0"]), dim=-2), torch.cat((b, -parts["b0"]), dim=-1)
            factors[name] = (a, b, self.size(name)[1])
        fused = [one for one in fused_parameters(config) if factors.keys() & set(one.ours)]
        for one in fused:
            a, b, scale = one.join({name: factors.pop(name) for name in one.ours if name in factors})
            outer = [other for other in fused if other.module == one.module and other.parameter == LAST]
            holder = one.module if one.parameter == LAST or not outer else f"{one.module}.base_layer"
            tensors |= {f"{holder}.lora_A.weight": a, f"{holder}.lora_B.weight": b}
            ranks[one.name] = len(a) // one.experts
            alphas[one.name] = self._alpha(scale, ranks[one.name])
        modules = []
        for name, (a, b, scale) in factors.items():
            theirs = peft_names.theirs(name, names)
            modules.append(theirs)
            key_a, key_b = _KEYS if name != "embedding" else _EMBEDDING_KEYS
            tensors |= {f"{theirs}.{key_a}": a, f"{theirs}.{key_b}": b}
            if self.DIRECTED:
                tensors[f"{theirs}.{_LENGTHS}"] = values[parameter_name(name, "m")]
            ranks[theirs] = len(a)
            alphas[theirs] = self._alpha(scale, len(a))
        return {"peft_type": self.PEFT, "r": self.rank, "lora_alpha": self.alpha, "use_rslora": self.rank_stabilized,
                "use_dora": self.DIRECTED, "target_modules": peft_names.shortest(modules, names.values()),
                "target_parameters": [one.name for one in fused] or None,
                "rank_pattern": {name: value for name, value in ranks.items() if value != self.rank},
                "alpha_pattern": {name: value for name, value in alphas.items() if value != self.alpha},
                "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "init_lora_weights": True}, {
                    f"{peft_names.PREFIX}{name}": value.float().contiguous() for name, value in tensors.items()}

    def _alpha(self, scale: float, rank: int) -> float:
        return scale * (math.sqrt(rank) if self.rank_stabilized else rank)

    @classmethod
    def reads_peft(cls, settings: Mapping[str, Setting]) -> bool:
        return super().reads_peft(settings) and bool(settings.get("use_dora")) == cls.DIRECTED

    @classmethod
    def from_peft(cls, settings: Mapping[str, Setting], tensors: dict[str, torch.Tensor], config: Model,
                  where: str) -> Form:
        from tidewheel.models.adapting import peft_names
        from tidewheel.models.adapting.peft_experts import fused_parameters

        odd = [name for name in _UNKNOWN if settings.get(name)]
        if settings.get("bias", "none") != "none":
            odd.append("bias")
        if odd:
            raise ConfigError(f"not supported: {', '.join(odd)}", where=where,
                              fix="merge the adapter with peft, and import the whole model")
        ours = {theirs: name for name, theirs in peft_names.their_modules(config).items()}
        fused = fused_parameters(config)
        holders = [name for one in fused for name in (one.module, f"{one.module}.base_layer")]
        keys = dict(zip((*_KEYS, *_EMBEDDING_KEYS, _LENGTHS), "ababm"))
        read: dict[str, dict[str, torch.Tensor]] = {}
        for name, value in tensors.items():
            if name.endswith(".base_layer.weight"):  # peft adds the frozen embedding to an adapter of it
                continue
            module, key = peft_names.split(name, keys, (*ours, *holders), where)
            read.setdefault(module, {})[keys[key]] = value.float()
        patterns: Any = settings.get("alpha_pattern") or {}
        rank, alpha = int(str(settings["r"])), float(str(settings["lora_alpha"]))
        of_modules = peft_names.of_patterns(patterns, [*ours, *(one.name for one in fused)], alpha, where)
        values: dict[str, torch.Tensor] = {}
        ranks: dict[str, int] = {}
        alphas: dict[str, float] = {}
        for module, parts in read.items():
            theirs = module
            pieces = {ours[module]: (parts["a"], parts["b"])} if module in ours else {}
            whole = len(parts["a"])
            for one in fused if not pieces else ():
                if module.removesuffix(".base_layer") == one.module and one.shape == (len(parts["b"]),
                                                                                      parts["a"].shape[1]):
                    theirs, pieces, whole = one.name, one.split(parts["a"], parts["b"]), whole // one.experts
            if not pieces:
                raise ConfigError(f"{module} has an adapter of another shape than this model", where=where,
                                  fix="give the base model that the adapter was trained on")
            for name, (a, b) in pieces.items():
                values |= {parameter_name(name, "a"): a, parameter_name(name, "b"): b}
                if "m" in parts:
                    values[parameter_name(name, "m")] = parts["m"]
                share = a.shape[-2] / whole
                ranks[name] = a.shape[-2]
                alphas[name] = float(of_modules[theirs]) * (math.sqrt(share) if settings.get("use_rslora") else share)
        names = [*ours.values(), *(name for one in fused for name in one.ours)]
        return {"rank": rank, "alpha": alpha, "rank_stabilized": bool(settings.get("use_rslora")),
                "targets": peft_names.shortest(ranks, names),
                "ranks": {name: value for name, value in ranks.items() if value != rank},
                "alphas": {name: value for name, value in alphas.items() if value != alpha}}, values

    def rate_factor(self, name: str) -> float:
        return self.b_rate if name.endswith(".b") else 1.0
