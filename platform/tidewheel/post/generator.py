"""A process that samples and judges groups: it holds one version of the policy, and takes one job at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tidewheel import storage
from tidewheel.engines.serving.base import EngineLost, EngineUse, RunningEngine
from tidewheel.inference.passes import Beat, PassCounter
from tidewheel.parts import Code, is_own, name_of
from tidewheel.post import policy, token_scores
from tidewheel.post.fetching import Fetched, Fetcher
from tidewheel.post.groups import Group, Job, Judge, lost, make_group
from tidewheel.post.policy import Version
from tidewheel.post.waiting import patiently
from tidewheel.rewards.scoring.process import RewardProcess
from tidewheel.train.config import TrainConfig

logger = logging.getLogger(__name__)


class Generator:
    """Samples and judges groups for a run.

    Args:
        config: the run's settings, as JSON values with absolute URIs.
        code: `parts.Code` of parts outside the package, as JSON values.
        tokenizer: the tokenizer of the run's rollouts, as a manifest names it.
        vocabulary_size: rows of the embedding.
        device: of the policy.
    """

    def __init__(self, config: Mapping[str, Any], code: Sequence[Mapping[str, Any]], tokenizer: Mapping[str, Any],
                 vocabulary_size: int, device: str = "cpu") -> None:
        for its in code:
            Code(**its).load()
        settings = TrainConfig.model_validate(config)
        patiently(lambda: self._open(settings, tokenizer, vocabulary_size, device), settings)

    def _open(self, settings: TrainConfig, tokenizer: Mapping[str, Any], vocabulary_size: int, device: str) -> None:
        import torch

        from tidewheel.shards.tokenizer import of_manifest

        assert settings.rollouts is not None
        self._settings, self._rollouts = settings, settings.rollouts
        if device == "cpu":
            torch.set_num_threads(max(1, int(self._rollouts.generators.cpus)))
        self._run = storage.store(settings.run_uri)
        self._encoder = of_manifest(storage.store(settings.data.uri), tokenizer)
        self._stages, self._values = settings.parallel.pipeline, settings.objective.VALUES
        self._vocabulary_size = vocabulary_size
        self._sampling = sampling_of(settings, self._encoder.eos)
        self._engine = engine_of(settings, vocabulary_size, self._sampling, device)
        self._model = None
        if self._engine is None or self._values:
            self._model = policy.empty(settings.model, vocabulary_size, device, values=self._values)
        self._passes = None if self._model is None else PassCounter(self._model)
        self._reference = None
        if settings.start_is_reference:
            self._reference = policy.empty(settings.model, vocabulary_size, device, values=self._values)
        self._has_reference = False  # until its weights are loaded
        self._judge = judge_of(settings)
        self._loaded = ""  # digest of the weights that the model has
        self._fetcher = Fetcher(self._run)

    def beat(self) -> Beat:
        """Return how far the work is. Safe to call from another thread while a group is made.

        An engine in a process of its own is watched by `engines.serving.process`.
        """
        return Beat(0, False) if self._passes is None else self._passes.beat

    def make(self, job: Job) -> Group:
        """Return the group of a job.

        Raises:
            CheckpointError: the job's version of the policy is missing or damaged.
        """
        return patiently(lambda: self._make(job), self._settings)

    def _make(self, job: Job) -> Group:
        began = time.process_time()
        fetched, losses, engine = Fetched(), 0, self._engine
        while True:
            try:
                if engine is not None and self._loaded:
                    engine.health()
                fetched += self._load(job.version)
                made = make_group(job, self._sample, self._encoder, self._judge, self._sampling,
                                  answers=self._rollouts.group, seed=self._rollouts.seed,
                                  environment=self._rollouts.environment, special_tokens=self._rollouts.special_tokens)
                break
            except EngineLost as error:
                logger.warning("the group of %s is sampled again: %s", job.prompt.id, error)
                self._loaded = ""
                losses += 1
                if losses >= self._rollouts.generators.most_tries:
                    made = replace(lost(job, losses), detail=str(error))
                    break
        if made.answers:
            made = self._scored(made, job.prompt.tokens)
        return replace(made, seconds=time.process_time() - began, fetched=fetched, again=job.again or losses > 0,
                       engine_losses=losses, engine="" if engine is None else engine.about())

    def close(self) -> None:
        """End the engine's process."""
        if self._engine is not None:
            self._engine.close()

    def _load(self, version: Version) -> Fetched:
        """Have a version of the policy; return what was read for it."""
        if version.digest == self._loaded:
            return Fetched()
        self._loaded = ""
        files, fetched = self._fetcher.fetch(version)
        if self._model is not None:
            policy.put(files, version, self._model, self._run.uri)
        if self._engine is not None:
            self._engine.load(policy.whole_weights(files, version, self._settings.model, self._vocabulary_size,
                                                   self._run.uri, values=self._values))
        self._loaded = version.digest
        return fetched

    def _sample(self, prompt: Sequence[int], samples: Sequence[int], sampling: Any, **about: Any) -> Any:
        """Return answers, see `groups.SampleGroup`."""
        from tidewheel.inference.group import sample_group
        from tidewheel.post.converse import converse

        if self._engine is None:
            assert self._model is not None
            return sample_group(self._model, prompt, samples, sampling, **about)
        return converse(self._engine, prompt, samples, sampling, vocabulary_size=self._vocabulary_size,
                        room=self._settings.model.max_sequence_length - len(prompt), **about)

    def _scored(self, made: Group, prompt: Sequence[int]) -> Group:
        """Return a group with the reference's log-probabilities and the values that training needs."""
        answers = [answer.tokens for answer in made.answers]
        if self._reference is not None:
            if not self._has_reference:
                version = policy.start(self._run, self._stages)
                files, _ = Fetcher(self._run).fetch(version)
                policy.put(files, version, self._reference, self._run.uri)
                self._has_reference = True
            referred = token_scores.log_probabilities(self._reference, prompt, answers, self._sampling)
            made = replace(made, referred=tuple(referred))
        if self._values:
            assert self._model is not None
            made = replace(made, values=tuple(token_scores.values(self._model, prompt, answers, self._sampling)))
        return made


def engine_of(config: TrainConfig, vocabulary_size: int, sampling: Any, device: str) -> RunningEngine | None:
    """Return the open engine of a run; None for the decoder in this process.

    Args:
        config: the run's settings.
        vocabulary_size: rows of the embedding.
        sampling: from `sampling_of`.
        device: of the policy.
    """
    rollouts = config.rollouts
    assert rollouts is not None
    return rollouts.engine.open(EngineUse(
        config.model, vocabulary_size, replace(config.decoding(), stop=sampling.stop), device,
        rollouts.generators.cpus, rollouts.generators.gpus))


def sampling_of(config: TrainConfig, eos: int) -> Any:
    """Return how a run's rollouts are sampled, a `inference.group.Sampling`.

    Args:
        config: the run's settings.
        eos: the token that ends an answer.
    """
    from tidewheel.inference.group import Sampling

    rollouts = config.rollouts
    assert rollouts is not None
    precision: Any = "bf16" if config.precision == "fp8" else config.precision
    return Sampling(rollouts.answer_tokens, rollouts.temperature, rollouts.top_k, rollouts.top_p, frozenset({eos}),
                    precision)


def judge_of(config: TrainConfig) -> Judge | None:
    """Return what scores answers: the reward, or a process with limits for one of the user's own. None: nothing."""
    rollouts = config.rollouts
    assert rollouts is not None
    reward = rollouts.reward
    if reward is None:
        return None
    if not is_own(name_of(type(reward))):
        return reward.judge
    return RewardProcess(reward, seconds=rollouts.reward_seconds).judge
