"""Judges of answers: a reward model, and a language model behind an HTTP endpoint."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tidewheel import retry, storage
from tidewheel.checkpoint import conversion
from tidewheel.checkpoint.digest import digest
from tidewheel.checkpoint.manifest import read_manifest
from tidewheel.checkpoint.verify import locate
from tidewheel.config import build
from tidewheel.data.tokenize.chat import ChatTemplate, encode_rendered, read_template
from tidewheel.errors import ConfigError, InputError
from tidewheel.models.decoder import next_tokens
from tidewheel.shards.tokenizer import of_manifest
from tidewheel.train.config import TrainConfig
from tidewheel.train.local_device import local_device
from tidewheel.train.objective import Outputs
from tidewheel.train.parallel.building import decoder_of
from tidewheel.train.record import recorded_source
from tidewheel.train.step import MicroBatch

KEY = "TIDEWHEEL_JUDGE_KEY"
"""Environment variable with the endpoint's key. It is sent, and never recorded."""
QUESTION = """Which of two answers to a prompt is better? Judge how correct, helpful and clear they are.

[Prompt]
{prompt}

[Answer A]
{first}

[Answer B]
{second}

Reply with one letter, A or B."""
POLICY = retry.RetryPolicy(request_seconds=120.0, budget_seconds=300.0, pause_seconds=1.0, longest_pause_seconds=30.0)


@dataclass(frozen=True)
class Verdict:
    """What a judge says of the answers to one prompt.

    Args:
        scores: one for each answer, the higher the better; equal ones are a tie.
        exchanges: what the judge was given and what it answered, each {"prompt", "answer"}.
    """

    scores: list[float]
    exchanges: list[dict[str, str]] = field(default_factory=list)


class Judge(Protocol):
    """Judges answers."""

    def identity(self) -> dict[str, Any]:
        """Return what its verdicts depend on, JSON values."""

    def judge(self, prompt: str, answers: Sequence[str]) -> Verdict:
        """Return the verdict of some answers to a prompt."""


class RewardModelJudge(Judge):
    """A reward model of a run; its exchanges hold the rendered conversations and the rewards.

    Args:
        uri: a run of a reward model, or one of its checkpoints.
        template: path or URI of the chat template that it was trained with, a Jinja file.
        device: default: the first GPU if there is one, else the CPU.

    Raises:
        CheckpointError: there is no complete checkpoint.
        ConfigError: the run is not one of a reward model.
    """

    def __init__(self, uri: str, template: str, *, device: str = "") -> None:
        run, checkpoints, name = locate(uri)
        manifest = read_manifest(checkpoints, name)
        if not run.exists("run.json"):
            raise ConfigError("there is no run.json, which says how answers are rendered and where their rewards are",
                              where=run.uri, fix="give a run of a reward model; one starts from an imported adapter "
                              "with adapter.init_from")
        recorded = run.read_json("run.json")
        config = build(TrainConfig, recorded["config"], where=run.uri)
        if config.objective.HEAD != 1:
            raise ConfigError("not a reward model: its output is logits", where=uri,
                              fix="give a run whose objective has a head of one number")
        _, vocabulary_size = conversion.model_of(manifest, checkpoints.at(name), any_head=True)
        with torch.device("meta"):
            self._model = decoder_of(config, vocabulary_size)
        names = [parameter for parameter, _ in self._model.named_parameters()]
        self._model.load_state_dict(conversion.read_weights(checkpoints, name, manifest, names), assign=True)
        self._device, self._objective = local_device(device), config.objective
        self._model.to(self._device)
        domain = recorded_source(recorded).domains[0]
        self._encoder = of_manifest(storage.store(domain.uri), domain.manifest.tokenizer)
        source = storage.read_text(template).encode()
        self._template = ChatTemplate(read_template(None, source, where=template), tuple(self._encoder.special))
        self._identity = {"rewards": digest(checkpoints.at(name)).groups["model"],
                          "template": storage.content_hash(source)}

    def identity(self) -> dict[str, Any]:
        return self._identity

    @torch.no_grad()
    def judge(self, prompt: str, answers: Sequence[str]) -> Verdict:
        asked = [{"role": "user", "content": prompt}]
        begin = len(self._template.text(asked, add_generation_prompt=True))
        texts = []
        for answer in answers:
            text = self._template.rendered([*asked, {"role": "assistant", "content": answer}], None).text
            texts.append(text[:self._template.turn_end(text, begin)])
        scores = [self._reward(ids, int((spans[:, 1] <= begin).sum()))
                  for ids, spans in encode_rendered(self._encoder, self._template, texts)]
        return Verdict(scores, [{"prompt": text, "answer": repr(score)} for text, score in zip(texts, scores)])

    def _reward(self, ids: Any, prompt: int) -> float:
        tokens = torch.tensor(ids.tolist(), device=self._device)[None]
        segments = torch.zeros_like(tokens)
        targets = next_tokens(tokens, segments)
        targets[:, :max(0, prompt - 1)] = -1
        batch = MicroBatch(tokens, torch.arange(tokens.shape[1], device=self._device)[None], segments, targets, 0,
                           tokens.numel(), tokens.numel() - prompt)
        return float(self._model(batch.tokens, batch.positions, segments, targets,
                                 lambda hidden, logits: self._objective.rewards(Outputs(hidden, logits), batch)[0]))


class EndpointJudge(Judge):
    """A language model behind an endpoint with OpenAI's chat completions, asked about two answers in both orders.

    An answer is better if it is preferred in both orders; otherwise the two are a tie, so a preference for the first or
    the second place decides nothing.

    Args:
        url: of the endpoint, such as http://localhost:8000/v1/chat/completions.
        model: name of the model there.
        question: the prompt, with {prompt}, {first} and {second}.

    Raises:
        ConfigError: the URL is not one of HTTP.
    """

    def __init__(self, url: str, model: str, question: str = QUESTION) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not an HTTP address", where="--endpoint",
                              fix="give the endpoint's address, such as http://localhost:8000/v1/chat/completions")
        self._url, self._model, self._question = url, model, question

    def identity(self) -> dict[str, Any]:
        return {"model": self._model, "question": self._question}

    def judge(self, prompt: str, answers: Sequence[str]) -> Verdict:
        if len(answers) != 2:
            raise InputError(f"{len(answers)} answers: a language model judges two", where=prompt[:80],
                             fix="give two answers for each prompt, or judge with a reward model")
        exchanges = []
        scores = [0.0, 0.0]
        for order in ((0, 1), (1, 0)):
            asked = self._question.format(prompt=prompt, first=answers[order[0]], second=answers[order[1]])
            reply = self._ask(asked)
            exchanges.append({"prompt": asked, "answer": reply})
            letter = reply.strip()[:1].upper()
            if letter in ("A", "B"):
                scores[order["AB".index(letter)]] += 1
        return Verdict(scores if 2.0 in scores else [0.0, 0.0], exchanges)

    def _ask(self, text: str) -> str:
        """Return the reply, asked again while the endpoint is busy or away.

        Raises:
            ConfigError: the endpoint refuses the request, or does not answer within the budget.
        """
        body = json.dumps({"model": self._model, "messages": [{"role": "user", "content": text}], "temperature": 0,
                           "max_tokens": 16}).encode()
        key = os.environ.get(KEY)

        def attempt() -> str:
            request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
            if key:
                request.add_unredirected_header("Authorization", f"Bearer {key}")  # another host must not get it
            with urllib.request.urlopen(request, timeout=POLICY.request_seconds) as response:
                return str(json.load(response)["choices"][0]["message"]["content"])

        try:
            return retry.call(attempt, POLICY, may_help=_may_help)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"the judge does not answer ({str(error)[:200]})", where=self._url,
                              fix=f"check the address, the model's name and the key in {KEY}; then give the command "
                                  "again: verdicts so far are kept") from None


def _may_help(error: Exception) -> bool:
    """Return whether asking again may help: the endpoint is busy, broken or away, not at odds with the request."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code == 429 or error.code >= 500
    return isinstance(error, OSError)
