"""Errors for results without a document or a row count the dropped records and suggest a change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.plain_execution import without_ray
from tidewheel.config import build
from tidewheel.data import pipeline
from tidewheel.data.config import PipelineConfig
from tidewheel.data.pipeline_summary import PipelineSummary
from tidewheel.errors import InputError

GOOD = " ".join(f"word{chr(97 + number % 26)}{chr(97 + number // 26)}" for number in range(80))


def run(folder: Path, files: dict[str, str], **changes: Any) -> PipelineSummary:
    (folder / "in").mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / "in" / name).write_text(text)
    recipe = {"name": "small", "partitions": 1, "read": {"paths": ["*.jsonl"]}, "steps": [
        {"filter": {"gopher_quality": {"min_stop_words": 0}}}, "dedup_exact",
        {"tokenize": {"train": {"vocabulary_size": 300}}},
        {"pack": {"sequence_length": 16, "validation_fraction": 0}}], **changes}
    with without_ray():
        return pipeline.run(build(PipelineConfig, recipe), input=str(folder / "in"), output=str(folder / "out"))


def refused(folder: Path, files: dict[str, str], **changes: Any) -> str:
    with pytest.raises(InputError) as raised:
        run(folder, files, **changes)
    assert not (folder / "out/shards/manifest.json").exists()
    return str(raised.value)


@pytest.mark.parametrize("allowed", [0.05, 1])
def test_empty_files_are_reported(allowed, tmp_path):
    message = refused(tmp_path, {"a.jsonl": "", "b.jsonl": "\n"}, max_bad_fraction=allowed)
    assert "nothing was read: all 2 files are empty" in message or "2 cannot be used (empty_file 2)" in message
    assert "filter" not in message
    assert "loosen" not in message


def test_only_bad_records_are_reported(tmp_path):
    message = refused(tmp_path, {"a.jsonl": '{"content": "x"}\n{"content": "y"}\n{\n'}, max_bad_fraction=1)
    assert "no document is left: 3 records read; 3 cannot be used (missing_text 2, invalid_json 1)" in message
    assert "read.text" in message
    assert "loosen" not in message


def test_filters_that_drop_everything_are_reported(tmp_path):
    lines = [{"text": "too short"}, {"text": "this too"}, {"text": GOOD.replace("word", "1-")}]
    message = refused(tmp_path, {"a.jsonl": "".join(json.dumps(line) + "\n" for line in lines) + "{\n"},
                      max_bad_fraction=0.5)
    assert "4 records read; 1 cannot be used (invalid_json 1); filter dropped 3 (gopher_" in message
    assert "loosen filter, which drops most" in message


def test_a_training_set_without_rows_is_reported(tmp_path):
    steps = ["dedup_exact", {"tokenize": {"train": {"vocabulary_size": 300}}},
             {"pack": {"sequence_length": 16, "validation_fraction": 0.999999}}]
    message = refused(tmp_path, {"a.jsonl": json.dumps({"text": GOOD})}, steps=steps)
    assert "the training set has no row: all 1 documents went to the validation set" in message
    assert "validation_fraction" in message


def test_the_last_table_has_tokens_rows_utilisation_and_validation(tmp_path):
    done = run(tmp_path, {"a.jsonl": json.dumps({"text": GOOD})})
    training, validation = done.sets()
    assert training == {"set": "training", "documents": "1", "tokens": f"{done.tokens:,}",
                        "rows": f"{done.value['rows']:,}", "filled": f"{done.value['utilisation']:.1%}"}
    assert validation == {"set": "validation", "documents": "0", "tokens": "0", "rows": "0", "filled": "-"}


def test_the_most_frequent_of_several_reasons_are_listed():
    """The summary lists reasons, so that users need not search for them in a file."""
    dropped = {"too_few_words": 1262, "bullets": 1, "words_too_long": 10, "duplicate_lines": 10, "hashes": 1}
    stages = [{"name": "filter", "dropped": dropped}, {"name": "dedup_exact", "dropped": {"exact_duplicate": 57}},
              {"name": "pack", "dropped": {}}, {"name": "pii", "dropped": {"b": 1, "a": 1}}]
    assert PipelineSummary({"stages": stages}, "out").most_frequent_reasons() == [
        "filter dropped most for too_few_words 1,262, duplicate_lines 10, words_too_long 10 and 2 other reasons",
        "pii dropped most for a 1, b 1"]
