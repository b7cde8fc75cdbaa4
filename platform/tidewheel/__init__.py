"""Tidewheel: elastic cluster training for language models on Ray. The run does not depend on the cluster.

The SDK composes data and training:

    import tidewheel as tw

    corpus = (
        tw.Pipeline("web")
        .read("s3://bucket/raw/*.jsonl.zst")
        .filter(tw.filters.gopher_quality())
        .dedup_exact()
        .dedup_near(ngram=5, bands=14, rows=8, min_jaccard=0.75)
        .decontaminate("s3://bucket/evals/*.jsonl")
        .tokenize("tokenizer.json")
        .pack(sequence_length=4096)
    )
    run = tw.Train("jobs/configs/demo.yaml", data=corpus)
    tw.Workflow("pretrain", corpus, run).run("s3://bucket/pretrain")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tidewheel import engines, environments, filters, rewards
    from tidewheel.data.filter import Batch, Document, Filter, Limits, Verdicts
    from tidewheel.data.reader import FileHead, FileMatch, Reader
    from tidewheel.data.similar import SimilarityIndex
    from tidewheel.engines.serving.base import Completion, Engine, EngineLost, EngineUse, Prefix, RunningEngine, Weights
    from tidewheel.engines.serving.process import ProcessEngine
    from tidewheel.environments.episode.base import Environment, Reply, Task
    from tidewheel.errors import TidewheelError
    from tidewheel.models import adapters
    from tidewheel.models import families as models
    from tidewheel.models.adapter import Adapter
    from tidewheel.models.config import Rope
    from tidewheel.models.costs import FeedForwardShape, LayerCosts
    from tidewheel.models.family import Cut, Model
    from tidewheel.models.own_module import OwnModule
    from tidewheel.rewards.scoring.base import Failure, Reward, Sample, Scores
    from tidewheel.rewards.scoring.process import RewardProcess
    from tidewheel.storage import Store
    from tidewheel.stores import Storage
    from tidewheel.train import callbacks, compressions, objectives, optimizers, schedules, stage_schedules, trackers
    from tidewheel.train.average import Average
    from tidewheel.train.callback import Callback, Step, Worker
    from tidewheel.train.compression import At, Compression, Exchange, Gather, Sum, Swap
    from tidewheel.train.metrics.sinks import Record
    from tidewheel.train.metrics.tracker import TrackedRun, Tracker
    from tidewheel.train.objective import Objective, Outputs, Sums
    from tidewheel.train.optim.base import Optimizer
    from tidewheel.train.optim.schedule import Schedule
    from tidewheel.train.stage_schedule import Passes, RunningStage, StageSchedule
    from tidewheel.train.step import MicroBatch
    from tidewheel.workflow.pipeline import Pipeline
    from tidewheel.workflow.steps import Call, Evaluate, Export, Reference, Tokenizer
    from tidewheel.workflow.sweep import ScalingLaw, sweep
    from tidewheel.workflow.training import Train
    from tidewheel.workflow.workflow import Workflow

_HOMES = {
    "Average": "tidewheel.train.average",
    "Adapter": "tidewheel.models.adapter",
    "Batch": "tidewheel.data.filter",
    "Document": "tidewheel.data.filter",
    "Filter": "tidewheel.data.filter",
    "Limits": "tidewheel.data.filter",
    "Verdicts": "tidewheel.data.filter",
    "Cut": "tidewheel.models.family",
    "Completion": "tidewheel.engines.serving.base",
    "Engine": "tidewheel.engines.serving.base",
    "EngineLost": "tidewheel.engines.serving.base",
    "EngineUse": "tidewheel.engines.serving.base",
    "Prefix": "tidewheel.engines.serving.base",
    "ProcessEngine": "tidewheel.engines.serving.process",
    "RunningEngine": "tidewheel.engines.serving.base",
    "Weights": "tidewheel.engines.serving.base",
    "Environment": "tidewheel.environments.episode.base",
    "Reply": "tidewheel.environments.episode.base",
    "Task": "tidewheel.environments.episode.base",
    "SimilarityIndex": "tidewheel.data.similar",
    "FeedForwardShape": "tidewheel.models.costs",
    "LayerCosts": "tidewheel.models.costs",
    "Rope": "tidewheel.models.config",
    "Model": "tidewheel.models.family",
    "OwnModule": "tidewheel.models.own_module",
    "FileHead": "tidewheel.data.reader",
    "FileMatch": "tidewheel.data.reader",
    "Reader": "tidewheel.data.reader",
    "Failure": "tidewheel.rewards.scoring.base",
    "Reward": "tidewheel.rewards.scoring.base",
    "RewardProcess": "tidewheel.rewards.scoring.process",
    "Sample": "tidewheel.rewards.scoring.base",
    "Scores": "tidewheel.rewards.scoring.base",
    "Storage": "tidewheel.stores",
    "Store": "tidewheel.storage",
    "Call": "tidewheel.workflow.steps",
    "Evaluate": "tidewheel.workflow.steps",
    "Export": "tidewheel.workflow.steps",
    "Reference": "tidewheel.workflow.steps",
    "Tokenizer": "tidewheel.workflow.steps",
    "Pipeline": "tidewheel.workflow.pipeline",
    "ScalingLaw": "tidewheel.workflow.sweep",
    "sweep": "tidewheel.workflow.sweep",
    "Train": "tidewheel.workflow.training",
    "Workflow": "tidewheel.workflow.workflow",
    "MicroBatch": "tidewheel.train.step",
    "Objective": "tidewheel.train.objective",
    "Outputs": "tidewheel.train.objective",
    "Sums": "tidewheel.train.objective",
    "Optimizer": "tidewheel.train.optim.base",
    "Schedule": "tidewheel.train.optim.schedule",
    "At": "tidewheel.train.compression",
    "Compression": "tidewheel.train.compression",
    "Exchange": "tidewheel.train.compression",
    "Gather": "tidewheel.train.compression",
    "Passes": "tidewheel.train.stage_schedule",
    "RunningStage": "tidewheel.train.stage_schedule",
    "StageSchedule": "tidewheel.train.stage_schedule",
    "Sum": "tidewheel.train.compression",
    "Swap": "tidewheel.train.compression",
    "Callback": "tidewheel.train.callback",
    "Step": "tidewheel.train.callback",
    "Worker": "tidewheel.train.callback",
    "Record": "tidewheel.train.metrics.sinks",
    "TrackedRun": "tidewheel.train.metrics.tracker",
    "Tracker": "tidewheel.train.metrics.tracker",
    "TidewheelError": "tidewheel.errors",
}
_MODULES = {
    "adapters": "tidewheel.models.adapters",
    "callbacks": "tidewheel.train.callbacks",
    "compressions": "tidewheel.train.compressions",
    "engines": "tidewheel.engines",
    "environments": "tidewheel.environments",
    "filters": "tidewheel.filters",
    "models": "tidewheel.models.families",
    "objectives": "tidewheel.train.objectives",
    "optimizers": "tidewheel.train.optimizers",
    "rewards": "tidewheel.rewards",
    "schedules": "tidewheel.train.schedules",
    "stage_schedules": "tidewheel.train.stage_schedules",
    "trackers": "tidewheel.train.trackers",
}

__all__ = ["Adapter", "At", "Average", "Batch", "Call", "Callback", "Completion", "Compression", "Cut", "Document",
           "Engine", "EngineLost", "EngineUse", "Environment", "Evaluate", "Exchange", "Export", "Failure",
           "FeedForwardShape", "FileHead", "FileMatch", "Filter", "Gather", "LayerCosts", "Limits", "MicroBatch",
           "Model", "Objective", "Optimizer", "Outputs", "OwnModule", "Passes", "Pipeline", "Prefix", "ProcessEngine",
           "Reader", "Record", "Reference", "Reply", "Reward", "RewardProcess", "Rope", "RunningEngine",
           "RunningStage", "Sample", "ScalingLaw", "Schedule", "Scores", "SimilarityIndex", "StageSchedule", "Step",
           "Storage", "Store", "Sum", "Sums", "Swap", "Task", "TidewheelError", "Tokenizer", "TrackedRun", "Tracker",
           "Train", "Verdicts", "Weights", "Worker", "Workflow", "adapters", "callbacks", "compressions", "engines",
           "environments", "filters", "models", "objectives", "optimizers", "rewards", "schedules", "stage_schedules",
           "sweep", "trackers"]


if not TYPE_CHECKING:  # to a checker, a name that is not above is a mistake
    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used, so that `import tidewheel` stays fast."""
        if name in _MODULES:
            return importlib.import_module(_MODULES[name])
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'tidewheel' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
