"""A few kills of each kind over GRPO; `python -m tests.chaos.reinforcement --kills 200` does many."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.reinforcement import run

pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.long, pytest.mark.timeout(1800)]


def test_kills_skip_and_double_no_prompt_and_change_no_bit(tmp_path: Path):
    problems = run(tmp_path, kills=6, seed=2, seconds=900,
                   kinds=["kill_generator", "kill_worker", "kill_both", "kill_node", "kill_driver"])
    assert not problems, "\n".join(problems)
