"""The kinds of steps that a workflow has, by the name in a step's entry."""

from __future__ import annotations

from typing import Any

from tidewheel.workflow.data_kinds import PipelineKind, TokenizerKind
from tidewheel.workflow.function_kind import FunctionKind
from tidewheel.workflow.law_kind import ScalingLawKind
from tidewheel.workflow.model_kinds import EvaluateKind, ExportKind, ReferenceKind, TrainKind

KINDS: dict[str, Any] = {"pipeline": PipelineKind(), "tokenizer": TokenizerKind(), "train": TrainKind(),
                         "reference": ReferenceKind(), "evaluate": EvaluateKind(), "export": ExportKind(),
                         "function": FunctionKind(), "scaling_law": ScalingLawKind()}
