"""Compare groups that meet over storage every so many steps (DiLoCo) with one run, at equal tokens.

    nice -n 10 python -m tests.benchmarks.diloco [--steps 400] [--every 20] [--seeds 2] [--output FOLDER]

A Llama of 128 x 2 layers (that of `tests.benchmarks.families`) trains on ../shared/corpus. All rows read the same
tokens in as many steps: one run with batches of 4 rows, 2 groups with 2 rows each, 4 groups with 1 row each. Groups
train in threads of this process, except for the row in which one is killed: there each is a process of its own, and
one gets SIGKILL and starts again after the other has decided a round without it.

Outer gradients are sent in int4, unless a row says otherwise. "error feedback" adds what the rounding leaves out to the
next outer gradient; the row "2 groups" is the same without it. Post-local SGD is one run for half of the steps, from
which groups branch off with its weights and optimizer; the gradients of that half count as sent by a ring all-reduce.
Bytes are those of one group per step and parameter: what it writes to storage for the others, and what it reads of
theirs, from the runs' own metrics. Outer states, which the groups commit besides, are in a column of their own. They
are compared with the fp32 gradients that a ring all-reduce among as many groups sends in each step, 2 (groups - 1) /
groups x 4 bytes (and receives as many).

A run that is in the output folder is not trained again. The exit code is 1 if a row sends less than 100 times fewer
bytes, if its loss is more than `REACH` above that of the run without groups with the same initial values, or if the
killed group did not come back.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks import families
from tests.unit.outer.groups import kill_one_on_the_way, train_together
from tidewheel import jsonlog, storage
from tidewheel.config import build
from tidewheel.console import print_table
from tidewheel.elastic.trainer import fit_local
from tidewheel.train.config import TrainConfig
from tidewheel.train.record import read_result

ROWS = 4
"""Rows of a step of all groups together."""
REACH = 0.15
"""Largest distance of a row's mean loss above that of the run without groups, in nats a token."""
FEWER = 100
"""Goal: how many times fewer bytes than gradients in each step."""
PATIENCE = 3.0
"""Seconds for which the other group waits for the one that is killed."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    groups: int
    outer: dict[str, Any] = field(default_factory=dict)
    seeds: int = 0
    """Initial values; 0: those of the command line."""
    killed: bool = False
    """Whether group 1 is killed on the way."""
    together: float = 0.0
    """Share of the steps that are those of the one run; its groups branch off then."""
    checked: bool = True
    """Whether its loss must be near that of one run."""


SHORT = {"quantise": "int4", "momentum": 0.5}
"""Settings of a short run: with the paper's momentum of 0.9, each outer gradient counts 7 times in the end, too often
while all groups still move in one direction. The row with 0.9 shows it."""
ONE = Row("one run", 1)
ROWS_OF_TABLE = [
    ONE, Row("2 groups", 2, SHORT), Row("4 groups", 4, SHORT),
    Row("2 groups, error feedback", 2, {**SHORT, "error_feedback": True}),
    Row("one run, 2 groups from 50 % on (post-local SGD)", 2, {"learning_rate": 1, "momentum": 0}, together=0.5),
    Row("2 groups, 2 fragments, overlap 2", 2, {**SHORT, "fragments": 2, "overlap": 2}, seeds=1),
    Row("2 groups, one killed at 40 %", 2, {**SHORT, "patience_seconds": PATIENCE}, seeds=1, killed=True),
    Row("2 groups, weights averaged in fp32 (local SGD)", 2, {"learning_rate": 1, "momentum": 0}, seeds=1),
    Row("2 groups, momentum 0.9", 2, {"quantise": "int4"}, seeds=1, checked=False)]


def config(folder: Path, data: str, row: Row, group: int, seed: int, steps: int, every: int) -> TrainConfig:
    """Return the configuration of one group of a row, or of the one run."""
    base = families.settings(families.shapes()["llama"], "llama", data, str(folder), steps, seed)
    values = base.canonical()
    place = _place(folder, row, seed, steps, every)
    values["run"] = {"id": f"group{group}", "uri": str(place)}
    if row.together:
        parent = _place(folder, ONE, seed, steps, every) / "group0"
        values["run"]["branch"] = f"{parent}@{round(row.together * steps / every) * every}"
    sequences = ROWS // row.groups
    values["batch"] |= {"global_sequences": sequences, "micro_sequences": sequences}
    values["checkpoint"] = {"every_steps": every, "keep_last": 1 + steps // every if row is ONE else 3}
    values["metrics"] = {"every_steps": 10}
    if row.groups > 1:
        values["outer"] = {"groups": row.groups, "group": group, "every": every, "store": str(place / "outer"),
                           **row.outer}
    return build(TrainConfig, {key: value for key, value in values.items() if value is not None})


def _place(folder: Path, row: Row, seed: int, steps: int, every: int) -> Path:
    name = "".join(letter if letter.isalnum() else "-" for letter in row.name)
    return folder / f"runs-{steps}-{every}" / f"{name}-{seed}"


def train_unless_complete(settings: TrainConfig) -> None:
    """Train a group in this process."""
    if read_result(storage.store(settings.run_uri)) is None:
        fit_local(settings)


def with_a_kill(configs: list[TrainConfig], folder: Path) -> None:
    """Train two groups in processes, of which one is killed, unless they are complete."""
    if any(read_result(storage.store(settings.run_uri)) is None for settings in configs):
        kill_one_on_the_way(configs, folder, step=int(0.4 * configs[1].steps))


@dataclass(frozen=True)
class Measured:
    """Figures of a row with one initial value."""

    loss: float
    """Mean over the groups, which differ where one has gone on alone; nats a token."""
    sent: float
    """Bytes a group sends, per step and parameter; so the next two."""
    received: float
    states: float
    rounds: int
    """Of group 0, and of all fragments; so the next."""
    complete: int
    """Rounds with all groups."""
    waited: float
    """Seconds a group waited for others, mean."""


def measured(configs: list[TrainConfig], parameters: int) -> Measured:
    """Return the figures of runs that are complete."""
    losses, lines = [], []
    for settings in configs:
        store = storage.store(settings.run_uri)
        result = read_result(store)
        assert result is not None
        assert result.validation_loss is not None
        losses.append(result.validation_loss)
        lines += [line for line in jsonlog.read(store, "metrics.jsonl") if "outer_sent_bytes" in line]
    unit = parameters * configs[0].steps * len(configs)
    sent, read, states = (sum(line[f"outer_{what}_bytes"] for line in lines) / unit
                          for what in ("sent", "read", "state"))
    waited = sum(line["outer_wait_seconds"] for line in lines) / len(configs)
    metrics = jsonlog.read(storage.store(configs[0].run_uri), "metrics.jsonl")
    first = [line for line in metrics if "outer_members" in line]
    complete = sum(line["outer_members"] == len(configs) for line in first)
    return Measured(statistics.mean(losses), sent, read, states, len(first), complete, waited)


def trained(row: Row, folder: Path, data: str, options: argparse.Namespace) -> list[Measured]:
    """Train a row with each initial value, and return its figures."""
    found = []
    for seed in range(1, 1 + (row.seeds or options.seeds)):
        configs = [config(folder, data, row, group, seed, options.steps, options.every) for group in range(row.groups)]
        if row.killed:
            with_a_kill(configs, folder)
        else:
            train_together(configs, train_unless_complete)
        parameters = storage.store(configs[0].run_uri).read_json("run.json")["parameters"]
        found.append(measured(configs, parameters))
    return found


def line(row: Row, found: list[Measured], one_run: list[Measured]) -> tuple[dict[str, Any], list[str]]:
    """Return a row's line of the table, and what is wrong with it.

    Args:
        row: the row.
        found: its figures, by initial value.
        one_run: those of the run without groups, for at least as many initial values.
    """
    loss = statistics.mean(each.loss for each in found)
    shown = {"run": row.name, "seeds": len(found), "loss": f"{loss:.3f}"}
    if row.groups == 1:
        columns = ("above one run", "rounds", "sent", "received", "all-reduce", "times fewer", "states", "waited, s")
        return {**shown, **dict.fromkeys(columns, "")}, []
    above = statistics.mean(each.loss - other.loss for each, other in zip(found, one_run, strict=False))
    ring = 2 * (row.groups - 1) / row.groups * 4
    sent, received, states = (statistics.mean(getattr(each, name) for each in found)
                              for name in ("sent", "received", "states"))
    sent, received = sent + row.together * ring, received + row.together * ring
    shown |= {"above one run": f"{above:+.3f}", "rounds": f"{found[0].rounds}, all in {found[0].complete}",
              "sent": f"{sent:.4f}", "received": f"{received:.4f}", "all-reduce": f"{ring:g}",
              "times fewer": f"{ring / sent:,.0f}", "states": f"{states:.4f}", "waited, s": f"{found[0].waited:.1f}"}
    wrong = []
    if row.checked and above > REACH:
        wrong.append(f"{row.name}: loss {loss:.3f}, {above:.3f} above one run")
    if ring / sent < FEWER and row.outer.get("quantise") and not row.together:
        wrong.append(f"{row.name}: {ring / sent:.0f} times fewer bytes")
    if row.killed and not 0 < found[0].complete < found[0].rounds:
        wrong.append(f"{row.name}: {found[0].complete} of {found[0].rounds} rounds had all groups")
    return shown, wrong


def main() -> int:
    """Train all rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", default="diloco-output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder, began = Path(options.output).resolve(), time.monotonic()
    data = families.made_data(str(folder))
    one_run = trained(ONE, folder, data, options)
    table, wrong = [], []
    for row in ROWS_OF_TABLE:
        found = one_run if row is ONE else trained(row, folder, data, options)
        shown, problems = line(row, found, one_run)
        table.append(shown)
        wrong += problems
    tokens = options.steps * ROWS * families.LENGTH
    print_table(table, title=f"validation loss after {tokens:,} tokens, rounds every {options.every} steps; bytes of a "
                "group per step and parameter")
    print(f"{time.monotonic() - began:.0f} s; " + ("; ".join(wrong) or "all as it should be"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
