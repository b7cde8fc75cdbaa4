"""The recipe of a data pipeline: what `tidewheel data run` reads, and what the SDK builds.

`read_config` holds the settings of `read`, `step_config` those of the steps; import both from here. Imports nothing
heavy, so that a wrong key is reported at once.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tidewheel.config import Config, recipe_hash
from tidewheel.data.read_config import ReadConfig
from tidewheel.data.step_config import (
    DecontaminateStep,
    DedupExactStep,
    DedupLinesStep,
    DedupNearStep,
    DedupUrlStep,
    FilterStep,
    PackStep,
    Step,
    TokenizeStep,
    TrainTokenizer,
    WriteStep,
    editing_parts,
)
from tidewheel.placement import PlacementConfig

__all__ = ["LAST", "UNDECISIVE", "DecontaminateStep", "DedupExactStep", "DedupLinesStep", "DedupNearStep",
           "DedupUrlStep", "FilterStep", "PackStep", "PipelineConfig", "ReadConfig", "Step", "TokenizeStep",
           "TrainTokenizer", "WriteStep"]

#: Steps that come last, in this order.
LAST = ("tokenize", "pack", "write")
#: Settings that say where a pipeline is computed, not what.
UNDECISIVE = ("placement",)


class PipelineConfig(Config):
    """A recipe: documents in; token shards, or documents for other tools, out."""

    name: str = Field("pipeline", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Shown in reports."""
    seed: int = Field(0, ge=0, lt=1 << 32)
    """Chooses the validation split."""
    read: ReadConfig
    """Where the documents are."""
    max_bad_fraction: float = Field(0.05, ge=0, le=1)
    """The run fails when a larger share of the records cannot be used; the others are put in quarantine."""
    partitions: Literal["auto"] | int = "auto"
    """Partitions of the documents by id: the unit of work after reading. `auto` takes one per 64 MiB of input
    (compressed files count three times), rounded up to a power of two, at least 4; it never depends on the cluster. A
    worker's memory follows the size of a partition, so more of them need less."""
    placement: PlacementConfig = PlacementConfig()
    """Nodes that its tasks run on."""
    steps: tuple[Step, ...]
    """What is done, in this order. `tokenize`, `pack` and `write` come last, in this order, and each may be left out; a
    recipe without pack and write ends as if `write` stood there."""

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
            raise ValueError(f"the last steps are {', '.join(LAST)}, in this order, found {', '.join(kinds)}")
        if "pack" in kinds and "tokenize" not in kinds:
            raise ValueError("pack needs tokenize before it")
        for kind in sorted(set(kinds) - {"filter"}):
            if kinds.count(kind) > 1:
                raise ValueError(f"{kind} is given {kinds.count(kind)} times; once is enough")
        self._check_product()
        tokenize = self.step("tokenize")
        if self.read.kind != "documents" and tokenize and tokenize.train and not tokenize.chat_template:
            raise ValueError("a tokenizer trained here has no chat template: name one with tokenize.chat_template, and "
                             "its special tokens with tokenize.train.special_tokens")
        if self.read.kind != "documents" and (editing := [name for step in self.steps for name in editing_parts(step)]):
            raise ValueError(f"{', '.join(editing)} would change the text of conversations, whose messages are what is "
                             "tokenized: leave out what edits, or give filters annotate: true")
        if self.read.kind == "preferences" and self.step("pack") and self.step("pack").waves:
            raise ValueError("pack.waves is for packed sequences, which training reads in order; leave it out")
        return self

    def _check_product(self) -> None:
        product = self.product
        if product is None or "megatron" not in product.formats:
            if self.step("tokenize") and not self.step("pack"):
                raise ValueError("nothing takes the tokens: add pack, or write with formats: [megatron]")
            return
        if not self.step("tokenize"):
            raise ValueError("write.formats: megatron holds tokens, so tokenize must come before it")
        if self.read.kind != "documents":
            raise ValueError("write.formats: megatron has no loss mask, so it holds documents, not conversations")

    @property
    def product(self) -> WriteStep | None:
        """The step `write` with its formats; None in a recipe that packs and writes nothing else."""
        step = self.step("write")
        if step is None and self.step("pack"):
            return None
        step = step or WriteStep.model_validate({})
        default = "megatron" if self.step("tokenize") and not self.step("pack") else "parquet"
        return step if step.formats else step.model_copy(update={"formats": (default,)})

    def recipe_hash(self) -> str:
        """Return the hash of what decides the result: not where it is computed."""
        return recipe_hash({name: value for name, value in self.decisive().items() if name not in UNDECISIVE})

    def step(self, kind: str) -> Any:
        """Settings of the step of this kind, or None."""
        return next((step.settings for step in self.steps if step.kind == kind), None)
