"""`tw.Train`: a training run written in Python."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, Never

from tidewheel import storage
from tidewheel.config import Config, Setting, build, load, merged
from tidewheel.errors import ConfigError
from tidewheel.parts import Part, as_json, importable, is_own, name_of
from tidewheel.workflow.pipeline import Pipeline
from tidewheel.workflow.steps import REFERENCE, Reference, WorkflowStep

if TYPE_CHECKING:
    from tidewheel.models.adapter import Adapter
    from tidewheel.models.family import Model
    from tidewheel.train.batch_config import BatchConfig
    from tidewheel.train.callback import Callback
    from tidewheel.train.checkpoint_config import CheckpointConfig
    from tidewheel.train.compression import Compression
    from tidewheel.train.config import RunConfig, TrainConfig
    from tidewheel.train.data_config import DataConfig
    from tidewheel.train.elastic_config import ElasticConfig
    from tidewheel.train.evaluation_config import EvaluationConfig
    from tidewheel.train.fp8_config import Fp8Config
    from tidewheel.train.guards.config import GuardsConfig
    from tidewheel.train.logs.config import LogsConfig
    from tidewheel.train.memory.config import MemoryConfig
    from tidewheel.train.metrics.config import MetricsConfig, ProfileConfig
    from tidewheel.train.objective import Objective
    from tidewheel.train.optim.base import Optimizer
    from tidewheel.train.optim.schedule import Schedule
    from tidewheel.train.outer_config import OuterConfig
    from tidewheel.train.parallel.config import ParallelConfig
    from tidewheel.train.policy.config import RolloutsConfig
    from tidewheel.train.record import TrainResult
    from tidewheel.train.stage_schedule import StageSchedule

Settings = Mapping[str, Setting]
"""Settings of a group by name. Settings that are not given keep the configuration's values."""


class Train:
    """A training run on the shards of a pipeline.

    Args:
        config: path of a YAML file, or the settings as a dict.
        data: the `Pipeline` whose shards it reads, or the URI that a pipeline wrote to (its --output), or several of
            these by name: the domains of a mixture, whose weights are in the configuration.
        init_from: the `Train` whose last checkpoint it starts from.
        reference: for preference pairs, the `Reference` whose log-probabilities it reads.
        overlap: in a workflow, start when the first wave of `data` is packed instead of after all of it. The pipeline
            needs pack(waves=...).
        reading: settings of the group `data`.
        optimizer: settings that replace those in `config`, {"learning_rate": 2e-4}, or an object,
            tw.optimizers.AdamW(learning_rate=2e-4), which replaces the group. All other groups of `TrainConfig` work
            the same way.
        steps: number of optimizer steps. All other settings outside groups are given by value, too.

    Raises:
        ConfigError: there is no such argument, or a training cannot read the data.
    """

    def __init__(self, config: str | Settings,
                 data: Pipeline | str | Mapping[str, str | Pipeline] | None = None, *, init_from: Train | None = None,
                 reference: Reference | None = None, overlap: bool = False, run: Settings | RunConfig | None = None,
                 reading: Settings | DataConfig | None = None, model: str | Settings | Model | None = None,
                 adapter: str | Settings | Adapter | None = None, objective: str | Settings | Objective | None = None,
                 rollouts: Settings | RolloutsConfig | None = None,
                 optimizer: str | Settings | Optimizer | None = None,
                 schedule: str | Settings | Schedule | None = None, batch: Settings | BatchConfig | None = None,
                 parallel: Settings | ParallelConfig | None = None,
                 stage_schedule: str | Settings | StageSchedule | None = None,
                 compression: str | Settings | Compression | None = None,
                 outer: Settings | OuterConfig | None = None, steps: int | None = None, seed: int | None = None,
                 neftune_alpha: float | None = None,
                 precision: Literal["fp32", "bf16", "fp16", "fp8"] | None = None,
                 fp8: Settings | Fp8Config | None = None, parameters: Literal["fp32", "bf16"] | None = None,
                 tf32: bool | None = None, reproducible: bool | None = None, compile: bool | None = None,
                 compile_cache: str | None = None, run_ahead: bool | Literal["auto"] | None = None,
                 memory: Settings | MemoryConfig | None = None,
                 evaluation: Settings | EvaluationConfig | None = None,
                 checkpoint: Settings | CheckpointConfig | None = None, guards: Settings | GuardsConfig | None = None,
                 metrics: Settings | MetricsConfig | None = None, logs: Settings | LogsConfig | None = None,
                 profile: Settings | ProfileConfig | None = None,
                 callbacks: Sequence[str | Settings | Callback] | None = None,
                 elastic: Settings | ElasticConfig | None = None, **unknown: Never) -> None:
        if unknown:
            raise ConfigError(_no_argument(next(iter(unknown))), where="Train(...)",
                              fix="settings are nested: Train(..., optimizer={\"learning_rate\": 2e-4})")
        self.config = config
        self.data = data
        self.init_from = init_from
        self.reference = reference
        self.overlap = overlap
        for source in data.values() if isinstance(data, Mapping) else [data]:
            if isinstance(source, Pipeline) and not source.config().step("pack"):
                raise ConfigError(f"the pipeline {source.name!r} packs nothing that a training could read",
                                  where="Train(...)", fix="end it with .tokenize(...).pack(...)")
        if overlap and not (isinstance(data, Pipeline) and data.config().step("pack").waves):
            raise ConfigError("overlap needs a pipeline whose shards are read in waves", where="Train(...)",
                              fix="give data=PIPELINE with .pack(waves=8, ...), or leave overlap out")
        given: dict[str, Any] = {
            "run": run, "data": reading, "model": model, "adapter": adapter, "objective": objective,
            "rollouts": rollouts,
            "optimizer": optimizer, "schedule": schedule, "batch": batch, "parallel": parallel,
            "stage_schedule": stage_schedule,
            "compression": compression, "outer": outer, "steps": steps, "seed": seed, "neftune_alpha": neftune_alpha,
            "precision": precision, "fp8": fp8, "parameters": parameters, "tf32": tf32,
            "reproducible": reproducible, "compile": compile, "compile_cache": compile_cache, "run_ahead": run_ahead,
            "memory": memory, "evaluation": evaluation, "checkpoint": checkpoint, "guards": guards,
            "metrics": metrics, "logs": logs, "profile": profile, "callbacks": callbacks, "elastic": elastic}
        self.settings: dict[str, Setting] = {
            name: _written(value, name) for name, value in given.items() if value is not None}

    def resolve(self, data_uri: str | None = None, run_uri: str | None = None) -> TrainConfig:
        """Return the validated configuration.

        Args:
            data_uri: URI that the pipeline wrote to; default: as `data` says.
            run_uri: URI below which runs are written; default: as the configuration says.

        Raises:
            ConfigError: a setting is unknown, missing or wrong.
        """
        from tidewheel.train.config import TrainConfig

        source = data_uri or (storage.absolute(self.data) if isinstance(self.data, str) else None)
        overrides: list[str] = []
        if source:
            overrides += [f"data.uri={storage.join(source, 'shards')}",
                          f"data.validation={storage.join(source, 'validation')}"]
        elif isinstance(self.data, Mapping):  # the workflow decides where a pipeline writes
            for name, domain in self.data.items():
                shards = (storage.join(storage.absolute(domain), "shards") if isinstance(domain, str)
                          else f"{REFERENCE}{domain.name}")
                overrides.append(f"data.mixture.domains.{name}.shards={shards}")
        if run_uri:
            overrides.append(f"run.uri={run_uri}")
        if isinstance(self.config, str):
            return load(TrainConfig, self.config, overrides, self.settings)
        return build(TrainConfig, merged(TrainConfig, self.config, self.settings), overrides, where="Train(...)")

    @property
    def name(self) -> str:
        """The run id, which is the step's name in a workflow."""
        return self.resolve().run.id

    def inputs(self) -> dict[str, WorkflowStep]:
        """Return the workflow steps that this one reads, by role."""
        steps: dict[str, WorkflowStep] = {}
        if self.init_from is not None:
            steps["init"] = self.init_from
        if self.reference is not None:
            steps["reference"] = self.reference
        if isinstance(self.data, Mapping):
            steps |= {f"data.{name}": data for name, data in self.data.items() if not isinstance(data, str)}
        elif self.data is not None and not isinstance(self.data, str):
            steps["data"] = self.data
        return steps

    def entry(self) -> dict[str, Setting]:
        """Return the step as JSON values, as a workflow records it; see `steps`."""
        config = self.resolve()
        entry: dict[str, Setting] = {"kind": "train", "name": self.name, "config": config.canonical()}
        if self.overlap:
            entry["overlap"] = True
        if code := [asdict(module) for module in config.code()]:
            entry["code"] = code
        return entry

    def run(self, *, address: str | None = None, data_uri: str | None = None,
            run_uri: str | None = None) -> TrainResult:
        """Train on Ray to the last step. Resumes the run if it has started before.

        Args:
            address: address of the Ray cluster; None: a local one, or the one that RAY_ADDRESS names.
            data_uri: URI that the pipeline wrote to; default: as `data` says.
            run_uri: URI below which runs are written; default: as the configuration says.

        Raises:
            TidewheelError: the configuration, the data, the cluster or the storage does not allow the run; the message
                says which and how to correct it.
        """
        from tidewheel.cluster.session import session
        from tidewheel.elastic.leave import leaving
        from tidewheel.elastic.trainer import fit
        from tidewheel.train.progress import training_bar

        config = self.resolve(data_uri, run_uri)
        with training_bar(config.steps) as on_progress, leaving(config.run_uri), session(address):
            return fit(config, on_progress=on_progress)


def _written(value: Any, name: str) -> Setting:
    """Return a setting as JSON values. An object names its kind, so that it replaces the group."""
    if isinstance(value, Part):
        kind = name_of(type(value))
        if is_own(kind):
            importable(kind, where=f"Train({name}=...)")
        return as_json(value)
    if isinstance(value, Mapping):
        return {key: _written(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_written(inner, name) for inner in value]
    written: Setting = value.canonical() if isinstance(value, Config) else value
    return written


def _no_argument(name: str) -> str:
    """Return the message that `Train` has no argument `name`, with the nearest one."""
    known = [known for known in inspect.signature(Train).parameters if known not in ("config", "unknown")]
    group, _, setting = name.partition("__")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if setting and group in known:
        hint = f"did you mean {group}={{{setting!r}: ...}}?"
    elif near:
        hint = f"did you mean {near[0]!r}?"
    else:
        hint = f"there are {', '.join(known)}"
    return f"there is no argument {name!r}, {hint}"
