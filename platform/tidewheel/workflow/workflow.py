"""`tw.Workflow`: data and training as one object that can be killed and run again.

Every step's output path is derived from its recipe, so that a second run finds what the first one published:
pipelines below `<output>/data/<name>-<recipe hash>`, training runs below `<output>/runs/<run id>`.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidewheel import storage
from tidewheel.errors import ClusterError, ConfigError
from tidewheel.workflow.pipeline import Pipeline
from tidewheel.workflow.training import Train

if TYPE_CHECKING:
    from tidewheel.data.pipeline import PipelineSummary
    from tidewheel.train.loop import TrainResult

SPEC_KEY = "workflow.json"


@dataclass
class WorkflowResult:
    """What a workflow made: summaries of its pipelines by name, results of its runs by run id."""

    pipelines: dict[str, PipelineSummary] = field(default_factory=dict)
    runs: dict[str, TrainResult] = field(default_factory=dict)


class Workflow:
    """Pipelines and training runs, run in the order in which they depend on each other.

    Args:
        name: name of the workflow.
        steps: `Pipeline` and `Train` objects; the pipeline a `Train` reads need not be named again.
    """

    def __init__(self, name: str, *steps: Pipeline | Train) -> None:
        self.name = name
        self.trains = [step for step in steps if isinstance(step, Train)]
        named = [step for step in steps if isinstance(step, Pipeline)]
        needed = [step.data for step in self.trains if isinstance(step.data, Pipeline)]
        self.pipelines: list[Pipeline] = []
        for pipeline in [*named, *needed]:
            if pipeline not in self.pipelines:
                self.pipelines.append(pipeline)
        if not steps:
            raise ConfigError("a workflow without steps", where=f"Workflow({name!r})",
                              mend="give it a tw.Pipeline, a tw.Train, or both")

    @staticmethod
    def data_uri(pipeline: Pipeline, output: str) -> str:
        """Where a pipeline of this workflow writes."""
        return storage.join(output, "data", f"{pipeline.name}-{pipeline.recipe_hash()}")

    def plan(self, output: str) -> list[dict[str, Any]]:
        """One row a step: what it is, where it writes, whether it is done. Starts nothing."""
        rows: list[dict[str, Any]] = []
        for pipeline in self.pipelines:
            place = self.data_uri(pipeline, output)
            done = storage.store(place).exists("summary.json")
            rows.append({"step": pipeline.name, "kind": "pipeline", "output": place,
                         "state": "published" if done else "to run"})
        for train in self.trains:
            config = self._resolve(train, output)
            done = storage.store(config.run_uri).exists("result.json")
            rows.append({"step": config.run.id, "kind": "training", "output": config.run_uri,
                         "state": "finished" if done else "to run or resume"})
        return rows

    def _resolve(self, train: Train, output: str) -> Any:
        source = self.data_uri(train.data, output) if isinstance(train.data, Pipeline) else None
        return train.resolve(source, storage.join(output, "runs"))

    def run(self, output: str, *, input: str = ".", address: str | None = None) -> WorkflowResult:
        """Run every step on Ray; steps that are done are found and not repeated."""
        from tidewheel.cluster.session import session

        result = WorkflowResult()
        for train in self.trains:  # a configuration error shows before anything has run
            self._resolve(train, output)
        with session(address) as connected:
            for pipeline in self.pipelines:
                result.pipelines[pipeline.name] = pipeline.run(self.data_uri(pipeline, output), input=input,
                                                               address=connected)
            for train in self.trains:
                config = self._resolve(train, output)
                source = self.data_uri(train.data, output) if isinstance(train.data, Pipeline) else None
                result.runs[config.run.id] = train.run(address=connected, data_uri=source,
                                                       run_uri=storage.join(output, "runs"))
        return result

    def spec(self, output: str, input: str = ".") -> dict[str, Any]:
        """The workflow as JSON values, resolved: what `jobs.workflow` runs on a cluster."""
        return {
            "name": self.name, "output": output, "input": input,
            "pipelines": [pipeline.config().canonical() for pipeline in self.pipelines],
            "trains": [self._resolve(train, output).canonical() for train in self.trains],
        }

    def submit(self, address: str, output: str, *, input: str = ".") -> str:
        """Hand the workflow to the job server at `address` ("http://head:8265"); the job's id, for `ray job logs`.

        The resolved workflow is written to `<output>/workflow.json`, which the cluster must be able to read.

        Raises:
            ClusterError: no job server answers there.
        """
        from ray.job_submission import JobSubmissionClient

        output, input = storage.absolute(output), storage.absolute(input)  # the job runs in another folder
        target = storage.store(output)
        target.check()
        target.write_json(SPEC_KEY, self.spec(output, input))
        try:
            return JobSubmissionClient(address).submit_job(
                entrypoint=f"python -m tidewheel.cli workflow --spec {shlex.quote(target.at(SPEC_KEY))}",
                metadata={"tidewheel_workflow": self.name})
        except ConnectionError as error:
            raise ClusterError(f"no job server answers ({str(error).splitlines()[0]})", where=address,
                               mend="give the URL of the cluster's dashboard, for example http://head:8265") from None


def run_spec(uri: str, *, address: str | None = None) -> None:
    """Run what `Workflow.submit` wrote to `uri`."""
    from tidewheel.cluster.session import session
    from tidewheel.config import build
    from tidewheel.data import pipeline
    from tidewheel.data.config import PipelineConfig
    from tidewheel.data.progress import stage_bars
    from tidewheel.elastic.trainer import fit
    from tidewheel.train.config import TrainConfig
    from tidewheel.train.progress import training_bar

    spec = json.loads(storage.read_text(uri))
    pipelines = [build(PipelineConfig, values, where=uri) for values in spec["pipelines"]]
    trains = [build(TrainConfig, values, where=uri) for values in spec["trains"]]
    with session(address):
        for config in pipelines:
            place = storage.join(spec["output"], "data", f"{config.name}-{config.recipe_hash()}")
            with stage_bars() as on_progress:
                pipeline.run(config, input=spec["input"], output=place, on_progress=on_progress)
        for train in trains:
            with training_bar(train.steps) as on_step:
                fit(train, on_progress=on_step)
