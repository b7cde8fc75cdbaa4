"""Tests of pairs made by a judge: a reward model, and a language model behind an endpoint of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.inference.endpoint import Endpoint, serving
from tests.unit.train.preferences.pairs import pair_config, random_pairs, write_pairs
from tidewheel import retry
from tidewheel.cli import run_command
from tidewheel.elastic.trainer import fit_local
from tidewheel.errors import ConfigError, InputError
from tidewheel.inference import judges
from tidewheel.inference.judges import EndpointJudge, RewardModelJudge, Verdict
from tidewheel.inference.judging import UNIT, make_pairs


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as server:
        yield server


def write(path: Path, records: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


RECORDS = [{"prompt": "say it", "answers": ["a long answer", "short"]}, {"prompt": "first", "answers": ["one", "two"]},
           {"prompt": "same", "answers": ["equal", "equal"]}, {"prompt": "again {x}", "answers": ["no", "not at all"]}]


def test_a_language_model_judges_in_both_orders(endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(judges.KEY, "geheim")
    monkeypatch.setattr(judges, "POLICY", retry.RetryPolicy(budget_seconds=60, pause_seconds=0.01))
    endpoint.failures = [503, 429]
    source = write(tmp_path / "answers.jsonl", RECORDS)
    done = make_pairs(source, EndpointJudge(endpoint.url, "big"), str(tmp_path / "out"))
    assert (done.records, done.pairs, done.judged, dict(done.left_out)) == (4, 2, 4, {"tie": 1, "equal_answers": 1})
    pairs = [json.loads(line) for line in (tmp_path / "out/preferences/pairs.jsonl").read_text().splitlines()]
    assert pairs == [{"prompt": "say it", "chosen": "short", "rejected": "a long answer"},
                     {"prompt": "again {x}", "chosen": "no", "rejected": "not at all"}]
    assert len(endpoint.asked) == 2 + 6, "two failures, two orders for each of three records"
    assert set(endpoint.keys) == {"Bearer geheim"}
    [unit] = (tmp_path / "out/verdicts").iterdir()
    kept = [json.loads(line) for line in unit.read_text().splitlines()]
    assert [exchange["answer"] for exchange in kept[0]["exchanges"]] == [" B.", " A."]
    assert "[Prompt]\nsay it" in kept[0]["exchanges"][0]["prompt"]
    assert "geheim" not in unit.read_text()


def test_an_endpoint_that_refuses_is_not_asked_again(endpoint: Endpoint, tmp_path: Path):
    endpoint.failures = [401]
    source = write(tmp_path / "answers.jsonl", RECORDS)
    command = ["judge", source, "--output", str(tmp_path / "out")]
    assert run_command([*command, "--endpoint", endpoint.url, "--model", "big"]) == 2
    assert len(endpoint.asked) == 1
    with pytest.raises(ConfigError, match="not an HTTP address"):
        EndpointJudge("file:///etc/passwd", "big")
    assert run_command(command) == 2


class Counting:
    """Prefers longer answers, and breaks off after some records."""

    def __init__(self, most: int) -> None:
        self.most, self.asked = most, 0

    def identity(self) -> dict[str, Any]:
        return {"counting": 1}

    def judge(self, prompt: str, answers: Sequence[str]) -> Verdict:
        self.asked += 1
        if self.asked > self.most:
            raise KeyboardInterrupt
        return Verdict([float(len(answer)) for answer in answers])


def test_a_killed_command_judges_only_what_is_missing(tmp_path: Path):
    records = [{"prompt": str(number), "answers": ["a", "bb", "ccc"]} for number in range(2 * UNIT + 5)]
    source, output = write(tmp_path / "answers.jsonl", records), str(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        make_pairs(source, Counting(UNIT + 3), output)
    again = Counting(1000)
    done = make_pairs(source, again, output)
    assert again.asked == done.judged == UNIT + 5, "the first unit is kept"
    assert done.pairs == len(records)
    assert make_pairs(source, Counting(0), output).judged == 0
    whole = make_pairs(source, Counting(1000), str(tmp_path / "whole"))
    assert whole.judged == len(records)
    assert (tmp_path / "whole/preferences/pairs.jsonl").read_bytes() == (
        tmp_path / "out/preferences/pairs.jsonl").read_bytes()


def test_bad_records_are_refused(tmp_path: Path):
    for record in ({"prompt": "a"}, {"prompt": 1, "answers": ["a", "b"]}, {"prompt": "a", "answers": ["a"]}):
        with pytest.raises(InputError, match=r"answers\.jsonl:1"):
            make_pairs(write(tmp_path / "answers.jsonl", [record]), Counting(1), str(tmp_path / "out"))


def test_a_reward_model_judges(tmp_path: Path):
    write_pairs(tmp_path / "pairs", random_pairs(20))
    fit_local(pair_config(tmp_path, "reward", "objective.kind=reward_model", "steps=3", "data.validation=''"))
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m.content + ' ' }}{% endfor %}")
    judge = RewardModelJudge(str(tmp_path / "runs/reward"), str(tmp_path / "template.jinja"))
    verdict = judge.judge("abc", ["de", "fgh", "de"])
    assert verdict.scores[0] == verdict.scores[2] != verdict.scores[1]
    assert verdict.exchanges[1]["prompt"] == "abc fgh "
    assert float(verdict.exchanges[1]["answer"]) == verdict.scores[1]
    records = [{"prompt": "abc", "answers": ["de", "fgh"]}]
    done = make_pairs(write(tmp_path / "answers.jsonl", records), judge, str(tmp_path / "out"))
    best = max(range(2), key=lambda index: verdict.scores[index])
    [pair] = (tmp_path / "out/preferences/pairs.jsonl").read_text().splitlines()
    assert done.pairs == 1
    assert json.loads(pair)["chosen"] == records[0]["answers"][best]
