"""`tw.Workflow`: data, tokenizers, trainings, evaluations, exports and functions as one object that can be killed and
run again.

Every step's output path is derived from a hash of what it is and what it reads (`graph`), its record is written last
(`records`), and a lease keeps a second driver from running it meanwhile (`lease`). So a second run finds what the first
one published, whoever ran it and wherever.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidewheel import storage
from tidewheel.console import console
from tidewheel.errors import ConfigError
from tidewheel.lease import Holder, Leases
from tidewheel.stopping import stopping
from tidewheel.workflow import graph
from tidewheel.workflow.graph import Node
from tidewheel.workflow.kinds import imported
from tidewheel.workflow.plan import Planned, plan
from tidewheel.workflow.records import Record, Records
from tidewheel.workflow.schedule import Cancelled, Schedule, cancel_key

if TYPE_CHECKING:
    from tidewheel.data.pipeline import PipelineSummary
    from tidewheel.train.loop import TrainResult

SPEC_KEY = "workflow.json"


@dataclass(frozen=True)
class WorkflowResult:
    """What a workflow made: the record of each step by name; a training is named by the run id it was given."""

    records: Mapping[str, Record]

    @property
    def hashes(self) -> dict[str, str]:
        """Content hash of what each step made."""
        return {name: record.artifact["hash"] for name, record in self.records.items()}

    @property
    def pipelines(self) -> dict[str, PipelineSummary]:
        """Summaries of the pipelines."""
        from tidewheel.data.pipeline import PipelineSummary

        return {name: PipelineSummary(storage.store(record.place).read_json("summary.json"), record.place)
                for name, record in self.records.items() if record.kind == "pipeline"}

    @property
    def runs(self) -> dict[str, TrainResult]:
        """Results of the trainings."""
        from tidewheel.train.record import read_result

        found = {name: read_result(storage.store(record.place)) for name, record in self.records.items()
                 if record.kind == "train"}
        return {name: result for name, result in found.items() if result is not None}


class Workflow:
    """Steps, run in the order in which they depend on each other, side by side where they do not.

    Args:
        name: name of the workflow.
        steps: `Pipeline`, `Train`, `Tokenizer`, `Evaluate`, `Export` and `Call` objects; what they read need not be
            named again.
    """

    def __init__(self, name: str, *steps: Any) -> None:
        self.name, self.steps = name, steps
        if not steps:
            raise ConfigError("a workflow without steps", where=f"Workflow({name!r})",
                              mend="give it a tw.Pipeline, a tw.Train, or both")

    def spec(self, output: str, input: str = ".") -> dict[str, Any]:
        """The workflow as JSON values: what `jobs.workflow` runs on a cluster."""
        return {"name": self.name, "output": storage.absolute(output), "input": storage.absolute(input),
                "steps": graph.specify(self.steps)}

    def nodes(self, output: str, *, input: str = ".") -> list[Node]:
        """The graph: steps with their keys and places."""
        return nodes_of(self.spec(output, input))

    def plan(self, output: str, *, input: str = ".") -> list[Planned]:
        """What would run, why, and an estimate of what it takes. Starts nothing; `plan.rows` makes a table of it."""
        return plan(self.nodes(output, input=input), Records(output))

    def run(self, output: str, *, input: str = ".", address: str | None = None) -> WorkflowResult:
        """Run every step that is not published, on Ray. Killed, failed or stopped: run it again.

        Args:
            output: URI that every step writes below; one that all nodes see.
            input: URI that relative paths of the steps are below.
            address: of the Ray cluster, as `session` takes it.

        Raises:
            StepsFailed: a step failed; what does not depend on it is published all the same.
            Cancelled: `cancel` was called. Trainings have saved.
            Stopped: Ctrl-C or SIGTERM came. Trainings have saved.
        """
        functions = {step.name: step.function for step in _everything(self.steps) if hasattr(step, "function")}
        return run_spec(self.spec(output, input), address=address, functions=functions)

    def submit(self, address: str | None, output: str, *, input: str = ".", working_dir: str = "") -> str:
        """Hand the workflow to the job server at `address` ("http://head:8265"); the job's id, for `tidewheel job
        follow`.

        The workflow is written to `<output>/workflow.json`, which the cluster must be able to read.

        Args:
            working_dir: folder with the modules of function steps, uploaded; "": the cluster's nodes have them.

        Raises:
            ClusterError: no job server answers there.
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

    def status(self, output: str, *, input: str = ".") -> list[dict[str, Any]]:
        """One row a step: what it is, its state, since when, its log; see `status_of`."""
        return status_of(self.spec(output, input))

    def cancel(self, output: str, *, input: str = ".") -> int:
        """Tell every driver that runs a step of this workflow to stop; how many there are. Trainings save first."""
        return cancel_spec(self.spec(output, input))


def read_spec(uri: str) -> dict[str, Any]:
    """What `Workflow.submit` wrote to `uri`, or that of the workflow in a Python file, "flow.py:NAME".

    Raises:
        ConfigError: it is neither.
    """
    mend = "give the URI of a workflow.json, as tw.Workflow(...).submit writes it, or FILE.py:NAME with --output"
    try:
        spec: dict[str, Any] = json.loads(storage.read_text(uri))
    except FileNotFoundError:
        raise ConfigError("there is no such file", where=uri, mend=mend) from None
    except ValueError:
        raise ConfigError("this is not a workflow.json", where=uri, mend=mend) from None
    if not isinstance(spec, dict) or {"name", "output", "input", "steps"} - spec.keys():
        raise ConfigError("this is not a workflow.json", where=uri, mend=mend)
    return spec


def nodes_of(spec: Mapping[str, Any]) -> list[Node]:
    """The graph of a spec."""
    return graph.resolve(spec["steps"], output=spec["output"], input=spec["input"])


def run_spec(spec: Mapping[str, Any], *, address: str | None = None,
             functions: Mapping[str, Callable[..., Any]] | None = None) -> WorkflowResult:
    """Run the steps of a spec that are not published; see `Workflow.run`."""
    from tidewheel.cluster.session import session
    from tidewheel.workflow.launch import RayLauncher

    records = Records(spec["output"])
    records.store.check()
    nodes = nodes_of(spec)  # what is wrong with the steps or their files is said before a cluster is started
    if all(records.published(node) for node in nodes):
        return _result(nodes, records)
    leases = Leases(records.store.child("leases"), Holder.me())
    with stopping(ends_itself=True) as stop, session(address):
        launcher = RayLauncher(nodes, input=spec["input"], output=spec["output"], functions=functions)
        try:
            Schedule(nodes, records, leases, launcher, say=_say, stop=stop.asked).run()
        except Cancelled:
            if stop.by_signal:
                raise stop.stopped("what could be saved is saved") from None
            raise
    return _result(nodes, records)


def status_of(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a step: step, kind, state (published, running, failed, stopped, waiting), detail, log, output."""
    records = Records(spec["output"])
    leases = Leases(records.store.child("leases"), Holder.me())
    rows = []
    for node in nodes_of(spec):
        attempt, holder = records.attempt(node), leases.look(node.id)
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


def cancel_spec(spec: Mapping[str, Any]) -> int:
    """Tell the drivers of a spec's steps to stop; see `Workflow.cancel`."""
    records = Records(spec["output"])
    leases = Leases(records.store.child("leases"), Holder.me())
    drivers = {holder["driver"] for node in nodes_of(spec) if (holder := leases.look(node.id)) is not None}
    for driver in drivers:
        records.store.write_json(cancel_key(driver), {"by": os.getpid()})
    return len(drivers)


def _result(nodes: Sequence[Node], records: Records) -> WorkflowResult:
    found = {node.name: records.published(node, check=False) for node in nodes}
    return WorkflowResult({name: record for name, record in found.items() if record is not None})


def _everything(steps: Sequence[Any]) -> Iterator[Any]:
    for step in steps:
        yield step
        yield from _everything(list(step.inputs().values()))


def _say(text: str) -> None:
    console.print(text, markup=False)
