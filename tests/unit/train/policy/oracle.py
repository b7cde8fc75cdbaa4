"""TRL's policy-gradient losses on one batch, and ours on the same model: `TABLE` pairs our settings with TRL's.

The rows are read from a set of rollouts. Sampled log-probabilities differ from the model's, so that clipping is active;
the same transformer computes both sides, so a difference is one of the losses.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.unit.train.policy.rollouts import Rollout, write_rollouts
from tests.unit.train.preferences.oracle import Compared, causal_model, gradient, outputs_of, tokenizer
from tidewheel.shards.pairs import open_set
from tidewheel.train import objectives
from tidewheel.train.batches import micro_batch
from tidewheel.train.objective import Objective
from tidewheel.train.step import MicroBatch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
EPSILON, HIGH, LENGTH, ANSWER = 0.2, 0.28, 16, 7
BOUNDS = {"epsilon": EPSILON, "epsilon_high": HIGH}
ROLLOUTS = [([5, 6, 7], [10, 11, 12, 13, 14, 15, 16], 1.2), ([8, 9, 20, 21], [22, 23, 24], -0.7),
            ([30, 31], [32, 33, 34, 35, 36], 0.4), ([40, 41, 42, 43, 44], [45], -0.9)]


@dataclass(frozen=True)
class Row:
    """One of our objectives, and the same of TRL."""

    kind: str
    trl: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=lambda: dict(BOUNDS))

    @property
    def name(self) -> str:
        """Return the objective and its settings, for people."""
        return " ".join([self.kind, *(f"{key}={value}" for key, value in self.settings.items() if key not in BOUNDS)])


def _row(kind: str, loss: str, trl: dict[str, Any] | None = None, **settings: Any) -> Row:
    return Row(kind, {"loss_type": loss, "epsilon_high": HIGH, **(trl or {})}, {**BOUNDS, **settings})


_SEQUENCE = {"importance_sampling_level": "sequence"}
_KL = {"beta": 0.04, "use_bias_correction_kl": False}
TABLE = [
    _row("grpo", "grpo"), _row("grpo", "grpo", {"delta": 1.3}, most_ratio=1.3),
    _row("grpo", "grpo", _KL, reference_weight=0.04), _row("grpo", "grpo", {"temperature": 0.7}, temperature=0.7),
    _row("grpo", "grpo", _SEQUENCE, ratio="sequence"),
    _row("dr_grpo", "dr_grpo", answer_tokens=ANSWER), _row("dr_grpo", "dr_grpo", _SEQUENCE, answer_tokens=ANSWER,
                                                           ratio="sequence"),
    _row("dapo", "dapo"), _row("dapo", "dapo", _KL, reference_weight=0.04),
    _row("dapo", "dapo", {"entropy_coef": 0.01}, entropy_weight=0.01),
    _row("dapo", "dapo", _SEQUENCE, ratio="sequence"),
    Row("gspo", {"loss_type": "grpo", **_SEQUENCE, "epsilon": 3e-4, "epsilon_high": 4e-4}, {}),
    Row("cispo", {"loss_type": "cispo", "epsilon_high": 1.05}, {"epsilon_high": 0.05}),
    _row("sapo", "sapo"), Row("rloo", {"epsilon_high": HIGH}), _row("reinforce", "dapo"),
    *(_row(kind, kind, {"mode": f"{level}_{mode}"}, correction=correction, correction_level=level, correction_bound=1.1)
      for kind, level in (("grpo", "token"), ("dapo", "sequence"))
      for mode, correction in (("truncate", "truncated"), ("mask", "masked"))),
]


def compare(row: Row) -> Compared:
    """Compute a loss with TRL and with ours, on one model and the same tokens."""
    objective = objectives.KIND.build(row.kind, row.settings)
    model, reference = causal_model(0), causal_model(1)
    batch = _rows(objective, model, reference)
    theirs, metrics = _trl(row, model, reference, batch)
    their_gradient = gradient(model, theirs)
    ours = objective.sums(outputs_of(model, batch), batch)
    count = objective.count(batch)
    our_loss = ours.loss / count
    our_gradient = gradient(model, our_loss)
    entropy = ours.metrics["entropy"].item() / count
    tokens = row.trl.get("loss_type") in ("dapo", "cispo")  # TRL's entropy is a mean over tokens
    scale = max(abs(theirs.item()), 1.0)  # its terms have the size of the advantages, and may cancel
    return Compared(theirs.item(), abs(our_loss.item() - theirs.item()) / scale,
                    float((our_gradient - their_gradient).norm() / their_gradient.norm()),
                    abs(entropy - metrics["entropy"]) / metrics["entropy"] if tokens else 0.0, metrics)


def several_steps(row: Row, learning_rate: float, *, epochs: int, minibatches: int) -> list[tuple[float, float, float]]:
    """Train on one wave with TRL's `num_iterations` and `steps_per_generation`, and with our objective on a copy.

    Each side takes its own steps of gradient descent. TRL's buffer decides which rows a step has.

    Returns:
        For each step the difference of the losses, that of the gradients, and the share of tokens that are clipped.
    """
    objective = objectives.KIND.build(row.kind, row.settings)
    theirs, ours = causal_model(0), causal_model(0)
    everything = _rows(objective, ours, causal_model(1), noise=0.0)
    trainer = _trainer(row, theirs, per_device_train_batch_size=4 // minibatches, steps_per_generation=minibatches,
                       num_iterations=epochs)
    fields, order = _fields(everything), everything.rollouts.advantages.tolist()
    trainer._generate_and_score_completions = lambda _: fields
    theirs.train()
    steps = []
    for trainer._step in range(epochs * minibatches):
        inputs = trainer._prepare_inputs(None)
        chosen = [order.index(value) for value in inputs["advantages"].tolist()]
        their_loss = trainer.compute_loss(theirs, inputs)
        their_gradient = gradient(theirs, their_loss)
        batch = _chosen(everything, chosen)
        sums = objective.sums(outputs_of(ours, batch), batch)
        our_loss = sums.loss / objective.count(batch)
        our_gradient = gradient(ours, our_loss)
        steps.append((abs(our_loss.item() - their_loss.item()) / max(abs(their_loss.item()), 1.0),
                      float((our_gradient - their_gradient).norm() / their_gradient.norm()),
                      sums.metrics["clipped"].item() / objective.count(batch)))
        for model in (theirs, ours):
            torch.optim.SGD(model.parameters(), lr=learning_rate).step()
    return steps


def _chosen(batch: MicroBatch, rows: list[int]) -> MicroBatch:
    """Return some rows of a micro-batch of rollouts."""
    tensors = {name: getattr(batch, name)[rows] for name in ("tokens", "positions", "segment_ids", "targets")}
    rollouts = batch.rollouts
    assert rollouts is not None
    return replace(batch, **tensors, documents=None, num_targets=int((tensors["targets"] >= 0).sum()), rollouts=replace(
        rollouts, sampled=rollouts.sampled[rows], advantages=rollouts.advantages[rows], referred=None))


def _rows(objective: Objective, model: Any, reference: Any, noise: float = 0.3) -> MicroBatch:
    """Return the rollouts as training reads them: sampled by a policy near the model, or with noise 0 by the model."""
    from tidewheel.train.preferences.log_probabilities import token_log_probabilities

    def read(rollouts: list[Rollout]) -> MicroBatch:
        with tempfile.TemporaryDirectory() as folder:
            write_rollouts(Path(folder), rollouts, shards=1, length=LENGTH)
            rows = open_set(folder).rows(np.zeros(4, dtype=np.int64), np.arange(4))
        return micro_batch(rows, slice(None), 0, torch.device("cpu"))

    empty = read([Rollout(prompt, answer, [0.0] * len(answer), advantage) for prompt, answer, advantage in ROLLOUTS])
    moved = noise * torch.randn(4, LENGTH, generator=torch.Generator().manual_seed(3))
    temperature = getattr(objective, "temperature", 1.0)
    with torch.no_grad():
        outputs = outputs_of(model, empty)
        hot = type(outputs)(outputs.hidden, lambda x: outputs.make_logits(x) / temperature)
        sampled = (token_log_probabilities(hot, empty.targets, 0) + moved).clamp(max=0)
        referred = token_log_probabilities(outputs_of(reference, empty), empty.targets, 0)
    rollouts = []
    for index, (prompt, answer, advantage) in enumerate(ROLLOUTS):
        span = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
        rollouts.append(Rollout(prompt, answer, sampled[index, span].tolist(), advantage,
                                tuple(referred[index, span].tolist())))
    return read(rollouts)


def _trainer(row: Row, model: Any, reference: Any = None, **arguments: Any) -> Any:
    """Return a trainer of TRL's that can compute losses, and has not trained."""
    from datasets import Dataset, disable_progress_bars
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    disable_progress_bars()
    trainer_class, config_class = (RLOOTrainer, RLOOConfig) if row.kind == "rloo" else (GRPOTrainer, GRPOConfig)
    settings = {"beta": 0.0, "epsilon": EPSILON, "temperature": 1.0, **row.trl}
    settings.pop("mode", None)
    if settings["beta"]:  # TRL reads its reference from a folder
        model.config._name_or_path = model.name_or_path = tempfile.mkdtemp()
        reference.save_pretrained(model.name_or_path)
    config = config_class(output_dir=tempfile.mkdtemp(), report_to="none", use_cpu=True, bf16=False,
                          gradient_checkpointing=False, num_generations=4, max_completion_length=ANSWER,
                          disable_dropout=True, **{"per_device_train_batch_size": 4, **arguments}, **settings)
    trainer = trainer_class(model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
                            train_dataset=Dataset.from_list([{"prompt": "t5"}] * 8), processing_class=tokenizer())
    trainer.current_gradient_accumulation_steps = 1  # only set inside train()
    return trainer


def _trl(row: Row, model: Any, reference: Any, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
    """Return TRL's loss and its mean entropy."""
    trainer, mode = _trainer(row, model, reference), row.trl.get("mode", "")
    fields = _fields(batch)
    if row.kind == "rloo":
        fields["old_logps"] = (fields["old_per_token_logps"] * fields["completion_mask"]).sum(1)
    if mode:  # as if vLLM had sampled
        fields["importance_sampling_ratio"] = _correction(mode, model, batch, fields)
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        del fields["old_per_token_logps"]  # of the present policy
    model.train()
    loss = trainer.compute_loss(model, fields)
    return loss, {"entropy": float(np.mean(trainer._metrics["train"]["entropy"]))}


def _correction(mode: str, model: Any, batch: MicroBatch, fields: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the importance ratios that TRL computes when it has sampled, at most 1.1."""
    from tidewheel.train.preferences.log_probabilities import token_log_probabilities

    with torch.no_grad():
        present = token_log_probabilities(outputs_of(model, batch), batch.targets, 0)
    now = torch.zeros_like(fields["old_per_token_logps"])
    for index, (prompt, answer, _) in enumerate(ROLLOUTS):
        now[index, :len(answer)] = present[index, len(prompt) - 1:len(prompt) + len(answer) - 1]
    difference = (now - fields["old_per_token_logps"]) * fields["completion_mask"]
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    return ratio.clamp(max=1.1) if mode.endswith("truncate") else ratio.masked_fill(ratio > 1.1, 0.0)


def _fields(batch: MicroBatch) -> dict[str, torch.Tensor]:
    """Return the batch in TRL's form: prompts padded on the left, answers on the right."""
    rollouts = batch.rollouts
    assert rollouts is not None
    assert rollouts.referred is not None
    prompts = max(len(prompt) for prompt, _, _ in ROLLOUTS)
    fields = {name: torch.zeros(4, width, dtype=kind) for name, width, kind in (
        ("prompt_ids", prompts, torch.long), ("prompt_mask", prompts, torch.long),
        ("completion_ids", ANSWER, torch.long), ("completion_mask", ANSWER, torch.long),
        ("old_per_token_logps", ANSWER, torch.float32), ("ref_per_token_logps", ANSWER, torch.float32))}
    for index, (prompt, answer, _) in enumerate(ROLLOUTS):
        fields["prompt_ids"][index, prompts - len(prompt):] = torch.tensor(prompt)
        fields["prompt_mask"][index, prompts - len(prompt):] = 1
        fields["completion_ids"][index, :len(answer)] = torch.tensor(answer)
        fields["completion_mask"][index, :len(answer)] = 1
        span = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
        fields["old_per_token_logps"][index, :len(answer)] = rollouts.sampled[index, span]
        fields["ref_per_token_logps"][index, :len(answer)] = rollouts.referred[index, span]
    return {**fields, "advantages": rollouts.advantages, "num_items_in_batch": fields["completion_mask"].sum()}
