"""Evaluation tasks on the model in training, on the ranks that train it.

Log-likelihoods are computed by batches: data rank i mod N computes batch i, and the ranks share one sum, so the figures
are the same for every number of ranks. Texts are written by all ranks together, as text samples are. Draws come from
generators of their own, so the training's random state stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from tidewheel import storage
from tidewheel.data.tokenize.chat_template import ChatTemplate
from tidewheel.inference import batched
from tidewheel.inference.generate import generate
from tidewheel.inference.likelihood import Layout, Pair, Row, batches_of, layout, likelihoods, of_hidden, rows_of, score
from tidewheel.inference.scorer import ModelScorer
from tidewheel.inference.tasks.evaluation import Options, items_of
from tidewheel.inference.tasks.metrics import figures, judged
from tidewheel.inference.tasks.requests import Answer, Generate, Likelihood
from tidewheel.inference.tasks.task import Task
from tidewheel.inference.writer import Writer
from tidewheel.shards.source import Domain
from tidewheel.shards.tokenizer import of_manifest
from tidewheel.train.collectives import Collectives
from tidewheel.train.config import TrainConfig
from tidewheel.train.parallel import ParallelModel
from tidewheel.train.precision import precision_context


def options_of(config: TrainConfig) -> Options:
    """Return what a run evaluates."""
    tasks = config.evaluation.tasks
    return Options(tuple(tasks.files), tasks.num_fewshot, tasks.limit, chat=tasks.chat)


def check_tasks(config: TrainConfig) -> None:
    """Read the tasks of a run, and render their prompts, before a step is taken.

    Raises:
        ConfigError: a task file is wrong.
        InputError: a task's data is missing or wrong.
    """
    for task in options_of(config).open():
        if not config.evaluation.tasks.chat:
            task.items()


@torch.no_grad()
def task_scores(model: ParallelModel, domain: Domain, config: TrainConfig,
                collectives: Collectives) -> dict[str, dict[str, float]]:
    """Return the figures of each task by name, with standard errors as NAME_stderr. All ranks must call it together.

    Args:
        model: this rank's part of the model.
        domain: shard set whose tokenizer, chat template and sequence length are used.
        config: of the run.
        collectives: of the run's ranks.
    """
    encoder = of_manifest(storage.store(domain.uri), domain.manifest.tokenizer)
    source = domain.manifest.chat_template
    template = ChatTemplate(source, tuple(encoder.special)) if source else None
    decoder: Any = model.parts[0]
    scorer = TrainingScorer(model, Writer(config.run_uri, decoder, encoder, domain.manifest.sequence_length, template),
                            config, collectives)
    chat = config.evaluation.tasks.chat
    scores: dict[str, dict[str, float]] = {}
    for task in _tasks(options_of(config)):
        items = items_of(task, scorer, chat=chat)
        answers = scorer.answers([request for item in items for request in item.requests], chat=chat)
        values, begin = [], 0
        for item in items:
            end = begin + len(item.requests)
            values.append(judged(item, answers[begin:end], task.config, task.metrics))
            begin = end
        own = scores.setdefault(task.name, {})
        for figure in figures(values, task.metrics):
            own[figure.name] = figure.value
            if figure.stderr is not None:
                own[f"{figure.name}_stderr"] = figure.stderr
    model.reshard()
    return scores


@lru_cache(maxsize=1)
def _tasks(options: Options) -> list[Task]:
    return options.open()


class TrainingScorer(ModelScorer):
    """The model in training.

    Args:
        model: this rank's part of the model.
        writer: tokenizer, template and context; its model is this rank's decoder.
        config: of the run.
        collectives: of the run's ranks.
    """

    def __init__(self, model: ParallelModel, writer: Writer, config: TrainConfig, collectives: Collectives) -> None:
        super().__init__(writer, {}, precision=config.precision)
        self._model, self._collectives, self.device = model, collectives, collectives.device
        self._whole = model.mesh.size("pipeline", "context", "tensor") == 1  # this rank sees whole sequences

    def likelihoods(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        """Return the likelihood of each pair, computed by all ranks together."""
        context = self.writer.context
        if self._whole:
            batches = batches_of(rows_of(pairs, 2 * context))
        else:  # ranks hold parts of rows, for which a mask of our own is not known
            batches = [[Row(pair.context, [(index, pair.continuation)])] for index, pair in enumerate(pairs)]
        mesh = self._model.mesh
        values = torch.zeros(2, len(pairs), dtype=torch.float64)
        for first in range(0, len(batches), mesh.data_size):
            index = first + mesh.data_rank
            tensors = layout(batches[min(index, len(batches) - 1)], self.device)
            with torch.compiler.set_stance("force_eager"), precision_context(self.device, self._precision):
                found = score(self.writer.model, tensors) if self._whole else self._of_parts(tensors)
            if index < len(batches) and mesh.leads:
                for pair, likelihood in zip(tensors.pairs, found):
                    values[:, pair] = torch.tensor([likelihood.log_likelihood, float(likelihood.greedy)])
        sums = self._collectives.to_host(self._collectives.sum(values)).tolist()
        return [Likelihood(log_likelihood, bool(greedy), len(pair.continuation))
                for log_likelihood, greedy, pair in zip(*sums, pairs)]

    def _of_parts(self, tensors: Layout) -> list[Likelihood]:
        """Return the likelihoods of one row, whose logits the ranks of one copy of the model compute together."""
        logits = self._model(tensors.tokens, tensors.positions, torch.zeros_like(tensors.tokens))
        return likelihoods(of_hidden(logits, lambda part: part, tensors), tensors)

    def _texts(self, requests: dict[int, Generate], *, chat: bool) -> dict[int, Answer]:
        if self._whole:
            return super()._texts(requests, chat=chat)
        with precision_context(self.device, self._precision):
            return {index: self._text(request, chat=chat) for index, request in sorted(requests.items())}

    def _text(self, request: Generate, *, chat: bool) -> str:
        new = generate(self._model, self.texts.prompt(request, chat=chat), tokens=request.tokens,
                       context=self.writer.context, device=self.device, temperature=request.temperature,
                       top_k=request.top_k, top_p=request.top_p, seed=request.seed, stop=self.writer.ends)
        kept = new[:-1] if new and new[-1] in self.writer.ends else new
        return batched.cut(self.writer.tokenizer.decode(kept), request.stops)
