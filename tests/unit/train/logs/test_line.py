"""Lines of workers' logs: their form, and that no secret is in them."""

import json
from dataclasses import replace

from tidewheel.train.logs.line import HIDDEN, LogLine, Redactor

LINE = LogLine(1_790_000_000.5, "warning", "demo", 3, 7, 120, "tidewheel.train.loop", "slow\nvery slow", "p", 40)


def test_each_part_of_a_text_has_time_level_run_generation_rank_and_step():
    head = "2026-09-21T14:13:20.500Z WARNING  demo generation=3 rank=7 step=120 tidewheel.train.loop: "
    assert LINE.as_text() == f"{head}slow\n{head}very slow"
    assert LINE.shown("text") == LINE.as_text()


def test_a_process_with_a_role_has_it_in_place_of_a_rank():
    line = replace(LINE, role="agent")
    assert line.as_text().startswith("2026-09-21T14:13:20.500Z WARNING  demo generation=3 role=agent step=120 ")
    assert LogLine.of_json(json.loads(line.shown("json"))) == line


def test_lines_of_an_earlier_release_have_no_role():
    values = LINE.as_json()
    del values["role"]
    assert LogLine.of_json(values) == LINE


def test_json_goes_both_ways():
    assert LogLine.of_json(json.loads(LINE.shown("json"))) == LINE
    assert "\n" not in LINE.shown("json")


def test_secrets_are_hidden_and_other_text_is_not():
    hide = Redactor({"AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI", "HF_TOKEN": "opensesame", "PATH": "/usr/bin/python",
                     "TOKENIZERS_PARALLELISM": "true", "RAY_TOKEN": "short"})
    assert hide("key wJalrXUtnFEMI, token=opensesame.") == f"key {HIDDEN}, token={HIDDEN}."
    assert hide("AKIAIOSFODNN7EXAMPLE") == HIDDEN
    assert hide("s3://user:password@host/bucket") == "s3://host/bucket"
    assert hide("/usr/bin/python is true and short") == "/usr/bin/python is true and short"
