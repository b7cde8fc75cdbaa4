"""The recipe of a data pipeline, which `tidewheel data run` reads and the SDK builds.

Import all settings from here; `read_config` defines those of `read`, `step_config` those of the steps. These modules
import nothing heavy, so that an invalid key is reported at once.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tidewheel.config import Config, recipe_hash
from tidewheel.data.dedup_steps import DecontaminateStep, DedupExactStep, DedupLinesStep, DedupNearStep, DedupUrlStep
from tidewheel.data.filter_step import FilterStep
from tidewheel.data.output_steps import PackStep, TokenizeStep, TrainTokenizer, WriteStep
from tidewheel.data.read_config import ReadConfig
from tidewheel.data.step_config import Step, editing_parts
from tidewheel.placement import PlacementConfig

__all__ = ["LAST", "UNDECISIVE", "DecontaminateStep", "DedupExactStep", "DedupLinesStep", "DedupNearStep",
           "DedupUrlStep", "FilterStep", "PackStep", "PipelineConfig", "ReadConfig", "Step", "TokenizeStep",
           "TrainTokenizer", "WriteStep"]

LAST = ("tokenize", "pack", "write")
"""Steps that come last, in this order."""
UNDECISIVE = ("placement",)
"""Settings that do not change the result: where the pipeline runs."""


class PipelineConfig(Config):
    """A recipe: it turns documents into token shards, or into documents for other tools."""

    name: str = Field("pipeline", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name in reports."""
    seed: int = Field(0, ge=0, lt=1 << 32)
    """Seed of the validation split."""
    read: ReadConfig
    """Input files, and the meaning of their fields."""
    max_bad_fraction: float = Field(0.05, ge=0, le=1)
    """Fail if a larger share of the records is unusable. Unusable records go to quarantine."""
    partitions: Literal["auto"] | int = "auto"
    """Number of partitions of the documents by id: the units of work after reading. `auto` takes one for each 64 MiB of
    input (compressed files count three times), rounded up to a power of two, at least 4; it never depends on the
    cluster. A worker's memory grows with the size of a partition, so more partitions need less memory."""
    placement: PlacementConfig = PlacementConfig()
    """Nodes that the pipeline's tasks run on."""
    steps: tuple[Step, ...]
    """Steps in the order in which they run. `tokenize`, `pack` and `write` come last, in this order, and each is
    optional. A recipe without `pack` and `write` ends with the default `write`."""

    @field_validator("partitions")
    @classmethod
    def _positive(cls, value: Literal["auto"] | int) -> Literal["auto"] | int:
        if value != "auto" and not 1 <= value <= 1 << 20:
            raise ValueError("write auto, or a number from 1 to 1048576")
        return value

    @model_validator(mode="after")
    def _order(self) -> PipelineConfig:
        kinds = [step.kind for step in self.steps]
        last = [kind for kind in kinds if kind in LAST]
        if kinds[len(kinds) - len(last) :] != sorted(last, key=LAST.index):
            raise ValueError(f"the last steps are {', '.join(LAST)}, in this order, not {', '.join(kinds)}")
        if "pack" in kinds and "tokenize" not in kinds:
            raise ValueError("pack needs tokenize before it")
        for kind in sorted(set(kinds) - {"filter"}):
            if kinds.count(kind) > 1:
                raise ValueError(f"{kind} is given {kinds.count(kind)} times; once is enough")
        self._check_product()
        tokenize = self.step("tokenize")
        if self.read.kind != "documents" and tokenize and tokenize.train and not tokenize.chat_template:
            raise ValueError("a tokenizer trained here has no chat template: give one with tokenize.chat_template, and "
                             "its special tokens with tokenize.train.special_tokens")
        if self.read.kind != "documents" and (editing := [name for step in self.steps for name in editing_parts(step)]):
            raise ValueError(f"{', '.join(editing)} would change the text of conversations, but their messages are "
                             "tokenized: leave out steps that edit, or give filters annotate: true")
        if self.read.kind == "preferences" and self.step("pack") and self.step("pack").waves:
            raise ValueError("pack.waves works only for packed sequences, not for preference pairs; leave it out")
        return self

    def _check_product(self) -> None:
        product = self.product
        if product is None or "megatron" not in product.formats:
            if self.step("tokenize") and not self.step("pack"):
                raise ValueError("no step uses the tokens: add pack, or write with formats: [megatron]")
            return
        if not self.step("tokenize"):
            raise ValueError("write.formats: megatron contains tokens, so tokenize must come before it")
        if self.read.kind != "documents":
            raise ValueError("write.formats: megatron has no loss mask, so it works for documents, not conversations")

    @property
    def product(self) -> WriteStep | None:
        """The settings of `write` with its formats; None in a recipe that only packs."""
        step = self.step("write")
        if step is None and self.step("pack"):
            return None
        step = step or WriteStep.model_validate({})
        default = "megatron" if self.step("tokenize") and not self.step("pack") else "parquet"
        return step if step.formats else step.model_copy(update={"formats": (default,)})

    def recipe_hash(self) -> str:
        """Return the hash of the settings that decide the result, not of settings that decide where it is computed."""
        return recipe_hash({name: value for name, value in self.decisive().items() if name not in UNDECISIVE})

    def step(self, kind: str) -> Any:
        """Return the settings of the first step of this kind, or None."""
        return next((step.settings for step in self.steps if step.kind == kind), None)
