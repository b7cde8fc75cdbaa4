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
from tidewheel.workflow.steps import REFERENCE

if TYPE_CHECKING:
    from tidewheel.models.family import Model
    from tidewheel.train.batch_config import BatchConfig
    from tidewheel.train.callback import Callback
    from tidewheel.train.checkpoint_config import CheckpointConfig
    from tidewheel.train.config import DataConfig, ElasticConfig, EvaluationConfig, RunConfig, TrainConfig
    from tidewheel.train.guards.config import GuardsConfig
    from tidewheel.train.logs.config import LogsConfig
    from tidewheel.train.memory.config import MemoryConfig
    from tidewheel.train.metrics.config import MetricsConfig, ProfileConfig
    from tidewheel.train.objective import Objective
    from tidewheel.train.optim.base import Optimizer
    from tidewheel.train.optim.schedule import Schedule
    from tidewheel.train.parallel.config import ParallelConfig
    from tidewheel.train.record import TrainResult

Settings = Mapping[str, Setting]
"""Settings of a group by name; those that are not given stay as the configuration has them."""


class Train:
    """A training run on the shards of a pipeline.

    Args:
        config: path of a YAML file, or the settings as a dict.
        data: the `Pipeline` whose shards it reads, or the URI that a pipeline wrote to (its --output), or such
            pipelines or URIs by name: the domains of a mixture, with the weights that the configuration gives them.
        init_from: the `Train` whose last checkpoint it starts from.
        overlap: in a workflow, start when the first wave of `data` is packed, not when all of it is; the pipeline must
            say how many waves there are, pack(waves=...).
        reading: settings of the group `data`.
        optimizer: settings that take the place of those in `config`, {"learning_rate": 2e-4}; or an object,
            tw.optimizers.AdamW(learning_rate=2e-4), which takes the place of the group. Likewise all other groups of
            `TrainConfig`.
        steps: and all other settings that are no groups: their value.

    Raises:
        ConfigError: there is no such argument, or the data is none that a training can read.
    """

    def __init__(self, config: str | Settings,
                 data: Pipeline | str | Mapping[str, str | Pipeline] | None = None, *, init_from: Train | None = None,
                 overlap: bool = False, run: Settings | RunConfig | None = None,
                 reading: Settings | DataConfig | None = None, model: str | Settings | Model | None = None,
                 objective: str | Settings | Objective | None = None,
                 optimizer: str | Settings | Optimizer | None = None,
                 schedule: str | Settings | Schedule | None = None, batch: Settings | BatchConfig | None = None,
                 parallel: Settings | ParallelConfig | None = None, steps: int | None = None, seed: int | None = None,
                 precision: Literal["fp32", "bf16", "fp16", "fp8"] | None = None,
                 parameters: Literal["fp32", "bf16"] | None = None, reproducible: bool | None = None,
                 compile: bool | None = None, compile_cache: str | None = None,
                 memory: Settings | MemoryConfig | None = None,
                 evaluation: Settings | EvaluationConfig | None = None,
                 checkpoint: Settings | CheckpointConfig | None = None, guards: Settings | GuardsConfig | None = None,
                 metrics: Settings | MetricsConfig | None = None, logs: Settings | LogsConfig | None = None,
                 profile: Settings | ProfileConfig | None = None,
                 callbacks: Sequence[str | Settings | Callback] | None = None,
                 elastic: Settings | ElasticConfig | None = None, **unknown: Never) -> None:
        if unknown:
            raise ConfigError(_no_argument(next(iter(unknown))), where="Train(...)",
                              mend="settings are nested: Train(..., optimizer={\"learning_rate\": 2e-4})")
        self.config, self.data, self.init_from, self.overlap = config, data, init_from, overlap
        for each in data.values() if isinstance(data, Mapping) else [data]:
            if isinstance(each, Pipeline) and not each.config().step("pack"):
                raise ConfigError(f"the pipeline {each.name!r} packs nothing that a training could read",
                                  where="Train(...)", mend="end it with .tokenize(...).pack(...)")
        if overlap and not (isinstance(data, Pipeline) and data.config().step("pack").waves):
            raise ConfigError("overlap needs a pipeline whose shards are read in waves", where="Train(...)",
                              mend="give data=PIPELINE with .pack(waves=8, ...), or leave overlap out")
        given: dict[str, Any] = {
            "run": run, "data": reading, "model": model, "objective": objective, "optimizer": optimizer,
            "schedule": schedule, "batch": batch, "parallel": parallel, "steps": steps, "seed": seed,
            "precision": precision, "parameters": parameters, "reproducible": reproducible, "compile": compile,
            "compile_cache": compile_cache, "memory": memory, "evaluation": evaluation, "checkpoint": checkpoint,
            "guards": guards, "metrics": metrics, "logs": logs, "profile": profile,
            "callbacks": callbacks, "elastic": elastic}
        self.settings: dict[str, Setting] = {
            name: _written(value, name) for name, value in given.items() if value is not None}

    def resolve(self, data_uri: str | None = None, run_uri: str | None = None) -> TrainConfig:
        """The validated configuration, reading what a pipeline wrote to `data_uri`, writing runs below `run_uri`."""
        from tidewheel.train.config import TrainConfig

        source = data_uri or (storage.absolute(self.data) if isinstance(self.data, str) else None)
        overrides: list[str] = []
        if source:
            overrides += [f"data.uri={storage.join(source, 'shards')}",
                          f"data.validation={storage.join(source, 'validation')}"]
        elif isinstance(self.data, Mapping):  # a pipeline's place is the workflow's to say
            for name, each in self.data.items():
                shards = (storage.join(storage.absolute(each), "shards") if isinstance(each, str)
                          else f"{REFERENCE}{each.name}")
                overrides.append(f"data.mixture.domains.{name}.shards={shards}")
        if run_uri:
            overrides.append(f"run.uri={run_uri}")
        if isinstance(self.config, str):
            return load(TrainConfig, self.config, overrides, self.settings)
        return build(TrainConfig, merged(TrainConfig, self.config, self.settings), overrides, where="Train(...)")

    @property
    def name(self) -> str:
        """Its run id: the step's name in a workflow."""
        return self.resolve().run.id

    def inputs(self) -> dict[str, Any]:
        """Steps of a workflow that it reads, by role."""
        found: dict[str, Any] = {"init": self.init_from} if self.init_from is not None else {}
        if isinstance(self.data, Mapping):
            found |= {f"data.{name}": data for name, data in self.data.items() if not isinstance(data, str)}
        elif self.data is not None and not isinstance(self.data, str):
            found["data"] = self.data
        return found

    def entry(self) -> dict[str, Any]:
        """What a workflow writes down about it; see `steps`."""
        overlap = {"overlap": True} if self.overlap else {}
        config = self.resolve()
        code = [asdict(each) for each in config.code()]
        return {"kind": "train", "name": self.name, "config": config.canonical(), **overlap,
                **({"code": code} if code else {})}

    def run(self, *, address: str | None = None, data_uri: str | None = None,
            run_uri: str | None = None) -> TrainResult:
        """Train on Ray to the last step, or resume the run that is there."""
        from tidewheel.cluster.session import session
        from tidewheel.elastic.leave import leaving
        from tidewheel.elastic.trainer import fit
        from tidewheel.train.progress import training_bar

        config = self.resolve(data_uri, run_uri)
        with training_bar(config.steps) as on_progress, leaving(config.run_uri), session(address):
            return fit(config, on_progress=on_progress)


def _written(value: Any, name: str) -> Setting:
    """Return a setting as JSON values; an object names its kind, so that it takes the place of the group."""
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
    """Say that `Train` has no argument `name`, and which one is meant."""
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
