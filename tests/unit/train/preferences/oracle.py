"""TRL's losses on one batch, and ours on the same model: `TABLE` pairs each of our losses with TRL's settings.

TRL's trainers build the batch. Its rows become a preference set of ours, read by `shards.pairs`; the same transformer
computes both sides, so a difference is one of the losses. Where TRL averages a cross-entropy over all tokens of the
batch and we over the tokens of each pair, the chosen answers have equal lengths.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.unit.train.preferences.pairs import Pair, write_pairs
from tidewheel.shards.pairs import open_set
from tidewheel.train import objectives
from tidewheel.train.batches import micro_batch
from tidewheel.train.objective import Objective, Outputs
from tidewheel.train.step import MicroBatch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
BETA, SMOOTHING, LENGTH = 0.1, 0.1, 16
RAGGED: list[Pair] = [
    ([5, 6, 7], [8, 9], [10, 11, 12, 13]), ([14, 15], [16, 17, 18, 19, 20], [21]), ([22], [23, 24, 25], [26, 27]),
    ([28, 29, 30, 31], [32, 33, 34], [35, 36, 37, 38, 39])]
EVEN: list[Pair] = [(prompt, [*chosen, 40, 41, 42][:4], rejected) for prompt, chosen, rejected in RAGGED]
"""Chosen answers of equal lengths."""
LEVEL: list[Pair] = [([*prompt, 43, 44, 45][:4], chosen, rejected) for prompt, chosen, rejected in EVEN]
"""Prompts of equal lengths too."""
SINGLE: list[Pair] = [(prompt, chosen, []) if index != 1 else (prompt, [], rejected)
                      for index, (prompt, chosen, rejected) in enumerate(RAGGED)]
"""One answer to each prompt, the second of which is not desirable."""


@dataclass(frozen=True)
class Row:
    """One of our losses, and the same loss of TRL."""

    kind: str
    settings: dict[str, Any]
    trl: dict[str, Any]
    family: str = "dpo"
    pairs: tuple[str, list[Pair]] = ("ragged", RAGGED)
    margins: tuple[float, ...] = ()
    """Of the pairs, for a reward model."""
    metrics: dict[str, str] = field(default_factory=lambda: {
        "rewards_chosen": "rewards/chosen", "rewards_rejected": "rewards/rejected", "margins": "rewards/margins",
        "accuracies": "rewards/accuracies"})

    @property
    def name(self) -> str:
        """Return the loss and its settings, for people."""
        more = ["margins of pairs"] if self.margins else []
        more += [] if all(self.pairs[1][0]) else ["single answers"]
        return " ".join([self.kind, *(f"{key}={value}" for key, value in self.settings.items()), *more])


def _dpo(loss: str, trl: dict[str, Any] | None = None, **settings: Any) -> Row:
    return Row("dpo", {"loss": loss, **settings}, {"loss_type": loss, "label_smoothing": 0.0, **(trl or {})})


def _divergence(loss: str, name: str, theirs: str) -> Row:
    return _dpo(loss, {"f_divergence_type": theirs, "f_alpha_divergence_coef": 0.5}, divergence=name)


_SMOOTH = {"label_smoothing": SMOOTHING}
_EVEN, _LEVEL = ("even", EVEN), ("level", LEVEL)
TABLE = [
    *(_dpo(loss) for loss in ("sigmoid", "hinge", "ipo", "nca_pair", "sigmoid_norm", "apo_zero", "apo_down",
                              "discopop", "bco_pair", "sppo_hard")),
    _dpo("robust", _SMOOTH, **_SMOOTH), _dpo("exo_pair", _SMOOTH, **_SMOOTH),
    *(_divergence("sigmoid", *names) for names in (("forward_kl", "forward_kl"), ("js", "js_divergence"),
                                                   ("alpha", "alpha_divergence"))),
    _divergence("hinge", "js", "js_divergence"),
    Row("dpo", {"loss": "sigmoid", "sft_weight": 0.5}, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        pairs=_EVEN),
    Row("cpo", {"loss": "sigmoid"}, {"loss_type": "sigmoid"}, "cpo", _EVEN),
    Row("cpo", {"loss": "sigmoid", **_SMOOTH}, {"loss_type": "sigmoid", **_SMOOTH}, "cpo", _EVEN),
    Row("cpo", {"loss": "hinge", "sft_weight": 0.5}, {"loss_type": "hinge", "cpo_alpha": 0.5}, "cpo", _EVEN),
    Row("cpo", {"loss": "ipo", "sft_weight": 0.0}, {"loss_type": "ipo", "cpo_alpha": 0.0}, "cpo"),
    Row("simpo", {"gamma": 0.5}, {"loss_type": "simpo", "simpo_gamma": 0.5, "cpo_alpha": 0.0}, "cpo"),
    Row("simpo", {"gamma": 0.5, "sft_weight": 1.0}, {"loss_type": "simpo", "simpo_gamma": 0.5}, "cpo", _EVEN),
    Row("orpo", {}, {}, "orpo", _LEVEL),
    Row("kto", {"loss": "kto", "undesirable_weight": 1.5}, {"loss_type": "kto", "undesirable_weight": 1.5}, "kto",
        metrics={"rewards_chosen": "rewards/chosen", "rewards_rejected": "rewards/rejected", "kl": "kl"}),
    Row("kto", {"loss": "apo_zero_unpaired"}, {"loss_type": "apo_zero_unpaired"}, "kto",
        metrics={"rewards_chosen": "rewards/chosen", "rewards_rejected": "rewards/rejected"}),
    *(Row("kto", {"loss": loss, "undesirable_weight": 1.5}, {"loss_type": loss, "undesirable_weight": 1.5}, "kto",
          ("single", SINGLE), metrics=metrics)
      for loss, metrics in (("kto", {"kl": "kl"}), ("apo_zero_unpaired", {}))),
    Row("reward_model", {}, {}, "reward", metrics={"margins": "margin", "accuracies": "accuracy"}),
    Row("reward_model", {"margin": 0.3, "center": 0.01}, {"center_rewards_coefficient": 0.01}, "reward",
        metrics={"margins": "margin", "accuracies": "accuracy"}),
    Row("reward_model", {}, {}, "reward", margins=(0.1, -0.5, 1.0, 2.5),
        metrics={"margins": "margin", "accuracies": "accuracy"}),
]


@dataclass(frozen=True)
class Compared:
    """Relative differences of a loss, its metrics and its gradient from TRL's.

    That of a gradient is the norm of the difference over the norm. That of metrics is relative to the largest of them,
    or to the log-probabilities whose differences they are.
    """

    loss: float
    loss_difference: float
    gradient_difference: float
    metric_difference: float
    metrics: dict[str, float]
    """TRL's."""

    @property
    def worst(self) -> float:
        """Return the largest difference."""
        return max(self.loss_difference, self.gradient_difference, self.metric_difference)


def compare(row: Row) -> Compared:
    """Compute a loss with TRL and with ours, on one model and the same tokens."""
    settings = dict(row.settings) if row.kind == "reward_model" else {"beta": BETA, **row.settings}
    objective = objectives.KIND.build(row.kind, settings)
    seed = int(row.family == "kto")  # so that KTO's KL estimate is positive, and not clamped
    model = _model(seed, row.family == "reward")
    reference = _model(1 - seed, False)
    batch = _rows(objective, row.pairs[1], model, reference)
    if row.margins:
        batch = replace(batch, margins=torch.tensor(row.margins))
    theirs, metrics = _TRL[row.family](row, model, reference, batch)
    their_gradient = gradient(model, theirs)
    ours = objective.sums(outputs_of(model, batch), batch)
    count = objective.count(batch)
    our_loss = ours.loss / count
    our_gradient = gradient(model, our_loss)
    # a margin is a difference of rewards, and a reward beta times one of log-probabilities: fp32 rounds the operands
    scale = max((abs(metrics[their]) for their in row.metrics.values()), default=0.0)
    if batch.reference is not None:
        scale = max(scale, BETA * batch.reference.abs().max().item())
    metric = max((abs(ours.metrics[our].item() / count - metrics[their]) / scale
                  for our, their in row.metrics.items()), default=0.0)
    norm = their_gradient.norm()
    return Compared(theirs.item(), abs(our_loss.item() - theirs.item()) / abs(theirs.item()),
                    float((our_gradient - their_gradient).norm() / norm), metric,
                    {our: metrics[their] for our, their in row.metrics.items()})


def gradient(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """Return the gradient of all parameters as one vector, fp64."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat(gradients).double()


def causal_model(seed: int) -> Any:
    """Return a Llama of two layers with random weights."""
    return _model(seed, False)


def _model(seed: int, scores: bool) -> Any:
    """Return a Llama of two layers with random weights; with a score in the place of logits for a reward model."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    settings = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, pad_token_id=0,
                           num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, eos_token_id=1,
                           tie_word_embeddings=False, num_labels=1, bos_token_id=None)
    settings._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = (LlamaForSequenceClassification if scores else LlamaForCausalLM)(settings).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
    return model.train()


def outputs_of(model: Any, batch: MicroBatch) -> Outputs:
    """Return the outputs of one of transformers' models, as an objective takes them."""
    mask = (batch.segment_ids >= 0).long()
    hidden = model.model(input_ids=batch.tokens, attention_mask=mask).last_hidden_state
    return Outputs(hidden, model.score if hasattr(model, "score") else model.lm_head)


def _rows(objective: Objective, pairs: list[Pair], model: Any, reference: Any) -> MicroBatch:
    """Return pairs as training reads them, with the reference's log-probabilities if the objective needs them."""
    from tidewheel.train.preferences.log_probabilities import answers

    with tempfile.TemporaryDirectory() as folder:
        ended = [(prompt, [*chosen, 1] if chosen else [], [*rejected, 1] if rejected else [])
                 for prompt, chosen, rejected in pairs]
        write_pairs(Path(folder), ended, shards=1, length=LENGTH, unpaired=not all(pairs[0]))
        rows = open_set(folder, parts=objective.parts).rows(np.zeros(4, dtype=np.int64), np.arange(4))
    batch = micro_batch(rows, slice(None), 0, torch.device("cpu"))
    if not objective.needs_reference:
        return batch
    with torch.no_grad():
        batch = replace(batch, reference=answers(outputs_of(reference, batch), batch, 0).sums)
        if batch.mismatched is None:
            return batch
        other = batch.mismatched
        other = replace(other, reference=answers(outputs_of(reference, other), other, 0).sums)
        whole = objective.first(outputs_of(model, other), other) / objective.count(batch)
        return replace(batch, mismatched=other, whole=whole)


def _fields(batch: MicroBatch, parts: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return the rows of some parts, one part after the other, as TRL's collators give them."""
    rows = torch.cat([torch.arange(part, len(batch.tokens), batch.parts) for part in parts])
    answer = torch.zeros_like(batch.tokens)
    answer[:, 1:] = (batch.targets[:, :-1] >= 0).long()
    mask = (batch.segment_ids >= 0).long()
    tokens = torch.where(mask.bool(), batch.tokens, 0)
    return {"input_ids": tokens[rows], "attention_mask": mask[rows], "completion_mask": answer[rows]}


def tokenizer() -> Any:
    """Return a tokenizer of transformers with a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{index}": index for index in range(64)}, unk_token="t63"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")


def _trainer(trainer: Any, config: Any, row: Row, columns: Callable[[str, str, str], dict[str, Any]],
             settings: dict[str, Any], **arguments: Any) -> tuple[Any, dict[str, Any]]:
    """Return a TRL trainer and the batch that its collator makes of the pairs."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()

    def text(tokens: list[int]) -> str:
        return " ".join(f"t{token}" for token in tokens)

    data = Dataset.from_list([columns(text(prompt), text(chosen), text(rejected))
                              for prompt, chosen, rejected in row.pairs[1]])
    built = trainer(args=config(output_dir=tempfile.mkdtemp(), report_to="none", use_cpu=True, bf16=False,
                                per_device_train_batch_size=4, gradient_checkpointing=False, **settings, **row.trl),
                    train_dataset=data, processing_class=tokenizer(), **arguments)
    return built, dict(built.data_collator([built.train_dataset[index] for index in range(4)]))


def _finish(trainer: Any, model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, float]]:
    loss = trainer.compute_loss(model, dict(batch))
    kept = trainer._metrics if hasattr(trainer, "_metrics") else trainer._stored_metrics
    return loss, {name: float(torch.as_tensor(values, dtype=torch.float64).mean())
                  for name, values in kept["train"].items()}


def _pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _trl_dpo(row: Row, model: Any, reference: Any, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
    from trl import DPOConfig, DPOTrainer

    trainer, _ = _trainer(DPOTrainer, DPOConfig, row, _pair, {"beta": BETA, "max_length": None}, model=model,
                          ref_model=reference)
    return _finish(trainer, model, _fields(batch, (0, 1)))


def _trl_kto(row: Row, model: Any, reference: Any, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
    from trl import KTOConfig, KTOTrainer

    def unpaired(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
        return {"prompt": prompt, "completion": chosen, "label": True}

    trainer, _ = _trainer(KTOTrainer, KTOConfig, row, unpaired, {"beta": BETA}, model=model, ref_model=reference)
    fields: dict[str, Any] = {**_fields(batch, tuple(range(batch.parts))), "label": torch.arange(8) < 4}
    if batch.desirable is not None:
        fields["label"] = batch.desirable
    if batch.mismatched is not None:
        mismatched = _fields(batch.mismatched, (0,))
        fields |= {f"KL_{name}": torch.cat([rows] * batch.parts) for name, rows in mismatched.items()}
    return _finish(trainer, model, fields)


def _trl_reward(row: Row, model: Any, reference: Any, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
    from trl import RewardConfig, RewardTrainer

    trainer, _ = _trainer(RewardTrainer, RewardConfig, row, _pair, {}, model=model)
    fields = _fields(batch, (0, 1))
    del fields["completion_mask"]
    if row.settings.get("margin"):
        fields["margin"] = torch.full((4,), row.settings["margin"])
    if batch.margins is not None:
        fields["margin"] = batch.margins
    return _finish(trainer, model, fields)


def _trl_without_reference(row: Row, model: Any, reference: Any,
                           batch: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
    if row.family == "orpo":
        from trl.experimental.orpo import ORPOConfig as Config
        from trl.experimental.orpo import ORPOTrainer as Trainer
    else:
        from trl.experimental.cpo import CPOConfig as Config
        from trl.experimental.cpo import CPOTrainer as Trainer
    trainer, fields = _trainer(Trainer, Config, row, _pair, {"beta": BETA, "max_length": LENGTH,
                                                             "disable_dropout": True}, model=model)
    for part, name in enumerate(("chosen", "rejected")):
        ours = _fields(batch, (part,))
        fields |= {f"{name}_{key}": ours[key] for key in ("input_ids", "attention_mask")}
        fields[f"{name}_labels"] = torch.where(ours["completion_mask"].bool(), ours["input_ids"], -100)
    return _finish(trainer, model, fields)


_TRL = {"dpo": _trl_dpo, "kto": _trl_kto, "reward": _trl_reward, "cpo": _trl_without_reference,
        "orpo": _trl_without_reference}
