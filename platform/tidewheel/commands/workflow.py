"""`tidewheel workflow ...`: workflows written with the SDK or in YAML, from the command line and as jobs."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter

from tidewheel.commands.options import Overrides
from tidewheel.console import print_table
from tidewheel.errors import ConfigError

if TYPE_CHECKING:
    from tidewheel.workflow.workflow import Spec

app = cyclopts.App(name="workflow", help="Data and training as one graph of steps, published once each.")

Source = Annotated[str, Parameter(help="FILE.yaml, a workflow in YAML; FILE.py:NAME, a Python file that defines it; or "
                                       "the URI of the workflow.json that tw.Workflow(...).submit wrote. The first two "
                                       "need --output.")]
Output = Annotated[str, Parameter(help="Folder or s3://bucket/prefix that every step writes below.")]
Input = Annotated[str, Parameter(help="Folder or s3://bucket/prefix that relative paths of the steps are below.")]
Address = Annotated[str | None, Parameter(help="Ray cluster to use: auto or host:port. Default: the cluster of "
                                               "RAY_ADDRESS, or else this machine.")]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON instead of a table.")]


@app.command
def run(config: Source, *, output: Output = "", input: Input = ".", set_: Overrides = None,
        address: Address = None) -> int:
    """Run every step that is not published. After a kill, failure or stop, repeat the command to resume.

    --set STEP.key=value changes a setting of one step of a workflow in YAML.
    """
    from tidewheel.workflow.workflow import run_spec

    spec, functions = _load(config, output, input, set_)
    result = run_spec(spec, address=address, functions=functions)
    print_table([{"step": record.name, "kind": record.kind, "hash": record.artifact["hash"][:19],
                  "seconds": f"{record.seconds:,.1f}", "output": record.place} for record in result.records.values()],
                title="published")
    return 0


@app.command
def plan(config: Source, *, output: Output = "", input: Input = ".", set_: Overrides = None,
         as_json: AsJson = False) -> int:
    """Show what would run, why, and an estimate of time, storage and GPU memory. Starts and writes nothing."""
    from tidewheel.workflow.plan import plan as make
    from tidewheel.workflow.plan import rows
    from tidewheel.workflow.records import Records
    from tidewheel.workflow.workflow import nodes_of

    spec, _ = _load(config, output, input, set_)
    table = rows(make(nodes_of(spec), Records(spec["output"])))
    print(json.dumps(table, indent=2)) if as_json else print_table(table, title=f"what {spec['name']} would run")
    return 0


@app.command
def status(config: Source, *, output: Output = "", input: Input = ".", set_: Overrides = None,
           as_json: AsJson = False) -> int:
    """Show which steps are published, running, failed, stopped or waiting."""
    from tidewheel.workflow.workflow import status_of

    rows = status_of(_load(config, output, input, set_)[0])
    print(json.dumps(rows, indent=2)) if as_json else print_table(rows)
    return 0


@app.command
def cancel(config: Source, *, output: Output = "", input: Input = ".", set_: Overrides = None) -> int:
    """Tell the drivers of this workflow, wherever they run, to stop. Trainings save first."""
    from tidewheel.workflow.workflow import cancel_spec

    drivers = cancel_spec(_load(config, output, input, set_)[0])
    if not drivers:
        print("no driver runs a step of this workflow")
        return 0
    print(f"told {drivers} driver{'s' * (drivers != 1)} to stop")
    return 0


def _load(config: str, output: str, input: str,
          set_: Sequence[str] | None) -> tuple[Spec, dict[str, Callable[..., object]]]:
    """Return the workflow, and the functions of its steps if a Python file defines it.

    Raises:
        ConfigError: there is no such file or workflow, or the output is missing.
    """
    from tidewheel.workflow.workflow import Workflow, read_spec

    path, sep, name = config.rpartition(":")
    in_yaml = config.endswith((".yaml", ".yml"))
    if set_ and not in_yaml:
        raise ConfigError("--set changes steps of a workflow in YAML", where=config, fix="change the file instead")
    in_python = bool(sep) and path.endswith(".py")
    if not in_yaml and not in_python:
        return read_spec(config), {}
    fix = "give FILE.py:NAME, where the file says NAME = tw.Workflow(...)"
    if in_python and not Path(path).is_file():
        raise ConfigError("there is no such file", where=path, fix=fix)
    if not output:
        raise ConfigError("no output is given for the steps", where="--output",
                          fix="add --output s3://bucket/pretrain")
    if in_yaml:
        from tidewheel.workflow.workflow_file import read_workflow

        return read_workflow(config, set_ or ()).spec(output, input), {}
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    module_spec.loader.exec_module(module)
    flow = getattr(module, name, None)
    if not isinstance(flow, Workflow):
        raise ConfigError(f"{name!r} is not a tw.Workflow of this file", where=path, fix=fix)
    return flow.spec(output, input), flow.functions()
