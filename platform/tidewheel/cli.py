"""The `tidewheel` command.

Exit codes: 0 for success; 1 for a bug of ours, with a stack trace; 2 for user errors, with the cause, its location and
a fix; 130 and 143 for Ctrl-C and SIGTERM. Heavy imports happen inside the commands, so that help answers at once.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import cyclopts
from cyclopts import Parameter

import tidewheel
from tidewheel.commands import (
    checkpoint,
    cluster,
    data,
    evaluate,
    explain,
    generate,
    import_config,
    judge,
    k8s,
    launch,
    lm_eval,
    logs,
    plan,
    reference,
    rollouts,
    score,
    shards,
    teacher,
    win_rate,
    workflow,
)
from tidewheel.commands.options import Address, AsJson, DryRun, Overrides
from tidewheel.console import Output, console, print_table
from tidewheel.errors import ConfigError, ShardError, TidewheelError, root_cause
from tidewheel.printable import printable_lines
from tidewheel.stopping import SIGNALS, Stopped, stopping

if TYPE_CHECKING:
    from tidewheel.elastic.torchrun import Place
    from tidewheel.train.config import TrainConfig

app = cyclopts.App(
    name="tidewheel",
    help="Train language models from raw text, on a Ray cluster that may grow and shrink during the run.",
    version=tidewheel.__version__,
    suppress_keyboard_interrupt=False,  # cyclopts would exit without a message
    help_epilogue="New here? `tidewheel doctor` checks this machine, and `tidewheel demo` shows everything on it in a "
                  "few minutes.",
)
for sub in (data.app, shards.app, checkpoint.app, plan.app, k8s.app, cluster.cluster_app, cluster.job_app,
            rollouts.app, workflow.app, launch.slurm_app, launch.sky_app, launch.anyscale_app):
    app.command(sub)
app.command(cluster.submit)
app.command(logs.logs)
app.command(explain.explain)
app.command(evaluate.evaluate)
app.command(generate.generate)
app.command(import_config.import_config)
app.command(judge.judge)
app.command(lm_eval.lm_eval)
app.command(reference.reference)
app.command(score.score)
app.command(teacher.teacher)
app.command(win_rate.win_rate)


@app.command
def train(
    config: Annotated[str, Parameter(help="Training configuration, a YAML file; jobs/configs/ has examples.")],
    *,
    set_: Overrides = None,
    address: Address = None,
    local: Annotated[bool, Parameter(negative="", help="Train in this process, without Ray: for debugging.")] = False,
    device: Annotated[str, Parameter(help="With --local: cpu, cuda or cuda:1; default: the first GPU, or else "
                                          "cpu.")] = "",
    take_over: Annotated[bool, Parameter(negative="", help="Take over the run from a driver that still trains it. "
                                                           "What that driver writes afterwards is ignored.")] = False,
    branch: Annotated[str, Parameter(help="RUN@STEP: begin with the whole state that another run had at a step, and go "
                                          "on in its data from there. The same as --set run.branch=RUN@STEP.")] = "",
    dry_run: DryRun = False,
) -> int:
    """Train a model. If the run has started before, resume it.

    Workers may die, drain and join during the run, which continues with the same data order. On Ctrl-C or SIGTERM it
    saves and exits with code 130 or 143; a second signal ends it at once.
    """
    from tidewheel.config import load
    from tidewheel.elastic.torchrun import place
    from tidewheel.train.config import TrainConfig

    settings = load(TrainConfig, config, [*(set_ or ()), *([f"run.branch={branch}"] if branch else [])])
    where = place()
    if where is not None and (local or address):
        raise ConfigError("torchrun has started the ranks, which train without Ray", where="--local, --address",
                          fix="leave them out, or start without torchrun")
    if device and not local and where is None:
        raise ConfigError("on a cluster, workers choose their devices themselves", where="--device",
                          fix="add --local, or set elastic.gpus_per_worker")
    if where is not None:
        return _train_rank(settings, where, device, take_over=take_over, dry_run=dry_run)
    if dry_run:
        if settings.rollouts is not None:
            from tidewheel.post.plan import plan
        else:
            from tidewheel.train.plan import plan

        print_table(plan(settings), title="what would run")
        return 0
    from tidewheel.train.run import Run

    run = Run.open(settings)
    if settings.rollouts is not None:
        from tidewheel.post.running import prepare  # imports torch

        prepare(run)
    run.check()  # before a cluster starts for it
    if settings.model.init_from:
        from tidewheel.checkpoint.verify import locate

        locate(settings.model.init_from)
    from tidewheel.commands.fitting import fit_here, print_result

    print_result(fit_here(run, local=local, device=device, address=address, take_over=take_over))
    return 0


def _train_rank(settings: TrainConfig, where: Place, device: str, *, take_over: bool, dry_run: bool) -> int:
    """Train as one of torchrun's ranks and return the exit code; only rank 0 prints."""
    if dry_run:
        from tidewheel.train.plan import plan

        if where.leads:
            print_table(plan(settings), title="what would run")
        return 0
    from tidewheel.commands.fitting import print_result
    from tidewheel.elastic.torchrun import device_of, fit_ranks
    from tidewheel.train.local_device import describe
    from tidewheel.train.progress import training_bar

    rank_device = device_of(where, device)
    with contextlib.ExitStack() as stack:
        on_progress = None
        if where.leads:
            on_progress = stack.enter_context(training_bar(settings.steps))
            console.print(f"training on {where.world_size} rank(s) of torchrun; rank 0 on {describe(rank_device)}",
                          markup=False)
        try:
            with stopping(ends_itself=True) as stop:
                result = fit_ranks(settings, where, device=rank_device, on_progress=on_progress, take_over=take_over,
                                   stop=stop)
        except Stopped as stopped:
            if where.leads:
                raise
            return stopped.exit_code
    if where.leads:
        print_result(result)
    return 0


@app.command
def report(
    uri: Annotated[str, Parameter(help="URI of a run, or of a pipeline's output.")],
    *,
    data: Annotated[str | None, Parameter(help="Output of the run's pipeline, to show it on the same page.")] = None,
) -> int:
    """Write one self-contained HTML page about a run or a pipeline, and print its path."""
    from tidewheel.report.pipeline import write_pipeline_report
    from tidewheel.report.run import write_run_report
    from tidewheel.storage import store

    output = store(uri)
    if output.exists("run.json"):
        print(write_run_report(uri, data))
    elif output.exists("summary.json"):
        print(write_pipeline_report(uri))
    else:
        raise ConfigError("neither a run (run.json) nor a pipeline's output (summary.json)", where=uri,
                          fix="give the URI of --set run.uri=... or of --output")
    return 0


@app.command
def audit(run: Annotated[str, Parameter(help="URI of a run.")]) -> int:
    """Prove that a run read every sequence exactly once, in the planned order. Exit code 2 if not.

    Of a run of reinforcement learning, also that every prompt was admitted or dropped by name once.
    """
    from tidewheel.post.audit import audit_rollouts
    from tidewheel.train.audit import audit as check

    result, of_rollouts = check(run), audit_rollouts(run)
    print(result.summary())
    if of_rollouts is not None:
        print(of_rollouts.summary())
    if not result.ok:
        raise ShardError("the run did not read the planned batches", where=run,
                         fix="the steps named above differ: compare batches.jsonl with the shard manifest")
    if of_rollouts is not None and not of_rollouts.ok:
        raise ShardError("the rollouts are not those that the ledger and the prompts say", where=run,
                         fix="the steps named above differ: compare rollouts/steps with the shards of their waves")
    return 0


@app.command
def doctor(
    *,
    storage: Annotated[str | None, Parameter(help="Also test this URI: put, list, conditional put, multipart, delete, "
                                                  "and measure the speed.")] = None,
    address: Annotated[str | None, Parameter(help="Check every node of this Ray cluster: auto or host:port.")] = None,
    run: Annotated[str | None, Parameter(help="Check only what the steps of a run wait for: its folder.")] = None,
    as_json: AsJson = False,
) -> int:
    """Check this machine, every node of a cluster, or a run, and say how to fix what is wrong.

    Exit code 2 if a check fails.
    """
    from tidewheel.cluster.doctor import diagnose
    from tidewheel.cluster.doctor.run import run as diagnose_run

    if run is not None or address is None:
        checks = diagnose(storage) if run is None else diagnose_run(run)
        rows: list[dict[str, str]] = [vars(check) for check in checks]
        _show_checks(rows) if not as_json else print(json.dumps(rows, indent=2))
    else:
        from tidewheel.cluster.session import session

        with session(address):
            from tidewheel.cluster.doctor.nodes import diagnose_cluster, flat

            nodes = diagnose_cluster(storage)
        rows = flat(nodes)
        for node in nodes if not as_json else ():
            _show_checks([vars(check) for check in node.checks], title=node.name)
        if as_json:
            print(json.dumps(rows, indent=2))
    return 2 if any(row["status"] == "failure" for row in rows) else 0


def _show_checks(rows: Sequence[dict[str, str]], *, title: str = "") -> None:
    """Print checks on standard output."""
    output = Output(highlight=False, soft_wrap=True)
    if title:
        output.print(f"[bold]{title}[/]")
    marks = {"ok": "[green]ok     [/]", "warning": "[yellow]warning[/]", "failure": "[red]failure[/]"}
    for row in rows:
        output.print(f"{marks[row['status']]} {row['name']:<23} ", end="")
        output.print(row["detail"], markup=False)
        if row["fix"] and row["status"] != "ok":
            output.print(f"        fix: {row['fix']}", style="dim", markup=False)


@app.command
def demo(
    *,
    output: Annotated[str, Parameter(help="Folder for everything the demo writes.")] = "demo-output",
    storage: Annotated[Literal["folder", "s3"], Parameter(help="folder: plain files. s3: the same through an "
                       "S3-protocol server that the demo starts on loopback.")] = "folder",
    steps: Annotated[int | None, Parameter(help="Training steps; default: as the demo's configuration says.")] = None,
    disturb: Annotated[bool, Parameter(help="Kill a node at 40 % of the steps, and add one later.")] = True,
    posttrain: Annotated[bool, Parameter(negative="", help="Then fine-tune the model on conversations (SFT) and on "
                                         "preferences (DPO), and compare its answers.")] = False,
) -> int:
    """Train a model from raw text on this machine, with a node killed during the run, and write a report.

    Needs neither network nor GPU.
    """
    from tidewheel.demo.run import run_demo

    return run_demo(output=output, storage=storage, steps=steps, disturb=disturb, posttrain=posttrain)


def run_command(tokens: Sequence[str]) -> int:
    """Run one command line, and return its exit code; see the module."""
    try:
        code = app(list(tokens), exit_on_error=False, print_error=False, result_action="return_value")
        return code if isinstance(code, int) else 0
    except cyclopts.CycloptsError as error:
        console.print(f"[red]error:[/] {error}", markup=True)
        console.print("  fix: `tidewheel --help`, or --help after a command, lists commands and options", markup=False)
        return 2
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed the pipe
        sys.stdout = None  # type: ignore[assignment]  # or Python would flush it at exit, and fail
        return 0
    except Stopped as stopped:
        console.print(str(stopped), markup=False)
        return stopped.exit_code
    except KeyboardInterrupt:
        console.print("interrupted")
        return 128 + signal.SIGINT
    except BaseException as error:
        cause = root_cause(error)
        if not isinstance(cause, TidewheelError):
            raise
        console.print("[red]error:[/] ", end="")
        console.print(printable_lines(str(cause)), markup=False)
        return cause.exit_code


def leave(code: int) -> NoReturn:
    """End the process as Python does, but without the destructors of C++ libraries.

    There, Arrow's threads sometimes abort a process that has done its work, with "terminate called without an active
    exception" (apache/arrow#34314).
    """
    for number in SIGNALS:  # nothing is left to clean up on a signal
        signal.signal(number, signal.SIG_DFL)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError, ValueError):  # its reader is gone, or it is closed
            if stream is not None:
                stream.flush()
    os._exit(code)


def main() -> None:
    """Entry point of the console command."""
    leave(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
