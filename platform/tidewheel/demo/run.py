"""`tidewheel demo`: raw text to a trained model on a cluster that loses a node on the way. Reads top to bottom."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tidewheel import storage
from tidewheel.config import load
from tidewheel.console import console, print_table
from tidewheel.data.config import PipelineConfig
from tidewheel.demo import posttraining
from tidewheel.demo.recipes import recipe
from tidewheel.train.config import TrainConfig

logger = logging.getLogger(__name__)

BUCKET = "tidewheel-demo"
NODES = 2


def run_demo(*, output: str, storage: str = "folder", steps: int | None = None, disturb: bool = True,
             posttrain: bool = False) -> int:
    """Run every step and print the path of the report. Return exit code 0 only if the audit found every sequence.

    Args:
        output: folder for what is written (with storage "s3": for the report).
        storage: "folder", or "s3" for an S3-protocol server on loopback.
        steps: optimizer steps, or as the configuration says.
        disturb: kill a node at 40 %, and add one later.
        posttrain: fine-tune the model on conversations, and then on preferences.
    """
    began = time.monotonic()
    local = _folder(output)
    with _storage_root(storage, local) as root:
        pipeline = load(PipelineConfig, recipe("pipelines/demo.yaml"))
        overrides = [f"run.uri={root}/runs", f"run.id=demo-{time.strftime('%Y%m%d-%H%M%S')}",
                     f"data.uri={root}/data/shards", f"data.validation={root}/data/validation"]
        overrides += [f"steps={steps}"] if steps is not None else []
        training = load(TrainConfig, recipe("jobs/configs/demo.yaml"), overrides)
        logger.info("the demo writes to %s", root)
        _corpus(f"{root}/raw")
        tuned = _on_cluster(pipeline, training, root, disturb, posttrain, steps)
        _heading(f"{5 if tuned is None else 6}. What came out")
        ok = _result(training.run_uri, f"{root}/data")
        report = _report(training.run_uri, f"{root}/data", local)
        if tuned is not None:
            console.print(f"report of the base model: {report}", markup=False)
            ok = _posttrained(tuned) and ok
            report = posttraining.write_report(tuned, local)
    console.print(f"\n[dim]{time.monotonic() - began:.0f} s in all[/]")
    print(report)
    return 0 if ok else 1


def _heading(text: str) -> None:
    console.print(f"\n[bold]{text}[/]")


def _folder(output: str) -> Path:
    output_store = storage.store(output)
    output_store.check()
    return Path(output_store.uri)


@contextlib.contextmanager
def _storage_root(kind: str, local: Path) -> Iterator[str]:
    """Yield the URI to write to; for "s3", run a server on loopback during the block."""
    if kind == "folder":
        yield str(local)
        return
    from tidewheel.cluster.s3_server import S3Server

    with S3Server() as server:
        console.print(f"S3-protocol server at {server.endpoint}")
        yield server.create_bucket(BUCKET)


def _corpus(uri: str) -> None:
    from tidewheel.demo.corpus import build_corpus

    _heading("1. Raw text from this machine's Python")
    with console.status("collecting docstrings, readmes and licences"):
        info = build_corpus(storage.store(uri))
    sources = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sorted(info.sources.items()))
    console.print(f"{info.documents:,} documents, {info.bytes / 1e6:.1f} MB, in {len(info.files)} JSONL files")
    console.print(f"  from {sources}")
    console.print(f"planted: {len(info.planted)} contaminated documents, {info.bad_records} broken records")


def _on_cluster(pipeline: PipelineConfig, training: TrainConfig, root: str, disturb: bool, posttrain: bool,
                steps: int | None) -> posttraining.Tuned | None:
    """Start a cluster, run the pipeline and the trainings on it, and always stop it."""
    from tidewheel.cluster.local import LocalCluster
    from tidewheel.cluster.session import session

    _heading(f"2. A Ray cluster on this machine: a head and {NODES} nodes")
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        with console.status("starting raylets"):
            cluster = stack.enter_context(LocalCluster(nodes=NODES))
            stack.enter_context(session(cluster.address))
        console.print(f"up at {cluster.address} after {time.monotonic() - began:.1f} s")
        _pipeline(pipeline, root)
        _training(training, cluster, disturb)
        if not posttrain:
            return None
        _heading("5. Fine-tuning on conversations, and then on preferences")
        return posttraining.post_train(training, root, steps=steps)


def _pipeline(config: PipelineConfig, root: str) -> None:
    from tidewheel.data import pipeline
    from tidewheel.data.progress import stage_bars

    _heading("3. The data pipeline: documents in, packed shards out")
    with stage_bars(pipeline.stages(config)) as on_progress:
        summary = pipeline.run(config, input=f"{root}/raw", output=f"{root}/data", on_progress=on_progress,
                               may_replace=True)
    print_table(summary.rows(), to=console)


def _training(config: TrainConfig, cluster: Any, disturb: bool) -> None:
    from tidewheel.demo.disturbance import Disturbance
    from tidewheel.elastic.trainer import fit
    from tidewheel.train.progress import training_bar

    _heading(f"4. Training on {NODES} nodes" + (": one is killed at 40 %, one joins later" if disturb else ""))
    disturbance = Disturbance(cluster, config.steps)
    with training_bar(config.steps) as show:

        def on_progress(progress: dict[str, Any]) -> None:
            show(progress)
            if disturb:
                disturbance.on_progress(progress)

        fit(config, on_progress=on_progress)
    disturbance.finish()


def _result(run: str, data: str) -> bool:
    """Print the results; return whether the audit is clean."""
    from tidewheel.jsonlog import read
    from tidewheel.train.audit import audit

    result = storage.store(run).read_json("result.json")
    entropy = storage.store(data).read_json("summary.json")["ngram_entropy"]
    console.print(f"validation loss {result['validation_loss']:.3f} nats/token; the same split's entropy: unigram "
                  f"{entropy['unigram']:.3f}, bigram {entropy['bigram']:.3f}; models counted on the training split: "
                  f"unigram {entropy['unigram_model']:.3f}, bigram {entropy['bigram_model']:.3f}")
    sizes = [event["detail"].get("world_size") for event in read(storage.store(run), "events.jsonl")
             if event["kind"] in ("start", "resume")]
    console.print(f"world sizes: {' -> '.join(str(size) for size in sizes if size)}")
    audited = audit(run)
    console.print(f"audit: {audited.summary()}", markup=False)
    console.print(f"sample: {result.get('sample', '')!r}", markup=False)
    return audited.ok


def _posttrained(tuned: posttraining.Tuned) -> bool:
    """Print the answers before and after; return whether the audits are clean."""
    from tidewheel.train.audit import audit

    posttraining.show(tuned)
    audits = {"SFT": audit(tuned.sft), "DPO": audit(tuned.dpo)}
    for name, audited in audits.items():
        console.print(f"audit of {name}: {audited.summary()}", markup=False)
    return all(audited.ok for audited in audits.values())


def _report(run: str, data: str, local: Path) -> str:
    """Return the report's path on this machine. Copy it from a server that ends with the demo."""
    from tidewheel.report.run import write_run_report

    where = write_run_report(run, data)
    if not storage.is_remote(where):
        return where
    storage.LocalStore(local).write("report.html", storage.store(run).read("report.html"))
    return str(local / "report.html")
