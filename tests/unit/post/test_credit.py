"""Tests of what answers are trained with: advantages by token, returns, KL as reward, the penalty of long answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.every import every
from tidewheel.config import build
from tidewheel.errors import ConfigError
from tidewheel.post.advantages import advantages
from tidewheel.post.collector import spread
from tidewheel.post.credit import Judged, credits, estimated, overlong
from tidewheel.train.policy.config import OverlongConfig, RolloutsConfig

RANDOM = np.random.default_rng(0)
LENGTHS = [[7, 3, 1], [5, 6, 7]]


def settings(**changes: Any) -> RolloutsConfig:
    return build(RolloutsConfig, {"prompts": "p", "reward": {"kind": "gsm8k"}, "answer_tokens": 8, **changes})


def answers(values: bool) -> list[list[Judged]]:
    def one(length: int) -> Judged:
        sampled, referred = RANDOM.uniform(-3, 0, (2, length)).tolist()
        return Judged(float(RANDOM.normal()), sampled, referred, RANDOM.normal(size=length).tolist() if values else ())

    return [[one(length) for length in group] for group in LENGTHS]


def token_rewards(answer: Judged, kl_weight: float) -> np.ndarray:
    """Return the reward of each token: minus the KL at each, and the answer's own at the last."""
    rewards = -kl_weight * (np.array(answer.sampled) - np.array(answer.referred))
    rewards[-1] += answer.reward
    return rewards


def normalised(rows: list[np.ndarray]) -> list[np.ndarray]:
    """Return rows as TRL's and verl's `masked_whiten` does."""
    every_value = np.concatenate(rows)
    return [(row - every_value.mean()) / np.sqrt(every_value.var(ddof=1) + 1e-8) for row in rows]


def test_the_estimate_is_the_sum_of_discounted_errors():
    for gamma, decay in ((1.0, 0.95), (0.9, 0.5), (0.97, 0.0), (1.0, 1.0)):
        rewards, values = RANDOM.normal(size=(2, 9))
        errors = rewards + gamma * np.append(values[1:], 0) - values
        expected = [sum((gamma * decay) ** (later - token) * errors[later] for later in range(token, 9))
                    for token in range(9)]
        assert np.allclose(estimated(rewards.tolist(), values.tolist(), gamma, decay), expected, rtol=0, atol=1e-12)


def test_ppo_learns_returns_and_normalised_advantages():
    groups, config = answers(values=True), settings(advantage="gae", kl_weight=0.1, gamma=0.9, gae_lambda=0.8)
    flat = [answer for group in groups for answer in group]
    raw = [np.array(estimated(token_rewards(answer, 0.1).tolist(), answer.values, 0.9, 0.8)) for answer in flat]
    found = [credit for group in credits(groups, config) for credit in group]
    for credit, answer, advantage, normal in zip(found, flat, raw, normalised(raw), strict=True):
        assert np.allclose(credit.advantages, normal, atol=1e-9)
        assert np.allclose(credit.returns, advantage + np.array(answer.values), atol=1e-9)
        assert credit.advantage == pytest.approx(normal.mean())


def test_reinforce_normalises_returns_over_the_tokens_of_the_step():
    groups, config = answers(values=False), settings(advantage="batch", kl_weight=0.2, gamma=0.95)
    returns = []
    for answer in (answer for group in groups for answer in group):
        rewards = token_rewards(answer, 0.2)
        returns.append(np.array([sum(0.95 ** (later - token) * rewards[later] for later in range(token, len(rewards)))
                                 for token in range(len(rewards))]))
    found = [credit for group in credits(groups, config) for credit in group]
    for credit, normal in zip(found, normalised(returns), strict=True):
        assert np.allclose(credit.advantages, normal, atol=1e-9)
        assert credit.returns == []


def test_kl_is_taken_from_the_reward_of_an_answer():
    groups = answers(values=False)
    shaped = [[answer.reward - 0.05 * (sum(answer.sampled) - sum(answer.referred)) for answer in group]
              for group in groups]  # as TRL's RLOO does
    found = credits(groups, settings(advantage="leave_one_out", group=3, kl_weight=0.05))
    assert np.allclose([[credit.advantage for credit in group] for group in found], advantages(shaped, "leave_one_out"))
    assert not any(credit.advantages for group in found for credit in group)


def test_long_answers_cost_what_the_paper_says():
    penalty = OverlongConfig(buffer_tokens=4)
    assert [overlong(tokens, 10, penalty) for tokens in (1, 6, 7, 9, 10)] == [0, 0, 0.25, 0.75, 1.0]
    assert overlong(10, 10, OverlongConfig()) == 0
    groups = answers(values=False)
    shaped = [[answer.reward - 0.5 * max(0, len(answer.sampled) - 4) / 4 for answer in group] for group in groups]
    found = credits(groups, settings(advantage="group", overlong={"buffer_tokens": 4, "penalty": 0.5}))
    assert np.allclose([[credit.advantage for credit in group] for group in found], advantages(shaped, "group"))


def test_tokens_of_an_environment_have_no_credit():
    assert spread([0.5, -0.25], [1, 0, 0, 1, 0]) == [0.5, 0.0, 0.0, -0.25, 0.0]
    assert spread([], [1, 0]) == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"gae_lambda": 0.5}, "gae_lambda has no effect on advantage group"),
    ({"gamma": 0.9, "advantage": "reward"}, "gamma has no effect on advantage reward"),
    ({"overlong": {"buffer_tokens": 9}}, "nearest legal choice: 2")]


@every(REFUSED)
def test_settings_without_effect_are_refused(case: tuple[dict[str, Any], str]):
    changes, message = case
    with pytest.raises(ConfigError, match=message):
        settings(**changes)
