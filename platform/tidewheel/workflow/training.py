"""`tw.Train`: a training run written in Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidewheel import storage
from tidewheel.config import build, load
from tidewheel.errors import ConfigError
from tidewheel.workflow.pipeline import Pipeline
from tidewheel.workflow.steps import REFERENCE

if TYPE_CHECKING:
    from tidewheel.train.config import TrainConfig
    from tidewheel.train.loop import TrainResult


class Train:
    """A training run on the shards of a pipeline.

    Args:
        config: path of a YAML file, or the settings as a dict.
        data: the `Pipeline` whose shards it reads, or the URI that a pipeline wrote to (its --output), or such
            pipelines or URIs by name: the domains of a mixture, with the weights that the configuration gives them.
        init_from: the `Train` whose last checkpoint it starts from.
        overlap: in a workflow, start when the first wave of `data` is packed, not when all of it is; the pipeline must
            say how many waves there are, pack(waves=...).
        overrides: settings by dotted name, with "__" for the dot: Train(..., optimizer__learning_rate=1e-3).
    """

    def __init__(self, config: str | dict[str, Any],
                 data: Pipeline | str | Mapping[str, str | Pipeline] | None = None, *, init_from: Train | None = None,
                 overlap: bool = False, **overrides: Any) -> None:
        self.config, self.data, self.init_from, self.overlap = config, data, init_from, overlap
        for each in data.values() if isinstance(data, Mapping) else [data]:
            if isinstance(each, Pipeline) and not each.config().step("pack"):
                raise ConfigError(f"the pipeline {each.name!r} packs nothing that a training could read",
                                  where="Train(...)", mend="end it with .tokenize(...).pack(...)")
        if overlap and not (isinstance(data, Pipeline) and data.config().step("pack").waves):
            raise ConfigError("overlap needs a pipeline whose shards are read in waves", where="Train(...)",
                              mend="give data=PIPELINE with .pack(waves=8, ...), or leave overlap out")
        self.overrides = [f"{name.replace('__', '.')}={value}" for name, value in overrides.items()]

    def resolve(self, data_uri: str | None = None, run_uri: str | None = None) -> TrainConfig:
        """The validated configuration, reading what a pipeline wrote to `data_uri`, writing runs below `run_uri`."""
        from tidewheel.train.config import TrainConfig

        source = data_uri or (storage.absolute(self.data) if isinstance(self.data, str) else None)
        overrides = list(self.overrides)
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
            return load(TrainConfig, self.config, overrides)
        return build(TrainConfig, self.config, overrides, where="Train(...)")

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
        return {"kind": "train", "name": self.name, "config": self.resolve().canonical(), **overlap}

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
