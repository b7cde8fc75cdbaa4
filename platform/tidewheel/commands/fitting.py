"""Train an open run with the options of a command."""

from __future__ import annotations

from tidewheel.console import console
from tidewheel.stopping import stopping
from tidewheel.train.record import TrainResult
from tidewheel.train.run import Run


def print_result(result: TrainResult) -> None:
    """Print a run's figures, and write its report."""
    from tidewheel.report.run import write_run_report

    loss = f", loss {result.loss:.4f}" if result.loss is not None else ""
    validation = f", validation loss {result.validation_loss:.4f}" if result.validation_loss is not None else ""
    print(f"{result.steps} steps, {result.tokens:,} tokens{loss}{validation}")
    print(f"report: {write_run_report(result.run_uri)}")


def fit_here(run: Run, *, local: bool, device: str, address: str | None, take_over: bool = False) -> TrainResult:
    """Train with a bar on the console, on a Ray cluster or in this process; return the result.

    Args:
        run: the open run.
        local: train in this process, without Ray.
        device: with `local`, see `train.local_device`.
        address: of the Ray cluster.
        take_over: see `elastic.trainer.fit`.
    """
    from tidewheel.elastic.leave import leaving
    from tidewheel.elastic.trainer import fit, fit_local
    from tidewheel.train.progress import training_bar

    with training_bar(run.config.steps) as on_progress:
        if local:
            from tidewheel.train.local_device import describe, local_device

            train_device = local_device(device)
            console.print(f"training on {describe(train_device)}", markup=False)
            with stopping(ends_itself=True) as stop:
                return fit_local(run, on_progress=on_progress, take_over=take_over, stop=stop, device=train_device)
        from tidewheel.cluster.session import session

        with leaving(run.uri), session(address):
            return fit(run, on_progress=on_progress, take_over=take_over)
