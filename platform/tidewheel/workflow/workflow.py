"""`tw.Workflow`: data, tokenizers, trainings, evaluations, exports and functions as one object that can be killed and
run again.

A step's output path contains a hash of its recipe and inputs (`graph`). Its record is written last (`records`), and a
lease keeps a second driver from running it at the same time (`lease`). A second run therefore finds every step that a
first run published, on any machine.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from tidewheel import storage
from tidewheel.config import Setting
from tidewheel.console import console
from tidewheel.errors import ConfigError
from tidewheel.lease import Holder, Leases
from tidewheel.stopping import stopping
from tidewheel.workflow import graph
from tidewheel.workflow.function_kind import imported
from tidewheel.workflow.graph import Node
from tidewheel.workflow.plan import Planned, plan
from tidewheel.workflow.records import Record, Records
from tidewheel.workflow.schedule import Cancelled, Schedule, cancel_key
from tidewheel.workflow.steps import Call, WorkflowStep

if TYPE_CHECKING:
    from tidewheel.data.pipeline_summary import PipelineSummary
    from tidewheel.plan.scaling.laws import Law
    from tidewheel.train.loop import TrainResult

SPEC_KEY = "workflow.json"


class Spec(TypedDict):
    """A workflow as JSON values."""

    name: str
    output: str
    input: str
    steps: list[dict[str, Setting]]


@dataclass(frozen=True)
class WorkflowResult:
    """The records of a workflow's steps, by step name. The name of a training is its run id."""

    records: Mapping[str, Record]

    @property
    def hashes(self) -> dict[str, str]:
        """Content hash of each step's output, by step name."""
        return {name: record.artifact["hash"] for name, record in self.records.items()}

    @property
    def pipelines(self) -> dict[str, PipelineSummary]:
        """Summaries of the pipelines, by step name."""
        from tidewheel.data.pipeline_summary import PipelineSummary

        return {name: PipelineSummary(storage.store(record.place).read_json("summary.json"), record.place)
                for name, record in self.records.items() if record.kind == "pipeline"}

    @property
    def runs(self) -> dict[str, TrainResult]:
        """Results of the trainings, by step name."""
        from tidewheel.train.record import read_result

        results = {name: read_result(storage.store(record.place)) for name, record in self.records.items()
                   if record.kind == "train"}
        return {name: result for name, result in results.items() if result is not None}

    @property
    def laws(self) -> dict[str, Law]:
        """Fitted scaling laws, by step name."""
        from tidewheel.plan.scaling.budget import read_law

        return {name: read_law(storage.join(record.place, "law.json")).law for name, record in self.records.items()
                if record.kind == "scaling_law"}


class Workflow:
    """Steps in the order of their dependencies. Steps that do not depend on each other run at the same time.

    Args:
        name: name of the workflow.
        steps: `Pipeline`, `Train`, `Tokenizer`, `Reference`, `Evaluate`, `Export`, `ScalingLaw` and `Call` objects.
            Steps that these read are added by themselves.

    Raises:
        ConfigError: there are no steps.
    """

    def __init__(self, name: str, *steps: WorkflowStep) -> None:
        self.name = name
        self.steps = steps
        if not steps:
            raise ConfigError("a workflow without steps", where=f"Workflow({name!r})",
                              fix="give it a tw.Pipeline, a tw.Train, or both")

    def spec(self, output: str, input: str = ".") -> Spec:
        """Return the workflow as JSON values, which `jobs.workflow` runs on a cluster."""
        return {"name": self.name, "output": storage.absolute(output), "input": storage.absolute(input),
                "steps": graph.specify(self.steps)}

    def functions(self) -> dict[str, Callable[..., object]]:
        """Return the functions of all `Call` steps, by step name."""
        return {step.name: step.function for step in _with_inputs(self.steps) if isinstance(step, Call)}

    def nodes(self, output: str, *, input: str = ".") -> list[Node]:
        """Return the graph: steps with their keys and output URIs."""
        return nodes_of(self.spec(output, input))

    def plan(self, output: str, *, input: str = ".") -> list[Planned]:
        """Return what would run, why, and an estimate of its cost, without starting anything.

        `plan.rows` makes a table of it.
        """
        return plan(self.nodes(output, input=input), Records(output))

    def run(self, output: str, *, input: str = ".", address: str | None = None) -> WorkflowResult:
        """Run every step that is not published, on Ray. After a kill, failure or stop, run it again to go on.

        Args:
            output: URI that every step writes below; all nodes must see it.
            input: URI that relative paths of the steps are below.
            address: address of the Ray cluster, as `session` takes it.

        Raises:
            StepsFailed: a step failed; steps that do not depend on it are published.
            Cancelled: `cancel` was called. Trainings have saved.
            Stopped: Ctrl-C or SIGTERM arrived. Trainings have saved.
        """
        return run_spec(self.spec(output, input), address=address, functions=self.functions())

    def submit(self, address: str | None, output: str, *, input: str = ".", working_dir: str = "") -> str:
        """Submit the workflow to a job server, and return the job's id for `tidewheel job follow`.

        The workflow is written to `<output>/workflow.json`, which the cluster must be able to read.

        Args:
            address: URL of the job server, "http://head:8265"; None: as `JobServer` finds it.
            output: URI that every step writes below.
            input: URI that relative paths of the steps are below.
            working_dir: folder with the modules of function steps, which is uploaded; "" if the cluster's nodes have
                them.

        Raises:
            ClusterError: no job server answers at `address`.
            ConfigError: a function step cannot be imported on the cluster.
        """
        from tidewheel.cluster.jobs import JobServer, Submission

        spec = self.spec(output, input)
        for entry in spec["steps"]:
            if entry["kind"] == "function":
                imported(entry)
        target = storage.store(spec["output"])
        target.check()
        target.write_json(SPEC_KEY, spec)
        return JobServer(address).submit(Submission(
            f"python -m tidewheel.cli workflow run {shlex.quote(target.at(SPEC_KEY))}", working_dir=working_dir,
            metadata={"tidewheel_workflow": self.name}))

    def status(self, output: str, *, input: str = ".") -> list[dict[str, str]]:
        """Return one row per step with its state and its log; see `status_of`."""
        return status_of(self.spec(output, input))

    def cancel(self, output: str, *, input: str = ".") -> int:
        """Tell every driver of this workflow to stop, and return the number of drivers. Trainings save first."""
        return cancel_spec(self.spec(output, input))


def read_spec(uri: str) -> Spec:
    """Read the workflow that `Workflow.submit` wrote to `uri`.

    Raises:
        ConfigError: there is no such file, or it is no workflow.
    """
    fix = "give the URI of a workflow.json, as tw.Workflow(...).submit writes it, or FILE.py:NAME with --output"
    try:
        spec: Spec = json.loads(storage.read_text(uri))
    except FileNotFoundError:
        raise ConfigError("there is no such file", where=uri, fix=fix) from None
    except ValueError:
        raise ConfigError("this is not a workflow.json", where=uri, fix=fix) from None
    if not isinstance(spec, dict) or {"name", "output", "input", "steps"} - spec.keys():
        raise ConfigError("this is not a workflow.json", where=uri, fix=fix)
    return spec


def nodes_of(spec: Spec) -> list[Node]:
    """Return the graph of a spec."""
    return graph.resolve(spec["steps"], output=spec["output"], input=spec["input"])


def run_spec(spec: Spec, *, address: str | None = None,
             functions: Mapping[str, Callable[..., object]] | None = None) -> WorkflowResult:
    """Run the steps of a spec that are not published.

    Args:
        spec: the workflow.
        address: address of the Ray cluster, as `session` takes it.
        functions: functions of `Call` steps by step name, for those that cannot be imported.

    Raises:
        StepsFailed, Cancelled, Stopped: see `Workflow.run`.
    """
    from tidewheel.cluster.session import session
    from tidewheel.workflow.launch import RayLauncher

    records = Records(spec["output"])
    records.store.check()
    nodes = nodes_of(spec)  # reports wrong steps and missing files before a cluster starts
    if all(records.published(node) for node in nodes):
        return _result(nodes, records)
    leases = Leases(records.store.child("leases"), Holder.me())
    with stopping(ends_itself=True) as stop, session(address):
        launcher = RayLauncher(nodes, input=spec["input"], output=spec["output"], functions=functions)
        try:
            Schedule(nodes, records, leases, launcher, say=_say, stop=stop.requested).run()
        except Cancelled:
            if stop.by_signal:
                raise stop.stopped("what could be saved is saved") from None
            raise
    return _result(nodes, records)


def status_of(spec: Spec) -> list[dict[str, str]]:
    """Return one row per step: step, kind, state, detail, log, output.

    The state is published, running, failed, stopped or waiting.
    """
    records = Records(spec["output"])
    leases = Leases(records.store.child("leases"), Holder.me())
    rows = []
    for node in nodes_of(spec):
        attempt = records.attempt(node)
        holder = leases.look(node.id)
        if (record := records.published(node, check=False)) is not None:
            state, detail = "published", f"after {record.seconds:.0f} s, {record.artifact['hash'][:19]}"
        elif holder is not None:
            state, detail = "running", f"by process {holder['pid']} on {holder['host']}"
        elif attempt is not None and attempt["state"] != "running":
            state, detail = attempt["state"], attempt.get("error", "").replace("\n", " ")
        else:
            state, detail = "waiting", "its driver is gone: run the workflow again" if attempt else ""
        rows.append({"step": node.name, "kind": node.kind, "state": state, "detail": detail,
                     "log": records.log_uri(node) if attempt else "", "output": node.place})
    return rows


def cancel_spec(spec: Spec) -> int:
    """Tell the drivers of a spec's steps to stop, and return their number; see `Workflow.cancel`."""
    records = Records(spec["output"])
    leases = Leases(records.store.child("leases"), Holder.me())
    drivers = {holder["driver"] for node in nodes_of(spec) if (holder := leases.look(node.id)) is not None}
    for driver in drivers:
        records.store.write_json(cancel_key(driver), {"by": os.getpid()})
    return len(drivers)


def _result(nodes: Sequence[Node], records: Records) -> WorkflowResult:
    published = {node.name: records.published(node, check=False) for node in nodes}
    return WorkflowResult({name: record for name, record in published.items() if record is not None})


def _with_inputs(steps: Sequence[WorkflowStep]) -> Iterator[WorkflowStep]:
    """Yield steps and everything that they read."""
    for step in steps:
        yield step
        yield from _with_inputs(list(step.inputs().values()))


def _say(text: str) -> None:
    console.print(text, markup=False)
