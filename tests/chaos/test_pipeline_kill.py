"""A pipeline that is SIGKILLed at any moment and run again writes the same bytes as an undisturbed run.

The pipeline has the user's own filters, which its workers load from the driver's folder. Most runs call the same
functions in one process without Ray: they start quickly, and a kill can damage the same units in storage. One killed
run and the last run use Ray with all its processes. `python -m tests.benchmarks.chaos` kills more often.
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
ON_RAY = (1,)  # indices of the kills on Ray
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
    texts = [f"{text} {address.format(index)}" if index % 3 == 0 else text for index, text in enumerate(texts)]
    texts += texts[:40] + [f"{text} altered" for text in texts[40:80]]
    folder.mkdir()
    for file in range(6):
        records = [{"id": f"d{index}", "text": text} for index, text in enumerate(texts) if index % 6 == file]
        lines = [json.dumps(record) for record in records]
        (folder / f"{file}.jsonl").write_text("\n".join(lines))


@pytest.mark.long  # `cluster/data/test_pipeline.py` kills workers, and `cluster/test_stops.py` the driver
def test_a_pipeline_killed_three_times_writes_the_bytes_of_an_undisturbed_run(tmp_path):
    corpus(tmp_path / "in")
    write_filters(tmp_path / "code")
    input, output, code = str(tmp_path / "in"), tmp_path / "killed", ("--code", str(tmp_path / "code"))
    quiet = Driver(RECIPE, input, str(tmp_path / "quiet"), "--plain", *code)
    assert quiet.wait(600)
    assert quiet.process.returncode == 0
    progress = quiet.lines()
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
    # each run continues where the one before was killed, so the moments are sorted; the last ones are too near the end
    moments = sorted(generator.sample(range(1, len(progress) - 4), KILLS))
    for kill, moment in enumerate(moments):
        # on a busy machine the run may be near its end before this process sees the moment: it waits there
        driver = Driver(RECIPE, input, str(output), *(["--cpus", "2"] if kill in ON_RAY else ["--plain"]), *code,
                        "--hold", progress[-2])
        while driver.process.poll() is None and max(map(progress.index, driver.lines()), default=-1) < moment:
            time.sleep(0.002)
        time.sleep(generator.random() * (0.3 if kill in ON_RAY else 0.03))
        assert driver.process.poll() is None, "the run ended before it could be killed"
        driver.kill()
        assert not (output / "summary.json").exists()
    Driver(RECIPE, input, str(output), "--cpus", "2", *code).watch()
    assert set_hashes(str(output)) == set_hashes(str(tmp_path / "quiet"))
    assert verify(str(output / "shards")) == []
    left = [path for path in output.rglob(".tmp-*") if LEASES not in path.parts]  # a kill may hit a lease's renewal
    assert not left


def test_a_second_pipeline_on_one_output_is_refused_and_names_the_writer(tmp_path):
    corpus(tmp_path / "in")
    output = tmp_path / "out"
    write_filters(tmp_path / "code")
    with holding(store(output).child(LEASES), "pipeline", "another pipeline is writing to this output"):
        refused = Driver(RECIPE, str(tmp_path / "in"), str(output), "--plain", "--code", str(tmp_path / "code"))
        assert refused.wait(600)
        with pytest.raises(RuntimeError, match=rf"another pipeline is writing to this output: process {os.getpid()}"):
            refused.watch()
    assert not (output / "shards" / "manifest.json").exists()
