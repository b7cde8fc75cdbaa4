"""What each part of training computes from a fixed input: the promise that the part's version stands for.

Outputs are numbers and not hashes: another CPU's vector units, or another number of threads, change the last digits of
a float, and rounding before hashing fails on numbers near a rounding boundary. Two rows of numbers are equal within a
share of the row's root mean square, `Case.tolerance`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.compressed import summed
from tidewheel.config import build
from tidewheel.models import adapters, families
from tidewheel.models.decoder import Decoder, next_tokens
from tidewheel.models.initial_values import init_parameter
from tidewheel.models.loss import IGNORED, TokenLoss
from tidewheel.parts import Kind, Part, as_json
from tidewheel.shards.manifest import PARTS, ROLLOUTS
from tidewheel.train import compressions, objectives, optimizers, parallel, schedules
from tidewheel.train.config import TrainConfig
from tidewheel.train.objective import TopK
from tidewheel.train.runtime import Runtime
from tidewheel.train.step import MicroBatch, RolloutColumns

Rows = dict[str, list[float]]
"""{name of the row: numbers}."""
RECORDED = Path(__file__).with_name("training.json")
KINDS: tuple[Kind[Any], ...] = (optimizers.KIND, schedules.KIND, objectives.KIND, families.KIND,
                                adapters.KIND, compressions.KIND)
FIELDS = {optimizers.KIND.noun: "optimizer", schedules.KIND.noun: "schedule", objectives.KIND.noun: "objective",
          families.KIND.noun: "model", adapters.KIND.noun: "adapter", compressions.KIND.noun: "compression"}
"""Field of `TrainConfig` by the kind of part that it holds."""
BESIDE: dict[str, dict[str, Any]] = {compressions.KIND.noun: {"parallel": {"data": "ddp"}}}
"""Settings without which a configuration refuses parts of a kind."""
SMOOTH = {"label_smoothing": 0.1}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "schedule wsd": [{}, {"decay_form": "linear", "decay_fraction": 0.5}],
    "schedule piecewise": [{}, {"pieces": [
        {"until": 40, "form": "cosine", "final_fraction": 0.3, "decay_until": 70},
        {"until": 60, "final_fraction": 0.2}, {"until": 90, "form": "linear", "final_fraction": 0.0}]}],
    "schedule cosine": [{}, {"unit": "tokens", "warmup_tokens": 7, "final_fraction": 0.0}],
    "objective dpo": [{"loss": "sigmoid", "chunk_tokens": 5}, {"loss": "sigmoid", "sft_weight": 0.5, **SMOOTH},
                      *({"loss": loss} for loss in ("hinge", "ipo", "nca_pair", "sigmoid_norm", "apo_zero", "apo_down",
                                                    "discopop", "bco_pair", "sppo_hard")),
                      *({"loss": loss, **SMOOTH} for loss in ("robust", "exo_pair")),
                      *({"divergence": name} for name in ("forward_kl", "js", "alpha"))],
    "objective cpo": [{"loss": "sigmoid", **SMOOTH}, {"loss": "hinge"}, {"loss": "ipo"}],
    "objective simpo": [{}, {"sft_weight": 0.5, **SMOOTH}],
    "objective kto": [{}, {"loss": "apo_zero_unpaired", "undesirable_weight": 1.5}],
    "objective reward_model": [{"margin": 0.3, "center": 0.1}, {"head": "process", "step_token": 21}],
    "objective distillation": [{}, {"divergence": "reverse_kl", "weight": 0.5}, {"divergence": "jensen_shannon"}],
    "objective grpo": [{}, {"ratio": "sequence", "most_ratio": 1.5}, {"reference_weight": 0.1, "entropy_weight": 0.1},
                       {"mask_ratio": 1.3, "temperature": 0.7}],
    "objective ppo": [{}, {"correction": "masked", "correction_level": "sequence"},
                      {"value_clip": 0.0, "reference_weight": 0.1, "correction": "truncated", "correction_bound": 1.2}],
    "compression quantised": [{}, {"bits": 4, "block": 32}],
    "compression power_sgd": [{"rank": 2}],
    "compression topk": [{"density": 0.1}],
    "compression randomk": [{"density": 0.1}],
    "objective next_token": [{}, {"z_loss": 1e-2}, {"z_loss": 1e-2, "chunk_tokens": 5}],
    "adapter lora": [{"b_rate": 16.0}, {"rank_stabilized": True, "targets": ["embedding", "wq"]}, {"start": "pissa"},
                     {"base": "nf4", "ranks": {"wq": 2}, "alphas": {"w2": 4.0}}],
    "model family llama": [{}, {"qk_norm": False, "tie_embeddings": True}, {"rope_scaling": {"original_length": 32}}],
    "model family mistral": [{"sliding_window": 5}],
    "model family gemma": [{"sliding_window": 5, "attention_soft_cap": 1.0, "final_soft_cap": 1.0},
                           {"sliding_window": 5, "attention_soft_cap": None, "final_soft_cap": None, "qk_norm": True,
                            "local_rope_theta": 100.0, "query_scale": 24}],
}
"""Settings with which a case is computed, where the defaults alone leave code out."""
TOLERANCE = 1e-4
ROUNDING = 1e-8
"""Numbers that are not all zero may differ by this much. The bias of GPT-2's keys shifts all scores of a query alike:
its gradient is zero but for the rounding of fp32, 6e-10, which another CPU does otherwise."""
TOLERANCES = {"optimizer muon": 3e-2, "optimizer adamw8bit": 2e-2}
"""Muon multiplies matrices in bf16. A moment in 8 bits may round the other way."""


@dataclass(frozen=True)
class Case:
    """What one part gives.

    Args:
        versions: of the part and of the parts that it uses.
        settings: all of the part's settings, defaults included.
        rows: the output.
        recipe: recipe hash of a training with this part, which nothing but a version may change.
        tolerance: allowed difference of two numbers, as a share of their row's root mean square.
    """

    versions: dict[str, int]
    settings: Any
    rows: Rows
    recipe: str
    tolerance: float

    def as_json(self) -> dict[str, Any]:
        """Return what training.json holds of the case."""
        return {"versions": self.versions, "settings": self.settings, "recipe": self.recipe,
                "rows": {name: " ".join(f"{value:.7g}" for value in row) for name, row in self.rows.items()}}


def names() -> list[str]:
    """Return the names of all cases: one for each built-in part."""
    return [f"{kind.noun} {name}" for kind in KINDS for name in kind.built_in()]


def run(case: str) -> Case:
    """Compute one case.

    Args:
        case: one of `names`, "optimizer adamw".
    """
    noun, _, name = case.rpartition(" ")
    kind = next(kind for kind in KINDS if kind.noun == noun)
    part = kind.build(name)
    rows: Rows = {}
    for index, settings in enumerate(SETTINGS.get(case, [{}])):
        outputs = COMPUTE[noun](kind.build(name, {**SMALL.get(noun, {}), **settings}))
        rows |= {f"{index} {row}": numbers for row, numbers in outputs.items()}
    shown = {**as_json(part), **({"presets": dict(part.PRESETS)} if noun == families.KIND.noun else {})}
    recipe = build(TrainConfig, {**BESIDE.get(noun, {}), FIELDS[noun]: {"kind": name}}).recipe_hash()
    return Case(part.VERSION.numbers(), json.loads(json.dumps(shown)), rows, recipe, TOLERANCES.get(case, TOLERANCE))


def read_rows(case: Mapping[str, Any]) -> Rows:
    """Return the rows of a case in training.json."""
    return {name: [float(value) for value in row.split()] for name, row in case["rows"].items()}


def different(now: Mapping[str, Sequence[float]], recorded: Mapping[str, Sequence[float]], tolerance: float) -> str:
    """Return the name of the first row that differs, with its first difference; "" if all are equal.

    Args:
        now: rows of a case.
        recorded: rows of the same case in training.json.
        tolerance: see `Case.tolerance`.
    """
    if set(now) != set(recorded):
        return f"rows {sorted(set(now) ^ set(recorded))}"
    for name, row in now.items():
        before = recorded[name]
        if len(row) != len(before):
            return f"{name}: {len(row)} numbers instead of {len(before)}"
        scale = math.sqrt(sum(value * value for value in before) / len(before))
        differences = [abs(a - b) for a, b in zip(row, before, strict=True)]
        allowed = max(tolerance * scale, ROUNDING) if scale else 0.0
        wrong = [difference for difference in differences if not difference <= allowed]  # also not a number
        if wrong:
            return f"{name}: by {wrong[0] / scale if scale else math.inf:.1e} of its size"
    return ""


def _optimizer(part: Any) -> Rows:
    """Two updates of fp64 parameters. Gradients reach down to the size of epsilon, so that its place shows."""
    shapes = {"embedding.weight": (8, 256), "blocks.0.attention.wq.weight": (16, 256),
              "blocks.0.attention_norm.weight": (256,), "output.weight": (8, 256)}
    named = [(name, torch.nn.Parameter(_waves(shape, 0.37, index).cos()))
             for index, (name, shape) in enumerate(shapes.items())]
    parts = part.build_all(named)
    rows: Rows = {}
    for step in (1, 2):
        before = {name: parameter.detach().clone() for name, parameter in named}
        for index, (_, parameter) in enumerate(named):
            waves = _waves(tuple(parameter.shape), 0.61 * step, index)
            decades = 10.0 ** -(torch.arange(parameter.numel()) % 10).double().view_as(parameter)
            parameter.grad = (waves.sin() * decades).to(parameter.dtype)
        for optimizer in parts:
            optimizer.step()
        for name, parameter in named:
            update = (parameter.detach() - before[name]).flatten()
            rows[f"{name} {step}"] = [*update[:16].tolist(), *update.view(-1, 64).norm(dim=1).tolist()]
    return rows


def _schedule(part: Any) -> Rows:
    return {"rates": [part.learning_rate(done, 100, 1.0) for done in range(1, 101)],
            "short": [part.learning_rate(done, 5, 1.0) for done in range(1, 6)]}


def _objective(part: Any) -> Rows:
    """The sums and gradients for rows of 12 tokens, of fixed hidden states and an output matrix of 40 rows."""
    batch = _rows_for(part)
    tokens, targets = batch.tokens, batch.targets
    hidden = _waves((len(tokens), 12, 16), 0.83, 1).sin().float().requires_grad_()
    weight = _waves((part.HEAD or 40, 16), 0.29, 2).sin().float().requires_grad_()
    bound = part.bound(batch)

    def logits(states: torch.Tensor) -> torch.Tensor:
        return states @ weight.T

    if bound is None:
        values = TokenLoss(part.token_loss())(hidden, logits, weight, targets).flatten()
    else:
        estimates = (hidden.mean(-1),) if part.VALUES else ()
        values = bound(hidden, logits, *estimates).flatten()
    values[0].backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return {"sums": [*values.tolist(), float(part.count(batch))], "hidden": hidden.grad.flatten()[:64].tolist(),
            "weight": weight.grad.flatten()[:64].tolist()}


def _rows_for(part: Any) -> MicroBatch:
    """Return rows of the kind that an objective learns from."""
    if part.READS == ROLLOUTS:
        batch = _batch()
        sampled, referred = (_waves((2, 12), pace, 4).sin().float() * 0.3 - 3 for pace in (0.7, 1.1))
        columns = RolloutColumns(sampled, torch.tensor([1.2, -0.7]), referred)
        if part.VALUES:
            advantages, values, returns = (_waves((2, 12), pace, 6).sin().float() for pace in (0.5, 0.9, 1.3))
            columns = replace(columns, advantages=advantages, values=values / 4, returns=returns)
        return replace(batch, rollouts=columns, teacher=_teacher() if part.needs_teacher else None)
    if part.parts == 1 and isinstance(part, objectives.Distillation):
        return replace(_batch(), teacher=_teacher())
    if part.parts == 1:
        return _batch()
    batch = _pairs(PARTS)
    if part.looks_first:
        return replace(batch, mismatched=_pairs(1), whole=torch.tensor(0.4))
    return batch


def _teacher() -> TopK:
    """Return two tokens at each position of `_batch`, and their log-probabilities."""
    tokens = torch.stack([_batch().tokens, (_batch().tokens + 1) % 40], dim=-1)
    return TopK(tokens, _waves((2, 12, 3), 0.9, 5).sin().float().log_softmax(-1))


def _batch() -> MicroBatch:
    """Return two rows of 12 tokens, some without a target."""
    tokens = (torch.arange(24) * 7 % 40).view(2, 12)
    targets = torch.where(torch.arange(24).view(2, 12) % 5 == 4, IGNORED, tokens)
    return MicroBatch(tokens, tokens, torch.zeros_like(tokens), targets, 0, 24, int((targets >= 0).sum()))


def _pairs(parts: int) -> MicroBatch:
    """Return two pairs of rows of up to 12 tokens, whose answers begin at the fourth token."""
    rows = 2 * parts
    tokens = (torch.arange(12 * rows) * 7 % 40).view(rows, 12)
    places = torch.arange(12)[None]
    lengths = torch.tensor([12, 7, 9, 10, 8, 11])[:rows, None]
    segments = torch.where(places < lengths, 0, -1)
    targets = torch.where(places >= 2, next_tokens(tokens, segments), IGNORED)
    reference = _waves((2, parts), 1.7, 3).sin().float() * 3 - 25
    return MicroBatch(tokens, places.expand_as(tokens), segments, targets, 0, int((segments >= 0).sum()),
                      int((targets >= 0).sum()), parts=parts, reference=reference)


def _model(part: Any) -> Rows:
    """Initial weights, logits and gradients of a small model on two rows of two documents and padding."""
    vocabulary = 48
    model = Decoder(part, vocabulary)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_parameter(name, parameter.shape, part, 7))
    tokens = (torch.arange(40) * 11 % vocabulary).view(2, 20)
    segments = torch.tensor([[0] * 9 + [1] * 8 + [-1] * 3, [0] * 3 + [1] * 17])
    positions = torch.tensor([[*range(9), *range(8), *range(3)], [*range(3), *range(17)]])
    logits = model(tokens, positions, segments)
    loss = model(tokens, positions, segments, targets=next_tokens(tokens, segments))
    loss.backward()
    rows = {"logits": logits.detach()[:, ::4, ::6].flatten().tolist(), "loss": [loss.item()]}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        rows[f"{name} initial"] = [parameter.detach().norm().item(), *parameter.detach().flatten()[:3].tolist()]
        rows[f"{name} gradient"] = [parameter.grad.norm().item(), *parameter.grad.flatten()[:3].tolist()]
    return rows


def _adapter(part: Any) -> Rows:
    """Initial values of an adapter, and logits and gradients of a small model with it, whose zeros are moved."""
    vocabulary = 48
    config = families.KIND.build(families.DEFAULT, {"dim": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2})
    base = build(TrainConfig, {"model": config.settings(), "adapter": as_json(part)})
    model = parallel.build(base, vocabulary, Runtime())
    parallel.init_weights(model, 7)
    rows: Rows = {}
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            factor = [part.rate_factor(name)]
            rows[f"{name} initial"] = [parameter.norm().item(), *parameter.flatten().abs()[:3].tolist(), *factor]
            parameter.add_(0.1 * _waves(tuple(parameter.shape), 0.37, index).cos())
    tokens = (torch.arange(40) * 11 % vocabulary).view(2, 20)
    logits = model.parts[0](tokens, torch.arange(20).expand(2, -1), torch.zeros_like(tokens))
    logits.square().mean().backward()
    rows["logits"] = logits.detach()[:, ::4, ::6].flatten().tolist()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        rows[f"{name} gradient"] = [parameter.grad.norm().item()]
    return rows


def _compression(part: Any) -> Rows:
    """Return the sum of three slots' gradients in two steps, and what is left of them."""
    shape = (24, 40)
    values = _waves((3, 960), 0.37, 1).sin().float() * (1 + _waves((3, 960), 0.01, 0).cos().float())
    rows: Rows = {}
    state = None
    for count in range(2):
        total, values, ats = summed(part, values, shape, count=count, state=state)
        state = [{**at.state, **at.new} for at in ats]
        rows |= {f"{count} sum": total[::13].tolist(), f"{count} left": values[:, ::37].flatten().tolist()}
    return rows


SMALL: dict[str, dict[str, Any]] = {
    compressions.KIND.noun: {},
    adapters.KIND.noun: {},
    families.KIND.noun: {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "max_sequence_length": 64},
    schedules.KIND.noun: {},
}
"""Settings that make a case of a kind small."""
COMPUTE: dict[str, Callable[[Part], Rows]] = {
    optimizers.KIND.noun: _optimizer, schedules.KIND.noun: _schedule, objectives.KIND.noun: _objective,
    families.KIND.noun: _model, adapters.KIND.noun: _adapter,
    compressions.KIND.noun: _compression,
}


def cases() -> Iterator[tuple[str, Case]]:
    """Compute all cases; yield (name, case)."""
    for name in names():
        yield name, run(name)


def _waves(shape: tuple[int, ...], pace: float, phase: int) -> torch.Tensor:
    """Return fp64 angles of the given shape, the same on every machine."""
    return (torch.arange(math.prod(shape), dtype=torch.float64) * pace + phase).view(shape)

