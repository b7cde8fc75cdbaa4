"""A checkpoint that answers the requests of evaluation tasks: tokens, batches, log-likelihoods and texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from tidewheel.checkpoint.adapters import adapter_of, base_of
from tidewheel.checkpoint.digest import digest
from tidewheel.checkpoint.manifest import read_manifest
from tidewheel.checkpoint.verify import locate
from tidewheel.data.tokenize.chat import Refused, encode_rendered
from tidewheel.errors import ConfigError, InputError
from tidewheel.inference import batched, folder
from tidewheel.inference.likelihood import Pair, batches_of, layout, rows_of, score
from tidewheel.inference.tasks.requests import Answer, Generate, Likelihood, LogLikelihood, Request, Rolling, Scorer
from tidewheel.inference.writer import Writer
from tidewheel.models.adapting import peft_files
from tidewheel.parts import as_json
from tidewheel.storage import content_hash, join, store
from tidewheel.train.precision import Precision, fp32_products, precision_context

ROWS = 16
"""Prompts that are continued at once."""


@dataclass(frozen=True)
class Texts:
    """Tokens of requests, as lm-evaluation-harness splits them.

    White space at the end of a context belongs to the continuation, and both are tokenized together, so that a token
    never spans the two. The first token is predicted from the token that begins a document.

    Args:
        writer: the model and its tokenizer.
        prefix: the token before the first one of a text.
        leading: tokens that each text begins with.
    """

    writer: Writer
    prefix: int = field(init=False)
    leading: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        encoder = self.writer.tokenizer
        begins = encoder.bos if encoder.settings.bos == "document" else None
        object.__setattr__(self, "prefix", encoder.eos if begins is None else begins)
        object.__setattr__(self, "leading", () if begins is None else (begins,))

    def encode(self, text: str, *, chat: bool = False, leading: bool = True) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: plain text, or the text of a chat template.
            chat: whether it is that of a chat template.
            leading: put the leading tokens before plain text.
        """
        if chat:
            assert self.writer.template is not None
            ((ids, _),) = encode_rendered(self.writer.tokenizer, self.writer.template, [text])
            return [int(token) for token in ids]
        tokens = self.writer.tokenizer.encode_plain([text])[0].tolist()
        return [*self.leading, *tokens] if leading else tokens

    def pair(self, request: LogLikelihood, *, chat: bool = False) -> Pair:
        """Return the tokens of a context and its continuation, cut on the left to what the model's context holds.

        Raises:
            InputError: the continuation has no token, or does not fit into the context.
        """
        text = request.context.rstrip() if request.context.strip() else request.context
        spaces = request.context[len(text):]
        if not request.context:
            continuation = self.encode(request.continuation, leading=False)
            context = [self.prefix]
            if continuation[:1] == context and len(continuation) > 1:
                context, continuation = continuation[:1], continuation[1:]
        else:
            context = self.encode(text, chat=chat)
            continuation = self.encode(text + spaces + request.continuation, chat=chat)[len(context):]
        if not continuation:
            raise InputError(f"no token is left of the continuation {request.continuation!r} after the context",
                             where=request.context[-80:], fix="give longer choices, or another target_delimiter")
        room = self.writer.context + 1
        if len(continuation) >= room:
            raise InputError(f"a continuation has {len(continuation)} tokens, the model's context {room - 1}",
                             where=request.continuation[:80], fix="shorten the choices")
        kept = (context + continuation)[-room:]
        return Pair(tuple(kept[:len(kept) - len(continuation)]), tuple(continuation))

    def windows(self, text: str) -> list[Pair]:
        """Return pairs that predict each token of a text once, each with as long a context as the model takes."""
        tokens = self.encode(text, leading=False)
        most = self.writer.context
        pairs = []
        for begin in range(0, len(tokens), most):
            end = min(begin + most, len(tokens))
            before = [self.prefix, *tokens][max(0, end - most):begin + 1]
            pairs.append(Pair(tuple(before), tuple(tokens[begin:end])))
        return pairs

    def prompt(self, request: Generate, *, chat: bool = False) -> list[int]:
        """Return the tokens of a prompt, cut on the left so that the new tokens fit into the context.

        Raises:
            InputError: the new tokens fill the context.
        """
        room = self.writer.context - request.tokens
        if room < 1:
            raise InputError(f"{request.tokens} new tokens leave no room for a prompt in the model's context of "
                             f"{self.writer.context}", where="generation_kwargs.max_gen_toks",
                             fix=f"set it to at most {self.writer.context // 2}")
        return self.encode(request.prompt, chat=chat)[-room:] or [self.prefix]


class ModelScorer(Scorer):
    """A whole model on one device.

    Args:
        writer: the model, its tokenizer and its chat template.
        identity: what its weights are, JSON values.
        precision: type of the matrix products.
        adapter: of the writer's adapters, the one that answers; "": none.
        adapters: identity of each of the writer's adapters, by name.
    """

    def __init__(self, writer: Writer, identity: dict[str, Any], *, precision: Precision = "fp32", adapter: str = "",
                 adapters: Mapping[str, dict[str, Any]] | None = None) -> None:
        self.writer, self.texts = writer, Texts(writer)
        self._identity, self._precision, self.device = identity, precision, writer.device
        self._adapter, self._adapters = adapter, dict(adapters or {})

    def of(self, adapter: str) -> ModelScorer:
        """Return the scorer of the same model with one of its adapters; "": with none."""
        return ModelScorer(self.writer, self._identity, precision=self._precision, adapter=adapter,
                           adapters=self._adapters)

    def identity(self) -> dict[str, Any]:
        added = {"adapter": self._adapters[self._adapter]} if self._adapter else {}
        return {**self._identity, **added, "context": self.writer.context, "precision": self._precision,
                "device": self.device.type}

    def chat(self, messages: Sequence[dict[str, str]]) -> str:
        template = self.writer.template
        if template is None:
            raise ConfigError("the model has no chat template", where=self.writer.checkpoint,
                              fix="leave --chat out, or give one: --chat-template PATH/chat_template.jinja")
        try:
            return template.text(messages, add_generation_prompt=True)
        except Refused as error:
            raise InputError(f"the chat template does not accept the prompt: {error}", where=self.writer.checkpoint,
                             fix="leave out the description, which is the system's message, or use another template"
                             ) from None

    def answers(self, requests: Sequence[Request], *, chat: bool = False) -> list[Answer]:
        answers: dict[int, Answer] = {}
        pairs: list[Pair] = []
        owners: list[int] = []
        written: list[int] = []
        for index, request in enumerate(requests):
            if isinstance(request, Generate):
                written.append(index)
                continue
            own = self.texts.windows(request.text) if isinstance(request, Rolling) else [
                self.texts.pair(request, chat=chat)]
            pairs += own
            owners += [index] * len(own)
            answers[index] = Likelihood(0.0, True)
        with self.writer.using(self._adapter):
            likelihoods = self.likelihoods(pairs)
            answers |= self._texts({index: cast(Generate, requests[index]) for index in written}, chat=chat)
        for owner, likelihood in zip(owners, likelihoods):
            before = cast(Likelihood, answers[owner])
            answers[owner] = Likelihood(before.log_likelihood + likelihood.log_likelihood,
                                        before.greedy and likelihood.greedy, before.tokens + likelihood.tokens)
        return [answers[index] for index in range(len(requests))]

    def likelihoods(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        """Return the likelihood of each pair."""
        found: dict[int, Likelihood] = {}
        rows = rows_of(pairs, 2 * self.writer.context)
        with precision_context(self.device, self._precision), fp32_products(self.device, False):
            for batch in batches_of(rows):
                tensors = layout(batch, self.device)
                found |= zip(tensors.pairs, score(self.writer.model, tensors))
        return [found[index] for index in range(len(pairs))]

    def _texts(self, requests: dict[int, Generate], *, chat: bool) -> dict[int, Answer]:
        prompts = {index: self.texts.prompt(request, chat=chat) for index, request in requests.items()}
        order = sorted(requests, key=lambda index: (requests[index].tokens, -len(prompts[index]), index))
        found: dict[int, Answer] = {}
        with precision_context(self.device, self._precision), fp32_products(self.device, False):
            for first in range(0, len(order), ROWS):
                part = order[first:first + ROWS]
                texts = batched.write(self.writer.model, self.writer.tokenizer, [prompts[index] for index in part],
                                      [requests[index] for index in part], self.writer.ends, self.device)
                found |= zip(part, texts)
        return found


def identity_of(uri: str) -> dict[str, Any]:
    """Return what a model's or an adapter's weights are: hashes of their content.

    Args:
        uri: a run, a checkpoint, a Hugging Face folder, or a folder with an adapter of peft.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged.
    """
    if folder.is_folder(uri):
        return {"weights": folder.fingerprint(store(uri))}
    if store(uri).exists(peft_files.CONFIG):
        return {"weights": peft_files.fingerprint(store(uri))}
    _, checkpoints, name = locate(uri)
    manifest = read_manifest(checkpoints, name)
    identity: dict[str, Any] = {"weights": digest(checkpoints.at(name)).groups["model"]}
    if (base := base_of(manifest)) is not None:
        settings = {key: value for key, value in as_json(adapter_of(manifest)).items() if key != "init_from"}
        identity |= {"base": base.hash, "settings": settings}
    return identity


def open_scorer(uri: str, *, tokenizer: str = "", chat_template: str = "", device: str = "",
                precision: Precision = "fp32", adapters: Mapping[str, str] | None = None) -> ModelScorer:
    """Open a model to answer the requests of tasks.

    Args:
        uri: a run (its newest complete checkpoint), a checkpoint, or a Hugging Face folder.
        tokenizer: see `Writer.open`, also for the other arguments.
        chat_template: a Jinja file.
        device: default: the first GPU if there is one, else the CPU.
        precision: type of the matrix products.
        adapters: of this model; see `ModelScorer.of`.

    Raises:
        CheckpointError: there is no complete checkpoint, or it is damaged.
        ConfigError: there is no tokenizer, or an adapter is of another base.
    """
    writer = Writer.open(uri, tokenizer=tokenizer, chat_template=chat_template, device=device, adapters=adapters)
    template = "" if writer.template is None else writer.template.source
    identity = {**identity_of(uri), "tokenizer": content_hash(writer.tokenizer.data),
                "template": content_hash(template.encode())}
    return ModelScorer(writer, identity, precision=precision,
                       adapters={name: identity_of(adapter) for name, adapter in (adapters or {}).items()})


def evaluated_checkpoint(uri: str) -> str:
    """Return the URI of the checkpoint that a run's URI stands for; a checkpoint and a folder stand for themselves.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    if folder.is_folder(uri):
        return store(uri).uri
    _, checkpoints, name = locate(uri)
    return checkpoints.at(name)


def place_of_results(uri: str) -> str:
    """Return the default folder of a model's evaluations: below its run, or below its Hugging Face folder."""
    return join(store(uri).uri if folder.is_folder(uri) else locate(uri)[0].uri, "evaluations")
