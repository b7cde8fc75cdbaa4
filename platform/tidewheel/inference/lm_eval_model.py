"""A model class of lm-evaluation-harness whose answers are those of `tidewheel evaluate --tasks`.

Importing this module registers it as "tidewheel". lm-evaluation-harness 0.4.13 loads no entry points, so a program has
to import it: `tidewheel lm-eval ...` does, and then hands its arguments to lm-evaluation-harness' own command line.
"""

from __future__ import annotations

from typing import Any, cast

import lm_eval.models as known_models
import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from tidewheel.errors import ConfigError
from tidewheel.inference.scorer import ModelScorer, evaluated_checkpoint, open_scorer
from tidewheel.inference.tasks.config import GenerationConfig
from tidewheel.inference.tasks.requests import Generate, Likelihood, LogLikelihood, Rolling

NAME = "tidewheel"
assert known_models.MODEL_MAPPING  # imported first: it registers its own models only while there is none


@register_model(NAME)
class TidewheelLM(LM):  # type: ignore[misc]
    """A run, a checkpoint or a Hugging Face folder.

    Args:
        run: its URI: `--model_args run=runs/demo`.
        tokenizer: see `Writer.open`, also for the chat template.
        chat_template: a Jinja file.
        adapter: URI of an adapter of this model: a run, a checkpoint, or a folder that peft wrote.
        precision: fp32 or bf16.
        device: default: the first GPU if there is one, else the CPU.
        batch_size: not used: batches are cut by their number of tokens.
        max_batch_size: not used.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged.
        ConfigError: there is no tokenizer.
    """

    def __init__(self, run: str, tokenizer: str = "", chat_template: str = "", adapter: str = "",
                 precision: str = "fp32", device: str | None = None, batch_size: Any = None,
                 max_batch_size: Any = None) -> None:
        super().__init__()
        if precision not in ("fp32", "bf16"):
            raise ConfigError(f"{precision!r} is no precision", where="--model_args precision",
                              fix="give fp32 or bf16")
        is_missing = (device or "").startswith("cuda") and not torch.cuda.is_available()  # the harness' own default
        scorer = open_scorer(
            evaluated_checkpoint(run), tokenizer=tokenizer, chat_template=chat_template,
            device="" if is_missing else device or "", precision=cast(Any, precision),
            adapters={"adapter": adapter} if adapter else None)
        self._scorer: ModelScorer = scorer.of("adapter" if adapter else "")
        self._is_chat = False

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether it is the most likely text) of each (context, continuation)."""
        answers = self._scorer.answers([LogLikelihood(*request.args) for request in requests], chat=self._is_chat)
        return [(answer.log_likelihood, answer.greedy) for answer in answers if isinstance(answer, Likelihood)]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Return the log-likelihood of each text."""
        answers = self._scorer.answers([Rolling(request.args[0]) for request in requests])
        return [answer.log_likelihood for answer in answers if isinstance(answer, Likelihood)]

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Return the text that continues each prompt, by (prompt, generation settings)."""
        asked = [_generate(request.args[0], request.args[1], seed) for seed, request in enumerate(requests)]
        answers = self._scorer.answers(asked, chat=self._is_chat)
        return [str(answer) for answer in answers]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of messages, with the beginning of the assistant's turn.

        Raises:
            ConfigError: the last message is the assistant's, which only a `gen_prefix` makes.
        """
        if not add_generation_prompt:
            raise ConfigError("gen_prefix begins the answer, which a chat template here cannot",
                              where="--apply_chat_template", fix="leave it out for this task")
        self._is_chat = True
        return self._scorer.chat(chat_history)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the template's source, for the record."""
        template = self._scorer.writer.template
        return "" if template is None or not chat_template else template.source

    @property
    def tokenizer_name(self) -> str:
        """Name of the model, which tells its caches from those of others."""
        return self._scorer.writer.checkpoint.replace("/", "__")


def _generate(prompt: str, settings: dict[str, Any], seed: int) -> Generate:
    known = set(GenerationConfig.model_fields) | {"max_new_tokens", "max_tokens", "max_completion_tokens"}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ConfigError(f"unknown generation settings: {', '.join(unknown)}", where="generation_kwargs",
                          fix=f"use {', '.join(sorted(known))}")
    generation = GenerationConfig.model_validate(settings)
    return Generate(prompt, tuple(generation.stops("")), generation.max_gen_toks, generation.heat, generation.top_k,
                    generation.top_p, seed)
