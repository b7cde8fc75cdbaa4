"""Tests of win rates of two models by a judge behind an endpoint of ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from tests.unit.inference.endpoint import serving
from tests.unit.inference.tasks.models import write_model
from tidewheel.cli import run_command
from tidewheel.errors import ConfigError, InputError
from tidewheel.inference.judges import EndpointJudge
from tidewheel.inference.judging import UNIT
from tidewheel.inference.tasks.requests import Answer, Request
from tidewheel.inference.win_rates import Writing, compare, interval, read_prompts


class Writes:
    """A model whose answer to prompt i has a length that a function gives."""

    def __init__(self, name: str, length: Any) -> None:
        self.name, self.length, self.asked = name, length, 0

    def identity(self) -> dict[str, Any]:
        return {"weights": self.name}

    def chat(self, messages: Sequence[dict[str, str]]) -> str:
        return f"<{messages[0]['content']}>"

    def answers(self, requests: Sequence[Request], *, chat: bool = False) -> list[Answer]:
        self.asked += len(requests)
        return [self.name * self.length(int(request.prompt.split()[-1].strip(">"))) for request in requests]


def prompts(path: Path, count: int, word: str = "write") -> str:
    path.write_text("".join(json.dumps({"prompt": f"{word} {number}"}) + "\n" for number in range(count)))
    return str(path)


def test_a_win_rate_counts_swaps_and_equal_answers_as_ties_and_resumes(tmp_path: Path):
    """The judge prefers the shorter answer; with "first" in the prompt it prefers a place, which is a tie."""
    count = UNIT + 8
    file = Path(prompts(tmp_path / "prompts.jsonl", count))
    file.write_text(file.read_text() + json.dumps({"prompt": "first 1"}) + "\n")
    short, long = Writes("a", lambda number: 1 + number % 4), Writes("b", lambda number: 3)
    with serving() as endpoint:
        judge = EndpointJudge(endpoint.url, "big")
        endpoint.failures = [401, *[200] * 69]  # the last one asked for is refused
        with pytest.raises(ConfigError, match="does not answer"):
            compare(short, long, str(file), judge, str(tmp_path / "out"), Writing())
        assert len(endpoint.asked) == 70
        result = compare(short, long, str(file), judge, str(tmp_path / "out"), Writing())
        assert short.asked == long.asked == count + 1, "answers are kept"
        assert result.judged == count + 1 - UNIT, "the first unit's verdicts are kept"
        again = compare(short, long, str(file), judge, str(tmp_path / "out"), Writing())
    assert (again.judged, again.wins, again.low) == (0, result.wins, result.low)
    # lengths 1, 2, 3, 4 against 3: two wins, then neither wins in both orders, then a loss
    assert (result.wins, result.losses) == (count // 2, count // 4)
    assert result.ties == count + 1 - result.wins - result.losses
    assert result.win_rate == pytest.approx((result.wins + result.ties / 2) / (count + 1))
    assert result.low < result.win_rate < result.high
    kept = [json.loads(line) for unit in sorted((tmp_path / "out/verdicts").iterdir())
            for line in unit.read_text().splitlines()]
    assert all(len(verdict["exchanges"]) == 2 for verdict in kept)
    first, second = kept[0]["exchanges"]
    assert first["prompt"] != second["prompt"], "the answers change places"
    stored = json.loads((tmp_path / "out/win_rate.json").read_text())
    assert (stored["wins"], stored["judge"]["model"]) == (result.wins, "big")
    assert "bootstrap" in stored["interval"]


def test_equal_answers_are_ties_without_a_question(tmp_path: Path):
    same = Writes("a", lambda number: 2)
    with serving() as endpoint:
        result = compare(same, same, prompts(tmp_path / "prompts.jsonl", 3), EndpointJudge(endpoint.url, "big"),
                         str(tmp_path / "out"), Writing(chat=True))
        assert not endpoint.asked
    assert (result.equal, result.ties, result.win_rate, result.low, result.high) == (3, 3, 0.5, 0.5, 0.5)


def test_the_interval_is_that_of_scipy():
    values = np.random.default_rng(1).choice([0.0, 0.5, 1.0], 60).tolist()
    theirs = scipy.stats.bootstrap((values,), np.mean, method="percentile", n_resamples=9_999, rng=2)
    assert interval(values) == pytest.approx(
        (theirs.confidence_interval.low, theirs.confidence_interval.high), abs=0.01)


def test_the_command_compares_two_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, file = write_model(tmp_path / "model"), prompts(tmp_path / "prompts.jsonl", 3)
    with serving() as endpoint:
        command = ["win-rate", str(model), str(model), file, "--output", str(tmp_path / "out"), "--tokens", "4",
                   "--device", "cpu"]
        assert run_command([*command, "--endpoint", endpoint.url, "--model", "big", "--chat", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["equal"] == 3
        assert run_command(command) == 2
        assert run_command([*command, "--endpoint", endpoint.url, "--model", "big", "--tokens", "0"]) == 2


def test_prompts_that_cannot_be_read_are_refused(tmp_path: Path):
    for text in ("", '{"prompt": 3}\n', '["a"]\n', "no\n"):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(InputError, match=r"bad\.jsonl"):
            read_prompts(str(tmp_path / "bad.jsonl"))
    with pytest.raises(InputError, match="no such file"):
        read_prompts(str(tmp_path / "none.jsonl"))
