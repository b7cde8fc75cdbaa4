"""`tidewheel score`: records of a file, results, failures by reason, and limits."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import tidewheel as tw
from tidewheel.cli import run_command
from tidewheel.errors import InputError
from tidewheel.rewards.scoring import file, process
from tidewheel.rewards.scoring.file import Fields, score_file

RECORDS: list[tuple[str | bytes | dict[str, Any], float | str]] = [
    ({"id": "a", "prompt": "6 x 7?", "answer": "#### 42", "reference": "6 x 7 = 42\n#### 42"}, 1.0),
    ({"answer": "#### 41", "reference": 42}, 0.0), ({"answer": "#### 0.5", "reference": 0.5, "id": 7}, 1.0),
    ({"answer": "#### 1"}, "no_reference"), ({"answer": "#### 1", "reference": "one"}, "unusable_reference"),
    ({"reference": "1"}, "no_answer"), ({"answer": None, "reference": "1"}, "no_answer"),
    ({"answer": ["#### 1"], "reference": "1"}, "not_text"), ({"answer": "#### 1", "reference": True}, "not_text"),
    ({"answer": "#### 1", "reference": "1", "prompt": {}}, "not_text"), ('{"answer": ', "invalid_json"),
    ("[" * 100_000, "invalid_json"), ('{"answer": ' + "9" * 5000 + "}", "invalid_json"),
    (b'{"answer": "\xff"}', "wrong_encoding"),
    ('["#### 1"]', "not_an_object"), ('{"answer": "\\ud800", "reference": "1"}', "invalid_unicode"),
    ({"answer": "1" * 1_000_001, "reference": "1"}, "answer_too_long"),
    ({"answer": "1" * (2 << 20), "reference": "1"}, "record_too_long"), ({"answer": "", "reference": "1"}, 0.0)]


def write(path: Path, records: list[Any]) -> Path:
    lines = [json.dumps(record).encode() if isinstance(record, dict) else record.encode() if isinstance(record, str)
             else record for record in records]
    path.write_bytes(b"\n\n".join(lines) + b"\n")
    return path


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of all kinds of records, in a batch of more than one and less than all."""
    monkeypatch.setattr(file, "MAX_RECORD_BYTES", 1_500_000)
    monkeypatch.setattr(file, "BATCH_RECORDS", 5)
    return write(tmp_path / "answers.jsonl", [record for record, _ in RECORDS])


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_record_has_a_score_or_a_reason(answers: Path, tmp_path: Path):
    output = tmp_path / "scores.jsonl"
    summary = score_file(str(answers), tw.rewards.Gsm8k(), output=str(output))
    rows = results(output)
    assert [row.get("failure", row["score"]) for row in rows] == [expected for _, expected in RECORDS]
    assert [row["line"] for row in rows] == list(range(1, 2 * len(RECORDS), 2))
    assert [row.get("id") for row in rows[:3]] == ["a", None, None]
    assert all(row["score"] is None for row in rows if "failure" in row)
    assert (summary.records, summary.scored, summary.mean) == (19, 4, 0.5)
    assert dict(summary.failures) == {reason: sum(expected == reason for _, expected in RECORDS)
                                      for _, reason in RECORDS if isinstance(reason, str)}
    assert summary.examples["wrong_encoding"].startswith("line 27: ")


def test_the_same_records_give_the_same_bytes_however_they_are_packed(answers: Path, tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch):
    packed = tmp_path / "answers.jsonl.gz"
    packed.write_bytes(gzip.compress(answers.read_bytes()))
    for source, name, size in ((answers, "a", 5), (packed, "b", 5), (answers, "c", 1), (answers, "d", 1000)):
        monkeypatch.setattr(file, "BATCH_RECORDS", size)
        score_file(str(source), tw.rewards.Gsm8k(), output=str(tmp_path / name))
    assert len({(tmp_path / name).read_bytes() for name in "abcd"}) == 1


def test_a_line_of_200_mb_costs_no_memory_and_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(file, "MAX_RECORD_BYTES", 4 << 20)
    source = tmp_path / "answers.jsonl.gz"
    with gzip.open(source, "wb", compresslevel=1) as stream:
        stream.write(b'{"answer": "')
        for _ in range(200):
            stream.write(b"1" * 1_000_000)
        stream.write(b'", "reference": "1"}\n{"answer": "#### 1", "reference": "1"}\n')
    tracemalloc.start()
    try:
        summary = score_file(str(source), tw.rewards.Gsm8k())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert dict(summary.failures) == {"record_too_long": 1}
    assert summary.mean == 1
    assert peak < 40 << 20


def test_a_file_that_is_damaged_or_empty_leaves_no_results(answers: Path, tmp_path: Path):
    output = tmp_path / "scores.jsonl"
    packed = gzip.compress(answers.read_bytes())
    for name, data, message in (("cut.gz", packed[:-200], "end too early"),
                                ("sum.gz", packed[:-8] + b"12345678", "write the file again"),
                                ("empty", b"\n \n", "no record")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=message):
            score_file(str(tmp_path / name), tw.rewards.Gsm8k(), output=str(output))
        assert not output.exists()


def test_fields_may_have_other_names(tmp_path: Path):
    source = write(tmp_path / "a.jsonl", [{"question": "q", "output": "#### 1", "solution": "1"}])
    assert score_file(str(source), tw.rewards.Gsm8k(), fields=Fields("question", "output", "solution")).mean == 1


def test_the_command_prints_the_mean_and_the_failures(answers: Path, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "scores.jsonl"
    command = ["score", str(answers), "--reward", "gsm8k", "--output", str(output)]
    assert run_command([*command, "--max-failed-fraction", "0.9"]) == 0
    said = capsys.readouterr().out
    assert "gsm8k: mean 0.5000, 4 of 19 records scored" in said
    assert "no_reference" in said
    assert "line 7" in said
    output.unlink()
    assert run_command(command) == 2
    assert "15 of 19 records have no score, more than 5%" in capsys.readouterr().err.replace("\n", " ")
    assert len(results(output)) == 19
    assert run_command([*command, "--json", "--max-failed-fraction", "1", "--set", "last_number=true"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["reward"] == {"kind": "gsm8k", "last_number": True}
    assert result["key"] == tw.rewards.Gsm8k(last_number=True).key()
    assert result["mean"] == 0.5


@pytest.mark.parametrize(("options", "message"), [
    (["--reward", "gsm8"], "did you mean 'gsm8k'"), (["--reward", "gsm8k", "--set", "mark=x"], "did you mean 'marker'"),
    (["--reward", "regex"], "pattern"), (["--reward", "gsm8k", "--seconds", "0"], "--seconds is 1 or more"),
    (["--reward", "gsm8k", "--max-failed-fraction", "2"], "from 0 to 1")])
def test_the_command_tells_mistakes(answers: Path, capsys: pytest.CaptureFixture[str], options: list[str],
                                    message: str):
    assert run_command(["score", str(answers), *options]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_a_reward_of_ones_own_has_limits_in_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                        capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(process, "WAIT_FACTOR", 10_000)
    name = "rewards_of_a_command"
    (tmp_path / f"{name}.py").write_text(
        "def long(sample):\n    while sample.answer == 'loop':\n        pass\n    return len(sample.answer)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = write(tmp_path / "a.jsonl", [{"answer": "three"}, {"answer": "loop"}])
    command = ["score", str(source), "--reward", f"{name}:long", "--seconds", "1", "--max-failed-fraction", "0.5"]
    assert run_command(command) == 0
    output = capsys.readouterr().out
    assert "mean 5.0000, 1 of 2 records scored" in output
    assert "time_limit" in output
