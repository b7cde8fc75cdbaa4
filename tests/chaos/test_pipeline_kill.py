"""SIGKILL at any moment, run again: the shard set is that of an undisturbed run, to the byte. Filters of the user's own
are among what is killed; workers find them where the driver does.

Most runs do without Ray, the same functions in one process: they start in a moment, and what a kill may hurt, the
units on storage, is the same. One kill, and the end, are of a Ray with all its processes. More kills:
`python -m tests.benchmarks.chaos`.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest

from tests.benchmarks.driver import Driver, set_hashes
from tests.own_parts import write_filters
from tidewheel.data.pipeline import LEASES
from tidewheel.lease import holding
from tidewheel.shards.verify import verify
from tidewheel.storage import store

pytestmark = pytest.mark.chaos

KILLS = 3
ON_RAY = (1,)  # which of them
SEED = 20
RECIPE = {
    "name": "chaos", "partitions": 3, "read": {"paths": ["*.jsonl"]},
    "steps": ["dedup_exact", {"dedup_near": {}}, {"filter": {
        "gopher_quality": {"min_stop_words": 1}, "pii": {}, "own_filters:Opens": {"letter": "t"},
        "python": "own_filters:odd_words"}},
              {"tokenize": {"train": {"vocabulary_size": 500, "sample_bytes": 100_000}}},
              {"pack": {"sequence_length": 64, "validation_fraction": 0.1, "rows_per_shard": 32}}],
}


def corpus(folder: Path) -> None:
    generator = random.Random(1)
    vocabulary = ["the", "of", "and", "to", *("".join(generator.choices("abcdeinorst", k=6)) for _ in range(500))]
    texts = [" ".join(generator.choices(vocabulary, k=generator.randint(60, 300))) for _ in range(300)]
    address = "write to d{}@host.org | of it"
    texts = [f"{text} {address.format(place)}" if place % 3 == 0 else text for place, text in enumerate(texts)]
    texts += texts[:40] + [f"{text} altered" for text in texts[40:80]]
    folder.mkdir()
    for number in range(6):
        records = [{"id": f"d{place}", "text": text} for place, text in enumerate(texts) if place % 6 == number]
        lines = [json.dumps(record) for record in records]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))


@pytest.mark.timeout(600)
def test_killed_three_times_the_bytes_are_those_of_a_quiet_run(tmp_path):
    corpus(tmp_path / "in")
    write_filters(tmp_path / "code")
    input, output, code = str(tmp_path / "in"), tmp_path / "killed", ("--code", str(tmp_path / "code"))
    quiet = Driver(RECIPE, input, str(tmp_path / "quiet"), "--plain", *code)
    assert quiet.wait(120)
    assert quiet.process.returncode == 0
    way = quiet.told()
    quiet.close()
    summary = json.loads((tmp_path / "quiet" / "summary.json").read_text())
    dropped = {stage["name"]: sum(stage["dropped"].values()) for stage in summary["stages"]}
    assert dropped["dedup_exact"] == 40
    assert dropped["dedup_near"] == 40
    assert 0 < dropped["filter"] < 150
    reasons = next(stage for stage in summary["stages"] if stage["name"] == "filter")
    assert {"opens", "sevens"} <= set(reasons["dropped"])
    assert "cut_behind_mark" in reasons["edits"]
    assert next(stage["edited"] for stage in summary["stages"] if stage["name"] == "filter") > 50
    assert summary["documents"] + summary["validation"]["documents"] == 300 - dropped["filter"]
    assert verify(str(tmp_path / "quiet" / "shards")) == []

    generator = random.Random(SEED)
    # each run goes on where the one before was killed, so the moments are taken in the order of the way; not the last
    # ones, from which it is too near to the end
    moments = sorted(generator.sample(range(1, len(way) - 4), KILLS))
    for number, moment in enumerate(moments):
        driver = Driver(RECIPE, input, str(output), *(["--cpus", "2"] if number in ON_RAY else ["--plain"]), *code)
        while driver.process.poll() is None and max((way.index(line) for line in driver.told()), default=-1) < moment:
            time.sleep(0.002)
        time.sleep(generator.random() * (0.3 if number in ON_RAY else 0.03))
        assert driver.process.poll() is None, "it ended before it could be killed"
        driver.kill()
        assert not (output / "summary.json").exists()
    Driver(RECIPE, input, str(output), "--cpus", "2", *code).watch()
    assert set_hashes(str(output)) == set_hashes(str(tmp_path / "quiet"))
    assert verify(str(output / "shards")) == []
    assert not list(output.rglob(".tmp-*"))


@pytest.mark.timeout(300)
def test_a_second_pipeline_on_one_output_is_told_who_writes(tmp_path):
    corpus(tmp_path / "in")
    output = tmp_path / "out"
    write_filters(tmp_path / "code")
    with holding(store(output).child(LEASES), "pipeline", "another pipeline is writing to this output"):
        refused = Driver(RECIPE, str(tmp_path / "in"), str(output), "--plain", "--code", str(tmp_path / "code"))
        assert refused.wait(120)
        with pytest.raises(RuntimeError, match=rf"another pipeline is writing to this output: process {os.getpid()}"):
            refused.watch()
    assert not (output / "shards" / "manifest.json").exists()
