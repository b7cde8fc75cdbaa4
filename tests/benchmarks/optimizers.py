"""Compare all optimizers, of the core and of contrib/: loss, state, difference to the reference, layouts.

    nice -n 10 python -m tests.benchmarks.optimizers [--part losses,references,layouts] [--steps 200]
        [--rates 0.33,1,3] [--only NAME,NAME] [--output FOLDER]

- `losses`: a Llama of 128 x 2 layers (that of `tests.benchmarks.families`) trains on ../shared/corpus with each
  optimizer at its default learning rate and at a third and three times of it; the table has the best. All read the same
  batches. `state` is what a run keeps, in bytes a parameter, beside what the planner counts.
- `references`: the largest difference from the reference after four updates with equal gradients, as a share of the
  largest movement of an element: torch, or the paper's algorithm in numpy in fp64.
- `layouts`: runs of the debug model on two ranks beside one process, as `tests.benchmarks.equivalence` does.

A run that is in the output folder is not trained again. The exit code is 1 if a planned state is not the one that a
run keeps, within 1 % (`NOT_PLANNED` aside), a difference is above its bound, or a layout is not equal.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.benchmarks import equivalence, families
from tests.benchmarks.equivalence_rows import Row
from tests.unit.contrib import test_optimizers as contrib
from tests.unit.train.optim.test_optimizers import ORACLES, Weights, by_hand
from tidewheel import storage
from tidewheel.config import build
from tidewheel.console import print_table
from tidewheel.parts import Part, as_json
from tidewheel.train import optimizers, parallel
from tidewheel.train.config import TrainConfig
from tidewheel.train.loop import train
from tidewheel.train.optim.build import build_optimizer, training_state
from tidewheel.train.record import read_result
from tidewheel.train.runtime import Runtime

STEPS, UPDATES = 200, contrib.STEPS
BOUND = 1e-3
BOUNDS = {"adamw8bit": 0.1, "muon": 2e-2}
"""Largest difference of an optimizer that rounds: 8-bit moments are compared with AdamW, Muon multiplies in bf16."""
ROUNDS = ("adamw8bit", "muon", "shampoo", "soap")
"""Optimizers that amplify last bits of gradients, which layouts add up in another order; their bound is `LOOSE`."""
LOOSE = 2e-3
NOT_PLANNED = ("adamw8bit", "shampoo", "soap")
"""Optimizers whose planned bytes hold for other shapes: rows of a multiple of 256, and square matrices."""
LAYOUTS = {"DDP": ("parallel.data=ddp",), "ZeRO-1": ("parallel.data=zero1",), "ZeRO-2": ("parallel.data=zero2",),
           "ZeRO-3": ("parallel.data=zero3",), "TP": ("parallel.tensor=2",)}
LAYOUT_STEPS = 5


Table = tuple[list[dict[str, Any]], list[str]]
"""Rows, and what is wrong."""


def kinds() -> list[str]:
    """Return the names of all optimizers."""
    return [*optimizers.KIND.built_in(), *contrib.KINDS]


def part_of(kind: str, **settings: Any) -> Any:
    """Return an optimizer's part."""
    return contrib.rule(kind, **settings) if kind in contrib.KINDS else optimizers.KIND.build(kind, settings)


def task(folder: Path, data: str, kind: str, factor: float, steps: int) -> TrainConfig:
    """Return the configuration of a run on the corpus at `factor` times the default learning rate."""
    base = families.settings(families.shapes()["llama"], "llama", data, str(folder), steps).canonical()
    part: Part = part_of(kind)
    settings = {**as_json(part), "learning_rate": part_of(kind).learning_rate * factor}
    schedule = {"kind": "constant" if kind == "schedule_free" else "cosine", "warmup_steps": 20}
    run = {"id": f"{kind}-{factor:.2g}", "uri": str(folder / f"runs-{steps}")}
    return build(TrainConfig, {**base, "run": run, "optimizer": settings, "schedule": schedule})


def loss_of(config: TrainConfig) -> float:
    """Return the validation loss of a run, trained if it has not been; for schedule-free AdamW that of its average."""
    store = storage.store(config.run_uri)
    if read_result(store) is None:
        train(config, Runtime())
    if config.optimizer.AVERAGE:
        from tidewheel import jsonlog

        lines = [line for line in jsonlog.read(store, "metrics.jsonl") if "average_losses" in line]
        return float(next(iter(lines[-1]["average_losses"].values())))
    result = read_result(store)
    assert result is not None
    assert result.validation_loss is not None
    return result.validation_loss


def state_bytes(config: TrainConfig) -> tuple[float, float]:
    """Return the bytes of optimizer state a parameter that a run keeps, and that the planner counts."""
    model = parallel.build(config, families.VOCABULARY, Runtime())
    tensors = training_state(model, build_optimizer(model, config.optimizer))["optimizer"]
    named = dict(model.named_parameters())
    parameters = sum(value.numel() for value in named.values())
    matrices = sum(value.numel() for name, value in named.items() if name.startswith("blocks.") and value.ndim == 2)
    kept = sum(value.nbytes for value in tensors.values()) / parameters
    return kept, config.optimizer.state_bytes(parameters, matrices) / parameters


def losses(chosen: Sequence[str], folder: Path, steps: int, factors: Sequence[float]) -> Table:
    """Train all and return the rows of the table, and what is wrong."""
    data = families.made_data(str(folder))
    rows, wrong = [], []
    for kind in chosen:
        configs = [task(folder, data, kind, factor, steps) for factor in factors]
        found = {config.optimizer.learning_rate: loss_of(config) for config in configs}
        rate = min(found, key=lambda rate: found[rate])
        kept, planned = state_bytes(configs[0])
        fits = kept * 0.99 <= planned <= kept * 1.01 or abs(planned - kept) < 0.1 or kind in NOT_PLANNED
        wrong += [] if fits else [f"{kind}: {kept:.2f} bytes kept, {planned:.2f} planned"]
        rows.append({"optimizer": kind, "loss": f"{found[rate]:.3f}", "at rate": f"{rate:.1e}",
                     "others": ", ".join(f"{value:.2f}" for other, value in found.items() if other != rate) or "-",
                     "state, bytes": f"{kept:.2f}", "planned": f"{planned:.2f}"})
    return rows, wrong


def lion(name: str) -> np.ndarray:
    """Return a parameter after algorithm 2 of https://arxiv.org/abs/2302.06675, with Lion's default decay of 1."""
    value, m = contrib.start()[name], 0.0
    for step in range(UPDATES):
        g = contrib.gradient(step, name)
        value = value - 1e-2 * (np.sign(0.9 * m + 0.1 * g) + 10 * contrib.decay(name) * value)
        m = 0.99 * m + 0.01 * g
    return value


def ademamix(name: str) -> np.ndarray:
    """Return a parameter after algorithm 1 of https://arxiv.org/abs/2409.03137 with constant alpha and decays."""
    value, fast, slow, square = contrib.start()[name], 0.0, 0.0, 0.0
    for step in range(1, UPDATES + 1):
        g = contrib.gradient(step - 1, name)
        fast, slow = 0.9 * fast + 0.1 * g, 0.9999 * slow + 1e-4 * g
        square = 0.999 * square + 0.001 * g * g
        direction = (fast / (1 - 0.9**step) + 5 * slow) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
        value = value - 1e-2 * (direction + contrib.decay(name) * value)
    return value


TORCH: dict[str, Any] = {
    **ORACLES, "adamw8bit": ORACLES["adamw"], "sgd": lambda w: [by_hand(w, torch.optim.SGD, momentum=0.9)],
    "adam": lambda w: [by_hand(w, torch.optim.Adam)], "adagrad": lambda w: [by_hand(w, torch.optim.Adagrad)]}
TESTED: dict[str, tuple[Callable[[], None], str]] = {
    "soap": (contrib.test_soap_is_that_of_the_paper, "1e-4"),
    "sophia": (contrib.test_sophia_is_that_of_the_paper, "1e-6"),
    "stale": (lambda: contrib.test_stale_gradients_are_of_the_weights_of_some_updates_ago("constant", 0.5), "2e-6")}
"""Optimizers with tests of their own: matrices of full rank, drawn labels, older weights."""
PAPERS = {"lion": lion, "ademamix": ademamix, **contrib.ALGORITHMS}


def by_reference(kind: str) -> tuple[str, dict[str, np.ndarray]]:
    """Return the name of an optimizer's reference, and its parameters after the updates."""
    if kind in PAPERS:
        return "the paper's algorithm", {name: PAPERS[kind](name) for name in contrib.SHAPES}
    weights = Weights()
    parts = TORCH[kind](weights)
    for step in range(UPDATES):
        for name, gradient in weights.gradients(step).items():
            weights.held[name].grad = gradient
        for part in parts:
            part.step()
    name = "torch.optim.AdamW" if kind == "adamw8bit" else f"torch.optim.{type(parts[0]).__name__}"
    return name, {name: value.detach().double().numpy() for name, value in weights.held.items()}


def references(chosen: Sequence[str]) -> Table:
    """Return the rows of differences, and what is above its bound; of those in `TESTED`, their tests' bounds."""
    rows, wrong = [], []
    for kind in chosen:
        if kind in TESTED:
            test, bound = TESTED[kind]
            test()
            rows.append({"optimizer": kind, "reference": "the paper's algorithm",
                         "difference": f"below {bound}, absolute"})
            continue
        settings = {"weight_decay": 0.1} if kind in ("sgd", "adam", "adagrad") else contrib.SETTINGS.get(kind, {})
        weights = Weights()
        weights.take(build_optimizer(weights, part_of(kind, **settings)), range(UPDATES))
        reference, expected = by_reference(kind)
        shares = [np.abs(value.detach().numpy() - expected[name]).max() / np.abs(
            expected[name] - contrib.start()[name]).max() for name, value in weights.held.items()]
        rows.append({"optimizer": kind, "reference": reference, "difference": f"{max(shares):.1e}"})
        wrong += [f"{kind}: {max(shares):.1e} from {reference}"] if max(shares) > BOUNDS.get(kind, BOUND) else []
    return rows, wrong


def name_in_settings(kind: str) -> str:
    """Return the name of an optimizer in a configuration."""
    return f"tidewheel_optimizers.{kind}:{contrib.KINDS[kind]}" if kind in contrib.KINDS else kind


def layouts(chosen: Sequence[str]) -> Table:
    """Return the rows of layouts, and what is not equal."""
    rows = []
    for kind in chosen:
        recipe = (f"optimizer.kind={name_in_settings(kind)}", "optimizer.learning_rate=3e-3")
        rows += [Row(f"{kind} {name}", 2, layout, recipe) for name, layout in LAYOUTS.items()]
        if not part_of(kind).NOT_REPRODUCIBLE:
            rows.append(Row(f"{kind} reproducible", 2, LAYOUTS["ZeRO-3"], (*recipe, "reproducible=true"), exact=True))
    with tempfile.TemporaryDirectory(prefix="tidewheel-optimizers-") as folder:
        found = {line["layout"]: line for line in equivalence.run(Path(folder), rows, LAYOUT_STEPS)}
    table, wrong = [], []
    for kind in chosen:
        line: dict[str, Any] = {"optimizer": kind}
        for name in LAYOUTS:
            result = found[f"{kind} {name}"]
            line[name] = result["loss"]
            bound = LOOSE if kind in ROUNDS else equivalence.LOSS_BOUND
            wrong += [f"{kind} {name}: {result['loss']}"] if float(result["loss"]) > bound else []
        exact = found.get(f"{kind} reproducible")
        reason = part_of(kind).NOT_REPRODUCIBLE
        line["reproducible mode"] = f"refused: {reason}" if exact is None else (
            "same bits" if exact["within"] else "OTHER BITS")
        wrong += [f"{kind}: other bits"] if exact is not None and not exact["within"] else []
        table.append(line)
    return table, wrong


def main() -> int:
    """Run the parts and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="references,losses,layouts")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rates", default="0.33,1,3", help="factors of the default learning rate")
    parser.add_argument("--only", default="", help="names of optimizers")
    parser.add_argument("--output", default="optimizers-output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [kind for kind in kinds() if not options.only or kind in options.only.split(",")]
    parts, wrong = options.part.split(","), []
    if "references" in parts:
        rows, found = references(chosen)
        print_table(rows, title=f"difference from the reference after {UPDATES} updates, as a share of the movement")
        wrong += found
    if "losses" in parts:
        rows, found = losses(chosen, Path(options.output).resolve(), options.steps,
                             [float(factor) for factor in options.rates.split(",")])
        tokens = options.steps * families.SEQUENCES * families.LENGTH
        print_table(rows, title=f"validation loss after {tokens:,} tokens, nats a token")
        wrong += found
    if "layouts" in parts:
        rows, found = layouts(chosen)
        print_table(rows, title=f"two ranks beside one process: largest relative difference of {LAYOUT_STEPS} losses")
        wrong += found
    print("; ".join(wrong) or "all as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
