"""Answers of the model in training to prompts of validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tidewheel import storage
from tidewheel.data.tokenize.chat import ChatTemplate
from tidewheel.errors import ConfigError, InputError
from tidewheel.inference.chat import checked_messages, encode_messages
from tidewheel.inference.generate import generate
from tidewheel.inference.sample import sees_whole_rows
from tidewheel.inference.writer import ends_of
from tidewheel.shards.source import Domain
from tidewheel.shards.tokenizer import Encoder, of_manifest
from tidewheel.train.answers import Prompt
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.precision import precision_context

WHERE = "evaluation.answers.prompts"


def answer(model: ParallelModel, domains: Sequence[Domain], config: TrainConfig, collectives: Collectives,
           prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield the model's most likely answer to each prompt, without the token that ends it.

    All ranks must take all answers together. No random number is drawn.

    Args:
        model: this rank's part of the model.
        domains: shard sets whose tokenizer, chat template and sequence length are used.
        config: of the run.
        collectives: of the run's ranks.
        prompts: what to answer.

    Raises:
        ConfigError: a prompt is a conversation, and the shard sets have no chat template.
        InputError: the template does not accept a conversation, or a prompt fills the model's context.
    """
    first = domains[0]
    tokenizer = of_manifest(storage.store(first.uri), first.manifest.tokenizer)
    templates = sorted({domain.manifest.chat_template for domain in domains} - {""})
    template = ChatTemplate(templates[0], tuple(tokenizer.special)) if templates else None
    ends = ends_of(tokenizer, template)
    context, most = first.manifest.sequence_length, config.evaluation.answers.new_tokens
    encoded = [_encoded(prompt, tokenizer, template) for prompt in prompts]  # finds mistakes before the first answer
    for prompt, ids in zip(prompts, encoded):
        if len(ids) >= context:
            raise InputError(f"a prompt has {len(ids)} tokens, and the model's context {context}: "
                             f"{str(prompt.values)[:80]}", where=WHERE, fix="shorten it, or leave it out")
    for ids in encoded:
        with precision_context(collectives.device, config.precision):
            new = generate(model.parts[0] if sees_whole_rows(model) else model, ids,
                           tokens=min(most, context - len(ids)), context=context, device=collectives.device,
                           temperature=0, stop=ends)
        yield tokenizer.decode([token for token in new if token not in ends])
    model.reshard()


def _encoded(prompt: Prompt, tokenizer: Encoder, template: ChatTemplate | None) -> list[int]:
    if "prompt" in prompt.values:
        ids: list[int] = tokenizer.encode_plain([prompt.values["prompt"]])[0].tolist()
        return ids
    if template is None:
        raise ConfigError("a conversation, but the training set has no chat template", where=WHERE,
                          fix='give texts, {"prompt": "..."}, or train on a set of conversations')
    return encode_messages(tokenizer, template, checked_messages(prompt.values["messages"], WHERE), where=WHERE)
