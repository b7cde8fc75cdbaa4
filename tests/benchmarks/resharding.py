"""Load a checkpoint of every layout into every other: the state has the same bits, and later losses are the same.

    python -m tests.benchmarks.resharding [--experts] [--only TEXT]

Layouts: 1, 2 and 4 ranks, with and without tensor parallel 2 and pipeline parallel 2, the rest ZeRO-3. With --experts:
a mixture of experts, with and without expert parallel 2, tensor parallel 2 and pipeline parallel 2. Each trains 8
steps of the debug model in fp32 (gloo) and saves at step 3; this is the uninterrupted run. Each layout then starts from
each checkpoint. `unequal` counts loaded parameters and moments that differ in any bit from the saved ones. `loss` is
the largest relative difference of steps 4 to 8 from the uninterrupted run. The exit code is 1 when a state differs or a
loss differs by more than 1e-5.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

from tests.benchmarks.equivalence import LOSS_BOUND, losses, prepare, settings
from tidewheel import storage
from tidewheel.checkpoint.manager import CheckpointManager
from tidewheel.checkpoint.manifest import step_name
from tidewheel.checkpoint.peers import Peers
from tidewheel.checkpoint.staging import flatten
from tidewheel.console import print_table
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.runtime import Runtime

STEPS, SAVED = 8, 3
ORACLE, VERDICT = "saved.pt", "loaded.json"


@dataclass(frozen=True)
class Layout:
    """A number of ranks with tensor, pipeline and expert parallelism; data parallelism uses the rest.

    Args:
        ranks: number of ranks.
        tensor: `parallel.tensor`.
        pipeline: `parallel.pipeline`.
        expert: `parallel.expert`; None for a dense model.
    """

    ranks: int
    tensor: int = 1
    pipeline: int = 1
    expert: int | None = None

    @property
    def name(self) -> str:
        """"4: DP 2 x TP 2"."""
        degrees = {"DP": self.ranks // (self.tensor * self.pipeline), "TP": self.tensor, "PP": self.pipeline,
                   "EP": self.expert or 1}
        return f"{self.ranks}: " + (" x ".join(f"{kind} {n}" for kind, n in degrees.items() if n > 1) or "alone")

    @property
    def key(self) -> str:
        """Return the name of the layout's folder."""
        return f"{self.ranks}-tp{self.tensor}-pp{self.pipeline}" + (f"-ep{self.expert}" if self.expert else "")

    def config(self, folder: Path, name: str) -> TrainConfig:
        """Return the configuration of a run in this layout."""
        return settings(folder, name, STEPS, [
            "parallel.data=zero3", f"parallel.tensor={self.tensor}", f"parallel.pipeline={self.pipeline}",
            "model.tie_embeddings=false", f"checkpoint.every_steps={SAVED}", "checkpoint.keep_last=9",
            "data.validation=''", *([] if self.expert is None else [*MIXTURE, f"parallel.expert={self.expert}"])])


MIXTURE = ("model.kind=mixtral", "model.num_experts=6", "model.balancing=bias")
"""6 experts are shared evenly by 2 ranks, then 3 are sharded by rows over 2 ranks."""
EXPERT_LAYOUTS = [Layout(1, expert=1), Layout(2, expert=1), Layout(2, expert=2), Layout(2, tensor=2, expert=1),
                  Layout(4, expert=1), Layout(4, expert=2), Layout(4, pipeline=2, expert=2),
                  Layout(4, tensor=2, expert=2)]
LAYOUTS = [Layout(ranks, tensor, pipeline) for ranks in (1, 2, 4) for tensor in (1, 2) for pipeline in (1, 2)
           if tensor * pipeline <= ranks]
Pairs = Sequence[tuple[Layout, Layout]]


class Witness(CheckpointManager):
    """A manager that keeps the whole state saved at step 3 and compares loaded states with it."""

    def __init__(self, config: TrainConfig, oracle: Path) -> None:
        super().__init__(storage.store(config.run_uri).child("checkpoints"), keep_last=9, asynchronous=False)
        self._oracle, self._verdict = oracle, Path(config.run_uri, VERDICT)
        self._ranks = Peers()

    def save(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        if step == SAVED:
            parts = self._ranks.all(_whole(state))
            if self._ranks.rank == 0:
                torch.save({name: tensor for part in parts for name, tensor in part.items()}, self._oracle)
        super().save(step, state, extra)

    def load_latest(self, state: dict[str, Any], usable: Any = None) -> dict[str, Any] | None:
        extra = super().load_latest(state, usable)
        if extra is not None:
            assert extra["step"] == SAVED
            saved = torch.load(self._oracle, weights_only=True, mmap=True)
            own = {name: torch.equal(tensor, saved[name]) for name, tensor in _whole(state).items()}
            equal = {name: same for part in self._ranks.all(own) for name, same in part.items()}
            wrong = [name for name in saved if not equal.get(name)]  # a pipeline stage has some of the names
            if self._ranks.rank == 0:
                storage.store(self._verdict.parent).write_json(VERDICT, {"tensors": len(saved), "unequal": wrong})
        return extra


def _whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return every tensor of this rank's state in full; a collective."""
    return {name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
            for name, tensor in flatten(state).items()}


def run(folder: Path, pairs: Pairs) -> list[dict[str, Any]]:
    """Train, save and load for `pairs` of (saved on, loaded on), and return a row of the table for each.

    Four processes form groups of 1, 2 and 4 ranks in turn.
    """
    prepare(folder)
    mp.start_processes(_process, (folder, pairs), nprocs=4, start_method="forkserver")
    return [_compare(folder, *pair) for pair in pairs]


def _process(process: int, folder: Path, pairs: Pairs) -> None:
    torch.set_num_threads(1)
    meeting = dist.FileStore(str(folder / "meeting"), 4)
    for index, work in enumerate((_save, _load)):
        for ranks in (1, 2, 4):
            rank_pairs = [pair for pair in pairs if pair[index].ranks == ranks]
            if rank_pairs and process < ranks:
                _as_group(process, ranks, folder / f"group-{index}-{ranks}", partial(work, folder, rank_pairs))
        meeting.set(f"{index}-{process}", "done")
        meeting.wait([f"{index}-{other}" for other in range(4)])


def _as_group(rank: int, ranks: int, rendezvous: Path, work: Callable[[], None]) -> None:
    if ranks == 1:
        work()
        return
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    try:
        work()
    finally:
        dist.destroy_process_group()


def _save(folder: Path, pairs: Pairs) -> None:
    for source in dict.fromkeys(pair[0] for pair in pairs):
        _train(source, source.config(folder, source.key), folder / f"{source.key}.pt")


def _load(folder: Path, pairs: Pairs) -> None:
    for source, target in pairs:
        config = target.config(folder, _key(source, target))
        if not dist.is_initialized() or dist.get_rank() == 0:
            checkpoint = Path("checkpoints", step_name(SAVED))
            saved = Path(source.config(folder, source.key).run_uri)
            shutil.copytree(saved / checkpoint, Path(config.run_uri) / checkpoint)
        if dist.is_initialized():
            dist.barrier()
        _train(target, config, folder / f"{source.key}.pt")


def _train(layout: Layout, config: TrainConfig, oracle: Path) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    train(config, Runtime(rank, layout.ranks, checkpoints=Witness(config, oracle)))


def _key(source: Layout, target: Layout) -> str:
    return f"{source.key}-on-{target.key}"


def _compare(folder: Path, source: Layout, target: Layout) -> dict[str, Any]:
    unbroken = losses(source.config(folder, source.key))
    resumed = target.config(folder, _key(source, target))
    resumed_losses = losses(resumed)
    steps = sorted(resumed_losses)
    assert steps == list(range(SAVED + 1, STEPS + 1)), f"{_key(source, target)} did the steps {steps}"
    worst = max(abs(loss / unbroken[step] - 1) for step, loss in resumed_losses.items())
    state = storage.store(resumed.run_uri).read_json(VERDICT)
    return {"saved on": source.name, "loaded on": target.name, "tensors": state["tensors"],
            "unequal": len(state["unequal"]), "loss": f"{worst:.1e}",
            "within": not state["unequal"] and worst <= LOSS_BOUND}


def main() -> int:
    """Run every pair or some, print the table and return the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", default="", help="pairs whose names contain this, such as 'TP 2'")
    arguments.add_argument("--experts", action="store_true", help="layouts of a mixture of experts")
    chosen = arguments.parse_args()
    layouts = EXPERT_LAYOUTS if chosen.experts else LAYOUTS
    pairs = [(source, target) for source in layouts for target in layouts
             if chosen.only.lower() in f"{source.name} on {target.name}".lower()]
    with tempfile.TemporaryDirectory(prefix="tidewheel-resharding-") as folder:
        table = run(Path(folder), pairs)
    print_table(table, title=f"saved at step {SAVED} on one layout, loaded on another")
    broken = [f"{line['saved on']} on {line['loaded on']}" for line in table if not line["within"]]
    print(f"{len(table) - len(broken)} of {len(table)}: state equal to the bit, the next {STEPS - SAVED} losses within "
          f"{LOSS_BOUND:g}" + (f"; not: {broken}" if broken else ""))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
