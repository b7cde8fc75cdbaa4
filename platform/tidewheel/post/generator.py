"""A process that samples and judges groups: it holds one version of the policy, and takes one job at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tidewheel import storage
from tidewheel.parts import Code, is_own, name_of
from tidewheel.post import policy
from tidewheel.post.fetching import Fetched, Fetcher
from tidewheel.post.groups import Group, Job, Judge, make_group
from tidewheel.rewards.scoring.process import RewardProcess
from tidewheel.train.config import TrainConfig


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
        import torch

        from tidewheel.shards.tokenizer import of_manifest

        for its in code:
            Code(**its).load()
        settings = TrainConfig.model_validate(config)
        assert settings.rollouts is not None
        self._settings, self._rollouts = settings, settings.rollouts
        if device == "cpu":
            torch.set_num_threads(max(1, int(self._rollouts.generators.cpus)))
        self._run = storage.store(settings.run_uri)
        self._encoder = of_manifest(storage.store(settings.data.uri), tokenizer)
        self._model = policy.empty(settings.model, vocabulary_size, device)
        self._sampling = sampling_of(settings, self._encoder.eos)
        self._judge = judge_of(settings)
        self._loaded = ""  # digest of the weights that the model has
        self._fetcher = Fetcher(self._run)

    def make(self, job: Job) -> Group:
        """Return the group of a job.

        Raises:
            CheckpointError: the job's version of the policy is missing or damaged.
        """
        began = time.process_time()
        fetched = Fetched()
        if job.version.digest != self._loaded:
            self._loaded = ""
            files, fetched = self._fetcher.fetch(job.version)
            policy.put(files, job.version, self._model, self._run.uri)
            self._loaded = job.version.digest
        made = make_group(job, self._model, self._encoder, self._judge, self._sampling, answers=self._rollouts.group,
                          seed=self._rollouts.seed)
        return Group(made.position, made.prompt_id, made.version, made.answers, made.rewards, made.failure, made.detail,
                     time.process_time() - began, fetched)


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


def judge_of(config: TrainConfig) -> Judge:
    """Return what scores answers: the reward, or a process with limits for one of the user's own."""
    rollouts = config.rollouts
    assert rollouts is not None
    reward = rollouts.reward
    if not is_own(name_of(type(reward))):
        return reward.judge
    return RewardProcess(reward, seconds=rollouts.reward_seconds).judge
