"""Stage `tokenizer`: train a tokenizer on a sample of the remaining documents, or copy the given file; one unit."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from tidewheel.data import verdicts
from tidewheel.data.config import TokenizeStep
from tidewheel.data.stage import Published, Unit, unit_key
from tidewheel.data.stages.execute import Finished, Runner, Task, map_units
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.partition import Part, load_documents
from tidewheel.data.tokenize.tokenizer import train_bpe
from tidewheel.storage import Store, content_hash
from tidewheel.versions import Version

STAGE = "tokenizer"
VERSION = Version("train_tokenizer")


def run(job: Job, runner: Runner, parts: list[Part]) -> Finished:
    """Publish the unit with the file `tokenizer`.

    Args:
        job: what the stage works on.
        runner: completes the unit.
        parts: partitions after the stage before.
    """
    step: TokenizeStep = job.config.step("tokenize")
    if step.train is None:
        key = unit_key(STAGE, settings="given", version=None, inputs=[content_hash(job.tokenizer)])
        given = Task(job.output, Unit(STAGE, "tokenizer.json", key))
        return runner.complete(STAGE, [given], functools.partial(_copy, job.tokenizer))
    contents = [identity for part in parts for identity in part.content()]
    key = unit_key(STAGE, settings=step.train.decisive(), version=VERSION, inputs=contents)
    task = Task(job.output, Unit(STAGE, "tokenizer.json", key),
                {**step.train.canonical(), "parts": [part.inputs() for part in parts]})
    return runner.complete(STAGE, [task], lambda missing: map_units(missing, train),
                           note=f"training, {step.train.vocabulary_size} tokens")


def _copy(data: bytes, missing: list[Task]) -> Iterator[Published]:
    for task in missing:
        writer = task.writer()
        writer.file("tokenizer", data)
        yield writer.publish({})


def train(task: Task) -> Published:
    """Train a tokenizer on the sample and publish it."""
    counted = {"documents": 0, "bytes": 0}
    data = train_bpe(_sample(task.store, task.inputs, counted), task.inputs["vocabulary_size"],
                     task.inputs["special_tokens"])
    writer = task.writer()
    writer.file("tokenizer", data)
    return writer.publish({"sample": counted})


def _sample(output: Store, inputs: Mapping[str, Any], counted: dict[str, int]) -> Iterator[str]:
    """Yield texts in order of the hash of their id until the sample is large enough; count them in `counted`.

    Partitions are ranges of that hash, so the first partitions have the sample.
    """
    for part in inputs["parts"]:
        if counted["bytes"] >= inputs["sample_bytes"]:
            return
        tables = list(load_documents(output, part))
        if not tables:
            continue
        table = pa.concat_tables(tables)
        order = verdicts.hash_ids(table["id"]).argsort(kind="stable")
        for row in order.tolist():
            if counted["bytes"] >= inputs["sample_bytes"]:
                return
            text = table["text"][row].as_py()
            counted["documents"] += 1
            counted["bytes"] += len(text.encode())
            yield text
