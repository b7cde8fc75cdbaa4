"""A pipeline and a training side by side, in this process; `tests/cluster/test_overlap.py` has the same on Ray."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import tidewheel as tw
from tests.plain_execution import without_ray
from tidewheel import jsonlog
from tidewheel.checkpoint.digest import digest
from tidewheel.config import build
from tidewheel.demo.corpus import build_corpus
from tidewheel.elastic.trainer import fit_local
from tidewheel.lease import Holder, Leases
from tidewheel.shards import growing
from tidewheel.shards.manifest import read_manifest
from tidewheel.storage import store
from tidewheel.train.audit import audit
from tidewheel.train.config import TrainConfig
from tidewheel.workflow import workflow
from tidewheel.workflow.graph import Node
from tidewheel.workflow.launch import RayLauncher, execute
from tidewheel.workflow.records import Records
from tidewheel.workflow.schedule import Schedule

STEPS, SEQUENCES = 60, 16


class Here(RayLauncher):
    """Runs every step in this process."""

    def launch(self, node: Node, max_workers: int | None) -> dict[str, Any]:
        return execute(self.task(node, max_workers), self._output, node.id)

    def places(self, node: Node, *, spare_cpus: float = 0) -> int | None:
        return None


def overlapped(folder: Any, launcher: type[RayLauncher]) -> None:
    """Run both, the second and third wave held back until the training has come so far; then compare with the same
    training on the finished set."""
    build_corpus(store(folder / "raw"), max_bytes=300_000)
    corpus = (tw.Pipeline("web").set(partitions=4).read("corpus/*.jsonl").dedup_exact()
              .tokenize(train={"vocabulary_size": 512, "sample_bytes": 100_000})
              .pack(sequence_length=128, validation_fraction=0.1, waves=3))
    training = tw.Train({
        "run": {"id": "first"}, "model": {"dim": 32, "num_layers": 1, "num_heads": 2}, "reproducible": True,
        "evaluation": {"sample_tokens": 0, "sequences": 4, "every_steps": 20}, "steps": STEPS,
        "batch": {"global_sequences": SEQUENCES, "micro_sequences": 4, "virtual_ranks": 2}}, data=corpus, overlap=True)
    output = str(folder / "out")
    nodes = workflow.nodes_of(tw.Workflow("both", training).spec(output, str(folder / "raw")))
    web, run = (store(node.place) for node in nodes)
    publish, before = growing.publish, list[int]()

    def held(place: Any, known: growing.Growing, shards: Any) -> growing.Growing:
        """Wave 1 waits for the training's first step, wave 2 for the first that reads wave 1."""
        waves, until = known.manifest.waves, time.monotonic() + 150
        read = sum(shard.rows for shard in known.manifest.shards[:waves[0]]) if len(waves) > 1 else 0
        while waves and time.monotonic() < until:
            last = max((line["step"] for line in jsonlog.read(run, "batches.jsonl")), default=0)
            if last * SEQUENCES > read:
                before.append(last)
                break
            time.sleep(0.1)
        return publish(place, known, shards)

    records = Records(output)
    leases = Leases(records.store.child("leases"), Holder.me())
    with patch.object(growing, "publish", held):
        done = Schedule(nodes, records, leases, launcher(nodes, input=str(folder / "raw"), output=output),
                        say=lambda text: None).run()
    assert len(before) == 2, "the training was not at work while the pipeline was"
    assert done["first"].artifact["steps"] == STEPS
    manifest = read_manifest(web.child("shards"))
    assert manifest.rows < STEPS * SEQUENCES, "the training does not come to the last wave"
    assert [line["hash"] for line in jsonlog.read(run, "waves.jsonl")] == list(growing.Growing.of(manifest).hashes[1:])
    seen = audit(run.uri)
    assert seen.ok, seen.summary()

    alone = build(TrainConfig, run.read_json("run.json")["config"], ["run.id=alone", "data.wait_seconds=0"])
    result = fit_local(alone)  # one after the other
    assert result.validation_loss == done["first"].artifact["validation_loss"]
    assert digest(alone.run_uri).state == done["first"].artifact["state"]
    assert [line["digest"] for line in jsonlog.read(store(alone.run_uri), "batches.jsonl")] == [
        line["digest"] for line in jsonlog.read(run, "batches.jsonl")]


def test_training_begins_with_the_first_wave(tmp_path):
    with without_ray(), patch("tidewheel.elastic.trainer.fit", fit_local):
        overlapped(tmp_path, Here)
