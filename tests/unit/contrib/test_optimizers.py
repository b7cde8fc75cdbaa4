"""Tests of the optimizers in contrib/ against torch and against their papers' algorithms, in every layout."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pydantic
import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.ranks import on_ranks
from tests.unit.train.optim.test_optimizers import SHAPES, Weights, hidden
from tests.unit.train.optim.test_optimizers_sharded import LAYOUTS, Spread, manager
from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.train import optimizers
from tidewheel.train.config import TrainConfig
from tidewheel.train.optim.build import build_optimizer, training_state

CONTRIB = Path(__file__).parents[3] / "contrib/optimizers"
KINDS = {"adagrad": "Adagrad", "lamb": "LAMB", "schedule_free": "ScheduleFree", "shampoo": "Shampoo", "soap": "SOAP",
         "sophia": "SophiaG", "stale": "Stale"}
STEPS, UPDATES = 4, 9
EXACT = {"adagrad", "schedule_free"}
Arrays = dict[str, np.ndarray]


def rule(kind: str, **settings: object):
    """Return the part, as a configuration names it."""
    if str(CONTRIB) not in sys.path:
        sys.path.append(str(CONTRIB))
    return optimizers.KIND.build(f"tidewheel_optimizers.{kind}:{KINDS[kind]}", settings)


def made(kind: str, **settings: object):
    weights = Weights()
    return weights, build_optimizer(weights, rule(kind, **settings))


def start() -> Arrays:
    return {name: value.detach().double().numpy().copy() for name, value in Weights().held.items()}


def gradient(step: int, name: str) -> np.ndarray:
    return Weights().gradients(step)[name].double().numpy()


def decay(name: str) -> float:
    return 0.1 if name.endswith(("wq.weight", "output.weight")) else 0.0


def adamw(name: str, betas=(0.9, 0.95)) -> np.ndarray:
    value, m, v = start()[name], 0.0, 0.0
    for step in range(1, STEPS + 1):
        g = gradient(step - 1, name)
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        update = m / (1 - betas[0]**step) / (np.sqrt(v / (1 - betas[1]**step)) + 1e-8)
        value = value * (1 - 1e-2 * decay(name)) - 1e-2 * update
    return value


def lamb(name: str) -> np.ndarray:
    """Compute algorithm 2 of https://arxiv.org/abs/1904.00962."""
    value, m, v = start()[name], 0.0, 0.0
    for step in range(1, STEPS + 1):
        g = gradient(step - 1, name)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        r = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-6) + decay(name) * value
        value = value - 1e-2 * np.linalg.norm(value) / np.linalg.norm(r) * r
    return value


def schedule_free(name: str) -> np.ndarray:
    """Compute algorithm 1 of https://arxiv.org/abs/2405.15682, whose parameters are y."""
    z = x = start()[name]
    v, total = 0.0, 0.0
    for step in range(1, STEPS + 1):
        y = 0.1 * z + 0.9 * x
        g = gradient(step - 1, name)
        v = 0.999 * v + 0.001 * g * g
        z = z - 1e-2 * (g / (np.sqrt(v / (1 - 0.999**step)) + 1e-8) + decay(name) * y)
        total += 1e-4
        x = (1 - 1e-4 / total) * x + 1e-4 / total * z
    return 0.1 * z + 0.9 * x


def shampoo(name: str) -> np.ndarray:
    """Compute algorithm 1 of https://arxiv.org/abs/1802.09568 with averages, and Adam's length (grafting)."""
    if not hidden(name):
        return adamw(name)
    value, m, v, left, right = start()[name], 0.0, 0.0, 0.0, 0.0

    def root(matrix: np.ndarray) -> np.ndarray:
        values, vectors = np.linalg.eigh(matrix)
        return vectors @ np.diag((np.maximum(values, 0) + 1e-6 * values.max()) ** -0.25) @ vectors.T

    for step in range(1, STEPS + 1):
        g = gradient(step - 1, name)
        left, right = 0.95 * left + 0.05 * g @ g.T, 0.95 * right + 0.05 * g.T @ g
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        mean = m / (1 - 0.9**step)
        adam = mean / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
        if step == 1 or step % 2 == 0:
            roots = root(left / (1 - 0.95**step)), root(right / (1 - 0.95**step))
        update = roots[0] @ mean @ roots[1]
        value = value * (1 - 1e-3) - 1e-2 * update * np.linalg.norm(adam) / np.linalg.norm(update)
    return value


def soap(value: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    """Compute algorithm 3 of https://arxiv.org/abs/2409.11321; the first gradient only gives the bases."""
    first = gradients[0]
    m, v, left, right = 0.0, 0.0, 0.05 * first @ first.T, 0.05 * first.T @ first
    bases = np.linalg.eigh(left)[1], np.linalg.eigh(right)[1]
    for step, g in enumerate(gradients[1:], start=1):
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * (bases[0].T @ g @ bases[1]) ** 2
        direction = bases[0].T @ m @ bases[1] / (1 - 0.9**step)
        update = bases[0] @ (direction / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)) @ bases[1].T
        value = value * (1 - 1e-3) - 1e-2 * update
        left, right = 0.95 * left + 0.05 * g @ g.T, 0.95 * right + 0.05 * g.T @ g
        if step % 2 == 0:
            bases = np.linalg.qr(left @ bases[0])[0], np.linalg.qr(right @ bases[1])[0]
    return value


def sophia(name: str) -> np.ndarray:
    """Compute algorithm 3 of https://arxiv.org/abs/2305.14342; each step's gradient is that of drawn labels as well."""
    value, m, h = start()[name], 0.0, 0.0
    for step in range(STEPS):
        g = gradient(step, name)
        h = 0.99 * h + 0.01 * g * g / LABELS
        m = 0.965 * m + 0.035 * g
        value = value * (1 - 1e-2 * decay(name)) - 1e-2 * np.clip(m / np.maximum(0.05 * h, 1e-12), -1, 1)
    return value


STALE = {"constant": lambda name, update: 2, "random": None, "pipeline": lambda name, update: BEHIND[name]}
BEHIND = {"embedding.weight": 2, "blocks.0.attention.wq.weight": 2, "blocks.0.attention.bias": 2,
          "blocks.0.ffn_norm.weight": 2, "output.weight": 0}
"""Updates that the gradients of a pipeline of three stages are behind, of which the only block is in the first."""


def stale(name: str, behind, compensation: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the newest weights and those shown to the model, whose gradient is its own value and a random part."""
    versions, m, v = [start()[name]], 0.0, 0.0
    shown = versions[0]
    for step in range(1, UPDATES + 1):
        g = shown + gradient(step - 1, name)
        g = g + compensation * g * g / (np.sqrt(v) + 1e-8) * (versions[-1] - shown)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        update = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
        versions.append(versions[-1] * (1 - 1e-2 * decay(name)) - 1e-2 * update)
        shown = versions[max(0, step - behind(name, step))]
    return versions[-1], shown


ALGORITHMS = {"lamb": lamb, "schedule_free": schedule_free, "shampoo": shampoo}
LABELS = 0.015
"""With so few drawn labels about half of the elements are clipped."""
SETTINGS = {"shampoo": {"every": 2}, "soap": {"every": 2}}


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_updates_are_those_of_the_paper(kind: str):
    weights, optimizer = made(kind, **SETTINGS.get(kind, {}))
    weights.take(optimizer, range(STEPS))
    for name, value in weights.held.items():
        moved = np.abs(ALGORITHMS[kind](name) - start()[name]).max()
        error = np.abs(value.detach().numpy() - ALGORITHMS[kind](name)).max()
        assert error < 1e-3 * moved, f"{name}: {error} of {moved}"


@pytest.mark.parametrize("order", ["constant", "random", "pipeline"])
@pytest.mark.parametrize("compensation", [0.0, 0.5])
def test_stale_gradients_are_of_the_weights_of_some_updates_ago(order: str, compensation: float):
    weights, optimizer = made("stale", staleness=2, order=order, compensation=compensation)
    for step in range(UPDATES):
        for name, value in weights.gradients(step).items():
            weights.held[name].grad = value + weights.held[name].detach()
        optimizer.set_learning_rate(1e-2)
        optimizer.step()
    drawn = [optimizer.parts[0].behind(update) for update in range(UPDATES + 1)]
    if order == "random":
        assert len(set(drawn[2:])) > 1
    behind = STALE[order] or (lambda name, update: drawn[update])
    state = optimizer.tensors()
    for name, value in weights.held.items():
        newest, shown = stale(name, behind, compensation)
        np.testing.assert_allclose(value.detach().numpy(), shown, rtol=0, atol=2e-6)
        np.testing.assert_allclose(state[f"{name}.version_0"].numpy(), newest, rtol=0, atol=2e-6)


def test_without_staleness_it_is_adamw():
    ours, optimizer = made("stale", staleness=0)
    theirs = Weights()
    for weights, rule in ((ours, optimizer), (theirs, build_optimizer(theirs, optimizers.KIND.build("adamw")))):
        weights.take(rule, range(UPDATES))
    for name, expected in theirs.held.items():
        torch.testing.assert_close(ours.held[name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["lamb", "schedule_free", "sophia", "stale"])
def test_a_decay_of_1_is_refused(kind: str):
    with pytest.raises(pydantic.ValidationError, match=r"(?s)betas.*less than 1"):
        rule(kind, betas=[0.9, 1.0])


def test_updates_that_communicate_are_not_made_by_a_thread_during_the_backward_pass():
    assert {kind for kind in KINDS if rule(kind).NOT_OVERLAPPED} == {"lamb", "shampoo", "soap"}


@pytest.mark.parametrize("kind", ["schedule_free", "stale"])
def test_groups_refuse_an_optimizer_that_keeps_weights_of_its_own(kind: str):
    rule(kind)
    values = {"optimizer": {"kind": f"tidewheel_optimizers.{kind}:{KINDS[kind]}"},
              "outer": {"groups": 2, "store": "outer"}}
    with pytest.raises(ConfigError, match=r"nearest legal choice: optimizer\.kind adamw"):
        build(TrainConfig, values)


def check_stages() -> None:
    """Two stages with two layers each have the staleness of the four layers, not of their own two."""
    rank = torch.distributed.get_rank()
    named = [(f"blocks.{2 * rank + layer}.ffn.w1.weight", torch.nn.Parameter(torch.ones(2, 2))) for layer in range(2)]
    [optimizer] = rule("stale", staleness=1, order="pipeline").build_all(named)
    assert optimizer.behind(9) == 1 - rank
    assert len(optimizer.state) == 2


@pytest.mark.long
def test_a_stage_of_a_pipeline_knows_its_place_in_the_model():
    on_ranks(2, check_stages)


def test_sophia_is_that_of_the_paper():
    weights, optimizer = made("sophia")
    for step in range(STEPS):
        for name, value in weights.gradients(step).items():
            weights.held[name].grad = value.clone()
        optimizer.take_curvature(LABELS)
        weights.take(optimizer, [step])
    clipped = []
    for name, value in weights.held.items():
        np.testing.assert_allclose(value.detach().numpy(), sophia(name), rtol=0, atol=1e-6)
        moved = np.abs(value.detach().numpy() - start()[name]) / STEPS / 1e-2
        clipped.append(np.mean(moved > 0.97))
    assert 0.05 < np.mean(clipped) < 0.95, "some elements are clipped and some are not"


def test_soap_is_that_of_the_paper():
    """Of a square matrix: the bases of a gradient whose rank is below a side are free to turn."""
    weights, generator = Weights(), torch.Generator().manual_seed(5)
    before, *gradients = (torch.randn(16, 16, generator=generator) for _ in range(1 + STEPS))
    parameter = torch.nn.Parameter(before.clone())
    weights.held = {"blocks.0.attention.wq.weight": parameter}
    optimizer = build_optimizer(weights, rule("soap", every=2))
    for gradient_now in gradients:
        parameter.grad = gradient_now
        optimizer.set_learning_rate(1e-2)
        optimizer.step()
    expected = soap(before.double().numpy(), [value.double().numpy() for value in gradients])
    np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=0, atol=1e-4)


def test_adagrad_is_that_of_torch():
    ours, optimizer = made("adagrad", weight_decay=0.1)
    ours.take(optimizer, range(STEPS))
    theirs = Weights()
    decayed = [theirs.held[name] for name in SHAPES if decay(name)]
    others = [theirs.held[name] for name in SHAPES if not decay(name)]
    oracle = torch.optim.Adagrad([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=1e-2, foreach=False)
    theirs.take(_Plain(oracle), range(STEPS))
    for name, expected in theirs.held.items():
        torch.testing.assert_close(ours.held[name], expected, rtol=1e-6, atol=1e-6)


class _Plain:
    """A torch optimizer with the methods that `Weights.take` calls."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.step = optimizer.step

    def set_learning_rate(self, rate: float) -> None:
        """Leave the rate as it is."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_optimizer_continues_bit_for_bit(kind: str):
    whole, optimizer = made(kind)
    whole.take(optimizer, range(6))
    first, optimizer = made(kind)
    first.take(optimizer, range(3))
    saved = {group: {name: tensor.clone() for name, tensor in tensors.items()}
             for group, tensors in training_state(first, optimizer).items()}
    second, optimizer = made(kind)
    for group, tensors in training_state(second, optimizer).items():
        for name, tensor in tensors.items():
            tensor.copy_(saved[group][name])
    optimizer.restored()
    second.take(optimizer, range(3, 6))
    for name, expected in whole.held.items():
        assert torch.equal(second.held[name], expected), name


def check_layouts(folder: str) -> None:
    """Compare every layout with one process, and load its checkpoint into another layout."""
    results = {}
    for kind in KINDS:
        whole, optimizer = made(kind, **SETTINGS.get(kind, {}))
        whole.take(optimizer, range(STEPS))
        for layout in LAYOUTS:
            spread = Spread(layout)
            optimizer = build_optimizer(spread, rule(kind, **SETTINGS.get(kind, {})))
            spread.take(optimizer, range(STEPS - 1))
            place = f"{folder}/{kind} {layout}"
            manager(place).save(1, training_state(spread, optimizer), {})
            spread.take(optimizer, range(STEPS - 1, STEPS))
            other = Spread("rows")
            restored = build_optimizer(other, rule(kind, **SETTINGS.get(kind, {})))
            manager(place).load_latest(training_state(other, restored))
            restored.restored()
            other.take(restored, range(STEPS - 1, STEPS))
            results[f"{kind} {layout}"] = [max((_whole(held.held[name]) - expected).abs().max().item()
                                               for name, expected in whole.held.items()) for held in (spread, other)]
    if torch.distributed.get_rank() == 0:
        Path(folder, "results.json").write_text(json.dumps(results))


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.long
def test_every_layout_equals_one_process_and_any_other_continues_its_checkpoint(tmp_path: Path):
    on_ranks(4, check_layouts, str(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results) == len(KINDS) * len(LAYOUTS)
    for case, errors in results.items():
        reproducible = not rule(case.split()[0]).NOT_REPRODUCIBLE
        assert max(errors) <= (0.0 if reproducible else 1e-6), f"{case}: {errors}"


def test_they_use_the_public_door_alone():
    for file in sorted((CONTRIB / "tidewheel_optimizers").glob("*.py")):
        imports = re.findall(r"^(?:from|import) +tidewheel\b.*$", file.read_text(), re.M)
        assert set(imports) <= {"import tidewheel as tw"}, file
    project = (CONTRIB / "pyproject.toml").read_text()
    points = re.findall(r'^(\w+) = "tidewheel_optimizers\.(\w+):(\w+)"$', project, re.M)
    assert {name: part for name, module, part in points if name == module} == KINDS
