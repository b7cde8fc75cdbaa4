"""The `tidewheel` command.

Exit codes: 0 done; 1 a fault of ours, with a stack trace; 2 something for you to mend, with a message that says
what, where and how; 130 interrupted. Heavy imports happen inside the commands, so that help answers at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import cyclopts
from cyclopts import Parameter

import tidewheel
from tidewheel.cluster import commands as clusters
from tidewheel.console import console, print_table
from tidewheel.errors import ConfigError, ShardError, TidewheelError, root_cause

app = cyclopts.App(
    name="tidewheel",
    help="Raw text in, a trained language model out, on a Ray cluster that may grow and shrink underneath.",
    version=tidewheel.__version__,
    help_epilogue="First time here? `tidewheel demo` shows everything on this machine in a few minutes, "
                  "`tidewheel doctor` checks it first.",
)
data_app = cyclopts.App(name="data", help="Clean, deduplicate, tokenize and pack documents into shards.")
shards_app = cyclopts.App(name="shards", help="Look into packed shards and check them.")
checkpoint_app = cyclopts.App(name="checkpoint", help="List the checkpoints of a run and check them.")
plan_app = cyclopts.App(name="plan", help="What a run would cost before it is started.")
k8s_app = cyclopts.App(name="k8s", help="Kubernetes manifests of a cluster or a job: put together and checked.")
for sub in (data_app, shards_app, checkpoint_app, plan_app, k8s_app, clusters.cluster_app, clusters.job_app):
    app.command(sub)
app.command(clusters.submit)

Overrides = Annotated[
    list[str] | None,
    Parameter(name=["--set", "-s"], negative="", consume_multiple=False,
              help="Change one setting: key=value, the key dotted, the value in YAML. May be given again."),
]
Address = Annotated[
    str | None,
    Parameter(help="Ray cluster to use: auto, host:port. Without it RAY_ADDRESS counts, else this machine alone."),
]
DryRun = Annotated[bool, Parameter(negative="", help="Show what would happen, then stop. Starts and writes nothing.")]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON instead of a table.")]


@data_app.command(name="run")
def data_run(
    config: Annotated[str, Parameter(help="Pipeline definition, a YAML file; pipelines/ has examples.")],
    *,
    input: Annotated[str, Parameter(help="Folder or s3://bucket/prefix that relative paths in the pipeline are "
                                         "below.")] = ".",
    output: Annotated[str, Parameter(help="Folder or s3://bucket/prefix to write shards, verdicts, quarantine and "
                                          "the report to. Run again with the same one to resume.")],
    set_: Overrides = None,
    address: Address = None,
    fail_above: Annotated[float | None, Parameter(help="Fail when a larger share of the documents than this contains "
                                                       "evaluation items; instead of the recipe's own.")] = None,
    dry_run: DryRun = False,
) -> int:
    """Run a data pipeline: documents in, packed shards out.

    What is published and intact from an earlier run is not computed again; a killed run is resumed by giving the
    same command again, and ends with the same bytes.
    """
    from tidewheel.config import load
    from tidewheel.data.config import PipelineConfig

    settings = load(PipelineConfig, config, set_ or ())  # a wrong key is told at once, before the heavy imports
    from tidewheel.data import pipeline

    if fail_above is not None and not 0 <= fail_above <= 1:
        raise ConfigError(f"a share is from 0 to 1, got {fail_above:g}", where="--fail-above", mend="0.001 for 0.1 %")
    if fail_above is not None and settings.step("decontaminate") is None:
        raise ConfigError("the pipeline has no decontaminate step", where="--fail-above",
                          mend="add the step to the recipe, with the evals to look for")
    if dry_run:
        print_table(pipeline.plan(settings, input=input, output=output).rows(), title="what would run")
        return 0
    pipeline.check(settings, input=input, output=output)  # before a cluster is started for it
    from tidewheel.cluster.session import session
    from tidewheel.data.progress import stage_bars
    from tidewheel.report.pipeline import write_pipeline_report

    with session(address), stage_bars() as on_progress:
        summary = pipeline.run(settings, input=input, output=output, on_progress=on_progress,
                               fail_above=fail_above)
    print_table(summary.rows(), title="what each stage kept")
    print(f"shards: {output}/shards")
    print(f"report: {write_pipeline_report(output)}")
    return 0


@data_app.command(name="train-classifier")
def data_train_classifier(
    positive: Annotated[str, Parameter(help="Documents as they are wanted: a file or a quoted pattern.")],
    negative: Annotated[str, Parameter(help="Documents as they come: a file or a quoted pattern.")],
    *,
    output: Annotated[str, Parameter(help="Where the model goes, a .bin file in fastText's format.")],
    text: Annotated[str, Parameter(help="Field with a document's text.")] = "text",
    keep: Annotated[float, Parameter(help="Share of documents like the second set that the threshold lets in.")] = 0.1,
    set_: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Train a quality classifier from two sets of documents and test it on a part of them that it has not seen.

    --set changes how it is trained: epochs, learning_rate, word_ngrams, dimension, buckets, min_count, held_out, seed.
    The same documents give the same bytes, in whatever files and order they come.
    """
    from dataclasses import asdict

    from tidewheel.config import build
    from tidewheel.data.filters.classifier_training import LABEL, TrainClassifier, read_texts
    from tidewheel.data.filters.classifier_training import train as train_classifier
    from tidewheel.storage import absolute, split

    settings = build(TrainClassifier, {"keep": keep}, set_ or (), where="train-classifier")
    place, name = split(output)
    sets = [read_texts(pattern, field=text) for pattern in (positive, negative)]
    trained = train_classifier(sets[0][0], sets[1][0], settings)
    place.write(name, trained.model)
    found = {"documents": [len(texts) for texts, _ in sets], "unusable": [bad for _, bad in sets],
             "in_both": trained.in_both, "trained_on": trained.trained, **asdict(trained.quality), "label": LABEL,
             "output": output}
    if as_json:
        print(json.dumps(found, indent=2))
        return 0
    for key, value in found.items():
        if key != "output":
            print(f"{key.replace('_', ' '):<16}{f'{value:.6f}' if isinstance(value, float) else value}")
    print(f"model: {output}")
    print(f"use it: - filter: {{classifier: {{file: {absolute(output)}, min_score: {trained.quality.threshold:.6f}}}}}")
    return 0


@data_app.command(name="train-tokenizer")
def data_train_tokenizer(
    inputs: Annotated[list[str], Parameter(help="Files of documents, or quoted patterns; s3://bucket/... too.")],
    *,
    vocabulary_size: Annotated[int, Parameter(help="Tokens, the 256 bytes and the special tokens included.")],
    output: Annotated[str, Parameter(help="Where the tokenizer.json goes.")],
    sample_bytes: Annotated[int, Parameter(help="Text to train on: documents in order of their content's hash, until "
                                                "so many bytes are there.")] = 100_000_000,
    text: Annotated[str, Parameter(help="Field with a document's text.")] = "text",
    special_token: Annotated[list[str] | None, Parameter(
        negative="", consume_multiple=False, help="A further special token, for chat templates. May be given "
                                                  "again.")] = None,
    as_json: AsJson = False,
) -> int:
    """Train a byte-level BPE tokenizer on a sample of documents.

    The same documents give the same bytes, in whatever files and order they come.
    """
    from tidewheel.data.tokenize.tokenizer_training import train_tokenizer
    from tidewheel.storage import split

    place, name = split(output)
    made = train_tokenizer(inputs, field=text, vocabulary_size=vocabulary_size, sample_bytes=sample_bytes,
                           special_tokens=special_token or ())
    place.write(name, made.tokenizer)
    found = {**made.figures(), "output": output}
    if as_json:
        print(json.dumps(found, indent=2))
        return 0
    print_table([{"what": key.replace("_", " "), "": f"{value:,}" if isinstance(value, int) else str(value)}
                 for key, value in found.items()], title="tokenizer trained")
    return 0


@app.command
def train(
    config: Annotated[str, Parameter(help="Training configuration, a YAML file; jobs/configs/ has examples.")],
    *,
    set_: Overrides = None,
    address: Address = None,
    local: Annotated[bool, Parameter(negative="", help="Train in this process, without Ray: for debugging.")] = False,
    dry_run: DryRun = False,
) -> int:
    """Train a model, or resume a run: the run URI decides which.

    Workers may die, drain and join while it runs; it goes on with what is there, in the same data order. SIGTERM
    lets it save and leave, with exit code 143.
    """
    from tidewheel.config import load
    from tidewheel.train.config import TrainConfig

    settings = load(TrainConfig, config, set_ or ())
    if dry_run:
        from tidewheel.train.plan import plan

        print_table(plan(settings), title="what would run")
        return 0
    from tidewheel.train.checks import read_data
    from tidewheel.train.metrics.weights_and_biases import check

    check(settings.metrics.wandb)
    read_data(settings)  # before a cluster is started for it
    if settings.model.init_from:
        from tidewheel.checkpoint.verify import locate

        locate(settings.model.init_from)
    from tidewheel.elastic.leave import EXIT_CODE, Stopped, leaving_on_sigterm
    from tidewheel.elastic.trainer import fit, fit_local
    from tidewheel.report.run import write_run_report
    from tidewheel.train.progress import training_bar

    with training_bar(settings.steps) as on_progress:
        if local:
            result = fit_local(settings, on_progress=on_progress)
        else:
            from tidewheel.cluster.session import session

            try:
                with session(address), leaving_on_sigterm(settings.run_uri):
                    result = fit(settings, on_progress=on_progress)
            except Stopped as stopped:
                print(f"{stopped}; give the same command again to go on")
                return EXIT_CODE
    loss = f", loss {result.loss:.4f}" if result.loss is not None else ""
    validation = f", validation loss {result.validation_loss:.4f}" if result.validation_loss is not None else ""
    print(f"{result.steps} steps, {result.tokens:,} tokens{loss}{validation}")
    print(f"report: {write_run_report(result.run_uri)}")
    return 0


@shards_app.command
def inspect(
    uri: Annotated[str, Parameter(help="A shard set: the folder that holds manifest.json.")],
    *,
    row: Annotated[int | None, Parameter(help="Show this row of the set: its documents and segments.")] = None,
) -> int:
    """What a shard set holds, as JSON."""
    from tidewheel.shards.verify import inspect as look

    print(json.dumps(look(uri, row=row), indent=2))
    return 0


@shards_app.command
def verify(uri: Annotated[str, Parameter(help="A shard set: the folder that holds manifest.json.")]) -> int:
    """Check every hash, row and segment of a shard set. Exit code 2 if anything is wrong."""
    from tidewheel.shards.verify import verify as check

    problems = check(uri)
    for problem in problems:
        print(problem)
    if problems:
        raise ShardError(f"{len(problems)} problem(s), listed above", where=uri,
                         mend="run the pipeline again with the same output: what is damaged is written anew")
    print(f"{uri}: intact")
    return 0


@shards_app.command
def trace(
    uri: Annotated[str | None, Parameter(help="A shard set; with --run, where the run's set is now.")] = None,
    *,
    row: Annotated[int | None, Parameter(help="Row of the set, from 0; with --token.")] = None,
    token: Annotated[int | None, Parameter(help="Token of the row, from 0: where it came from.")] = None,
    document: Annotated[str | None, Parameter(help="Id of a document: rows that hold it, or why it was dropped; "
                                                   "with --run also the steps that used it.")] = None,
    run: Annotated[str | None, Parameter(help="URI of a run.")] = None,
    step: Annotated[int | None, Parameter(help="Step of the run, from 1: what it read.")] = None,
    batch_row: Annotated[int | None, Parameter(help="Sequence of the step's global batch, from 0.")] = None,
    as_json: AsJson = False,
) -> int:
    """Lineage both ways: from a token or a step to documents and files, from a document to rows and steps."""
    from tidewheel.shards import trace as of_set
    from tidewheel.train import trace as of_run

    options = {"uri": uri, "row": row, "token": token, "document": document, "run": run, "step": step,
               "batch_row": batch_row}
    given = {name for name, value in options.items() if value is not None}
    if run is not None and step is not None and given <= {"uri", "run", "step", "batch_row", "token"}:
        found = of_run.trace_step(run, step, batch_row=batch_row, token=token, uri=uri)
        lines = of_run.step_lines(found)
    elif run is not None and document is not None and given <= {"uri", "run", "document"}:
        found = of_run.trace_document_steps(run, document, uri=uri)
        lines = of_run.document_step_lines(found)
    elif uri is not None and document is not None and given == {"uri", "document"}:
        found = of_set.trace_document(uri, document)
        lines = of_set.document_lines(found)
    elif uri is not None and row is not None and token is not None and given == {"uri", "row", "token"}:
        found = of_set.trace_token(uri, row, token)
        lines = of_set.token_lines(found)
    else:
        raise ShardError("these options do not say what to trace", where="tidewheel shards trace",
                         mend="give SET --row N --token N, SET --document ID, --run RUN --step N [--batch-row N "
                              "[--token N]], or --run RUN --document ID")
    print(json.dumps(found, indent=2) if as_json else "\n".join(lines))
    return 0


@checkpoint_app.command(name="list")
def checkpoint_list(run: Annotated[str, Parameter(help="URI of a run.")], *, as_json: AsJson = False) -> int:
    """The checkpoints of a run, oldest first; partial ones are marked."""
    from tidewheel.checkpoint.verify import list_checkpoints
    from tidewheel.storage import store

    rows = [{"checkpoint": found.name, "step": found.step, "state": "complete" if found.complete else "partial",
             "MB": round(found.bytes / 1e6, 2), "world size": found.world_size}
            for found in list_checkpoints(store(run).child("checkpoints"))]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print_table(rows, title=f"checkpoints of {run}")
    return 0


@checkpoint_app.command(name="verify")
def checkpoint_verify(
    run: Annotated[str, Parameter(help="URI of a run.")],
    *,
    name: Annotated[str | None, Parameter(help="One checkpoint, such as step_00000100; all by default.")] = None,
) -> int:
    """Read every file of the checkpoints and compare hashes. Exit code 2 if one is damaged."""
    from tidewheel.checkpoint.verify import list_checkpoints, verify_checkpoint
    from tidewheel.errors import CheckpointError
    from tidewheel.storage import store

    place = store(run).child("checkpoints")
    names = [name] if name else [found.name for found in list_checkpoints(place)]
    if not names:
        raise CheckpointError("no checkpoints", where=run, mend="give the URI of a run, as in --set run.uri=...")
    problems = {each: verify_checkpoint(place, each) for each in names}
    print("\n".join(f"{each}: {'; '.join(found) or 'intact'}" for each, found in problems.items()))
    if damaged := sum(map(bool, problems.values())):
        raise CheckpointError(f"{damaged} of {len(names)} checkpoints are damaged", where=run,
                              mend="training passes over damaged ones and resumes from the newest intact one")
    return 0


@checkpoint_app.command(name="digest")
def checkpoint_digest(
    source: Annotated[str, Parameter(help="URI of a run (its newest complete checkpoint), or of one checkpoint, "
                                          "RUN/checkpoints/step_00000100.")],
    *,
    as_json: AsJson = False,
) -> int:
    """SHA-256 of a checkpoint's tensors, the same for the same bits whatever layout and number of workers wrote it."""
    from dataclasses import asdict

    from tidewheel.checkpoint.digest import digest

    found = digest(source)
    if as_json:
        print(json.dumps(asdict(found), indent=2))
        return 0
    print(f"{found.checkpoint}: step {found.step}")
    for name, value in {**found.groups, "state": found.state}.items():
        print(f"{name:<10} {value}")
    return 0


@checkpoint_app.command(name="export")
def checkpoint_export(
    source: Annotated[str, Parameter(help="URI of a run (its newest intact checkpoint), or of one checkpoint, "
                                          "RUN/checkpoints/step_00000100.")],
    out: Annotated[str, Parameter(help="Folder or s3://bucket/prefix to write.")],
    *,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Parameter(help="Of the weights written.")] = "float32",
    tokenizer: Annotated[str, Parameter(help="A tokenizer.json; by default that of the run's shard set.")] = "",
) -> int:
    """Write a checkpoint as a Hugging Face folder that AutoModelForCausalLM.from_pretrained loads."""
    from tidewheel.checkpoint.exchange import export

    done = export(source, out, dtype=dtype, tokenizer=tokenizer)
    beside = "with its tokenizer" if done.tokenizer else "without a tokenizer: give one with --tokenizer"
    print(f"{done.place}: {done.parameters:,} parameters, vocabulary {done.vocabulary_size:,}, {beside}")
    return 0


@checkpoint_app.command(name="import")
def checkpoint_import(
    folder: Annotated[str, Parameter(help="A Llama or Qwen 3 model as save_pretrained writes it, in safetensors.")],
    uri: Annotated[str, Parameter(help="Where the checkpoint goes, a new folder or s3://bucket/prefix.")],
    *,
    vocabulary_size: Annotated[int | None, Parameter(help="Pad the vocabulary to so many tokens, that of the shard "
                                                          "set to train on.")] = None,
) -> int:
    """Turn a Hugging Face model into a checkpoint that training can start from, and print the settings for it."""
    from tidewheel.checkpoint.exchange import import_

    print(import_(folder, uri, vocabulary_size=vocabulary_size).settings(), end="")
    return 0


@plan_app.default
def plan_layouts(
    config: Annotated[str, Parameter(help="Training configuration, a YAML file; jobs/configs/ has examples.")],
    *,
    gpus: Annotated[int, Parameter(help="GPUs, one worker on each.")],
    gpu: Annotated[str, Parameter(help="h100, h200, a100, b200 or l40s.")] = "h100",
    nodes_of: Annotated[int, Parameter(help="GPUs of a node.")] = 8,
    sequence_length: Annotated[int | None, Parameter(help="Tokens of a sequence; by default the shard set's.")] = None,
    vocabulary_size: Annotated[int | None, Parameter(help="By default the configuration's or the shard set's.")] = None,
    set_: Overrides = None,
    assume: Annotated[list[str] | None, Parameter(negative="", consume_multiple=False, help="Change what is assumed of "
                      "the cluster, such as network_gbytes=25, price_per_gpu_hour=2.5 or failures.rate=llama3; "
                      "docs/planning.md lists them. May be given again.")] = None,
    top: Annotated[int, Parameter(help="Layouts to show.")] = 16,
    as_json: AsJson = False,
) -> int:
    """Layouts of a model on a cluster, ranked by the time of a step: memory, MFU, communication; goodput and cost.

    Nothing is started and no GPU is needed: docs/planning.md has the formulas. Exit code 2 when nothing fits.
    """
    from tidewheel.config import build, load
    from tidewheel.plan.hardware import ClusterConfig
    from tidewheel.train.config import TrainConfig

    settings = load(TrainConfig, config, set_ or ())
    cluster = build(ClusterConfig, {"gpus": gpus, "gpu": gpu, "nodes_of": nodes_of}, assume or (), where="--assume")
    from tidewheel.plan import tables
    from tidewheel.plan.layouts import rank
    from tidewheel.plan.summary import summary

    job, notes = tables.job_of(settings, vocabulary_size, sequence_length)
    found = rank(job, cluster)
    first = found.fitting[0] if found.fitting else None
    whole = summary(job, first, cluster) if first else None
    if as_json:
        print(json.dumps(tables.as_json(job, cluster, found, whole), indent=2))
    else:
        tables.show(job, cluster, found, whole, notes=notes, top=top)
    return 0 if first else 2


@plan_app.command(name="goodput")
def plan_goodput(
    config: Annotated[str | None, Parameter(help="A YAML file with the sizes, intervals and constants; the defaults "
                                                 "without it.")] = None,
    *,
    set_: Overrides = None,
    plot: Annotated[str, Parameter(help="Also draw it into this SVG file.")] = "",
    run: Annotated[list[str] | None, Parameter(name="--run", negative="", consume_multiple=False, help="URI of a real "
                   "run with failures; given twice or more, each is predicted with the others' constants.")] = None,
    as_json: AsJson = False,
) -> int:
    """Share of the time that is not lost to failures, by size of the run, interval of checkpoints, way to recover.

    A simulation of the failures and recoveries of long runs; docs/goodput.md says what it assumes. With --run: how
    near its prediction comes to real runs.
    """
    from dataclasses import asdict

    from tidewheel.config import build, load
    from tidewheel.plan.config import GoodputConfig

    settings = load(GoodputConfig, config, set_ or ()) if config else build(GoodputConfig, {}, set_ or ())
    if run:
        from tidewheel.plan.validation import predicted_beside_measured

        lines = predicted_beside_measured(run)
        print(json.dumps(lines, indent=2)) if as_json else print_table(lines, title="goodput of real runs")
        return 0
    from tidewheel.plan import recovery

    rows = recovery.table(settings)
    if plot:
        from tidewheel.plan.plots import lost_figure
        from tidewheel.storage import split

        place, name = split(plot)
        place.write(name, lost_figure(rows).encode())
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    print_table([{
        "GPUs": f"{row.gpus:,}", "failure every": f"{row.mtbf_seconds / 3600:.1f} h", "recovery": row.tier,
        "best interval": f"{row.interval_seconds / 60:g} min", "goodput": f"{100 * row.goodput:.2f} %",
        **{name.replace("_", " "): f"{100 * share:.2f} %" for name, share in row.parts.items()}}
        for row in recovery.best(rows)], title=f"the best interval of each, {settings.days:g} days")
    return 0


Overlay = Annotated[str, Parameter(help="A folder of k8s/overlays: kind, gpu or gpu-spot.")]
Job = Annotated[Literal["train", "pipeline", "workflow"] | None, Parameter(
    help="A job with a cluster of its own; without it, a standing cluster.")]
JobConfig = Annotated[str | None, Parameter(
    name="--config", help="Configuration of the training run or the pipeline; goes into the manifests, with --set.")]
Component = Annotated[list[str] | None, Parameter(
    negative="", consume_multiple=False, help="A folder of k8s/components, such as kueue. May be given again.")]
JobArgument = Annotated[list[str] | None, Parameter(
    negative="", consume_multiple=False, help="A further argument of the job: --argument=--output=s3://bucket/clean. "
                                              "May be given again.")]
Image = Annotated[list[str] | None, Parameter(
    negative="", consume_multiple=False, help="An image: tidewheel=registry/tidewheel:1.0, and tidewheel-cuda=... for "
                                              "the GPU groups.")]
Accounts = Annotated[list[str] | None, Parameter(
    negative="", consume_multiple=False, help="KEY=VALUE of the pods' service accounts: the cloud's role for them.")]
Tree = Annotated[str, Parameter(help="The folder k8s of the repository, or a copy of it.")]


@k8s_app.command(name="render")
def k8s_render(
    overlay: Overlay,
    *,
    job: Job = None,
    config: JobConfig = None,
    set_: Overrides = None,
    component: Component = None,
    argument: JobArgument = None,
    namespace: Annotated[str, Parameter(help="Instead of tidewheel.")] = "",
    image: Image = None,
    annotate_service_accounts: Accounts = None,
    tree: Tree = "k8s",
    output: Annotated[str, Parameter(help="Write into this file rather than to the standard output.")] = "",
) -> int:
    """Put an overlay, components and a job together through kustomize, with the run's configuration in them.

    The pods that train are as many as the run may use: `elastic` divided by the workers that fit into one pod.
    """
    from tidewheel.kubernetes import commands

    request = commands.request(overlay, job=job, config=config, overrides=set_, components=component,
                               arguments=argument, namespace=namespace, images=image,
                               accounts=annotate_service_accounts, tree=tree)
    text = commands.render_text(request)
    if output:
        from tidewheel.storage import split

        place, name = split(output)
        place.write(name, text.encode())
        print(f"manifests: {output}")
    else:
        sys.stdout.write(text)
    return 0


@k8s_app.command(name="lint")
def k8s_lint(
    overlay: Annotated[str | None, Parameter(help="A folder of k8s/overlays, rendered first; or give --file.")] = None,
    *,
    file: Annotated[str | None, Parameter(help="A YAML file of manifests to check instead, or - for standard "
                                               "input.")] = None,
    job: Job = None,
    config: JobConfig = None,
    set_: Overrides = None,
    component: Component = None,
    argument: JobArgument = None,
    namespace: Annotated[str, Parameter(help="Instead of tidewheel.")] = "",
    image: Image = None,
    annotate_service_accounts: Accounts = None,
    tree: Tree = "k8s",
    as_json: AsJson = False,
) -> int:
    """Check manifests before they are applied. Exit code 2 if anything is wrong.

    Schemas (closed: nothing unknown passes), what the KubeRay operator refuses, restricted Pod Security, network and
    rights, names that lead nowhere, metrics that nobody measures; and with --config the pods against the run's workers,
    batch and layout.
    """
    from tidewheel.kubernetes import commands

    if (overlay is None) == (file is None):
        raise ConfigError("give an overlay or --file", where="tidewheel k8s lint", mend="tidewheel k8s lint gpu")
    if file is not None:
        found, checked = commands.lint_file(file, job=job, config=config, overrides=set_)
    else:
        found, checked = commands.lint_rendered(commands.request(
            str(overlay), job=job, config=config, overrides=set_, components=component, arguments=argument,
            namespace=namespace, images=image, accounts=annotate_service_accounts, tree=tree))
    if as_json:
        from dataclasses import asdict

        print(json.dumps([asdict(problem) for problem in found], indent=2))
        return 2 if found else 0
    for problem in found:
        print(problem)
    if found:
        raise ConfigError(f"{len(found)} problem(s), listed above", where=file or str(overlay),
                          mend="correct the fields named there")
    print(f"{checked} objects: nothing is wrong")
    return 0


@app.command
def report(
    uri: Annotated[str, Parameter(help="URI of a run, or of what a pipeline wrote.")],
    *,
    data: Annotated[str | None, Parameter(help="What the run's pipeline wrote, to be shown on the same page.")] = None,
) -> int:
    """Write one self-contained HTML page about a run or a pipeline and print where it is."""
    from tidewheel.report.pipeline import write_pipeline_report
    from tidewheel.report.run import write_run_report
    from tidewheel.storage import store

    place = store(uri)
    if place.exists("run.json"):
        print(write_run_report(uri, data))
    elif place.exists("summary.json"):
        print(write_pipeline_report(uri))
    else:
        raise ConfigError("neither a run (run.json) nor a pipeline's output (summary.json)", where=uri,
                          mend="give the URI of --set run.uri=... or of --output")
    return 0


@app.command(name="generate")
def generate_text(
    source: Annotated[str, Parameter(help="URI of a run (its newest complete checkpoint), or of one checkpoint, "
                                          "RUN/checkpoints/step_00000100.")],
    *,
    prompt: Annotated[str, Parameter(help="Beginning of the text.")] = "",
    tokens: Annotated[int, Parameter(help="Tokens to write; fewer where the document ends.")] = 100,
    temperature: Annotated[float, Parameter(help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, Parameter(help="Draw among so many likeliest tokens; 0: all.")] = 50,
    top_p: Annotated[float, Parameter(help="Draw among the fewest tokens whose probabilities reach this sum.")] = 1.0,
    seed: Annotated[int, Parameter(help="The same seed draws the same text.")] = 0,
    tokenizer: Annotated[str, Parameter(help="A tokenizer's file; by default that of the run's shard set.")] = "",
    device: Annotated[str, Parameter(help="cpu, cuda or cuda:1; by default the first GPU if there is one.")] = "",
) -> int:
    """Continue a text with the model of a checkpoint, whichever number of workers and layout it was trained on."""
    if tokens < 0 or temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        raise ConfigError("--tokens, --temperature and --top-k are 0 or more, --top-p is above 0 and at most 1",
                          where="tidewheel generate", mend="correct the option")
    from tidewheel.checkpoint.generation import Writer

    writer = Writer.open(source, tokenizer=tokenizer, device=device)
    print(writer.write(prompt, tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed))
    return 0


@app.command
def evaluate(
    source: Annotated[str, Parameter(help="URI of a run (its newest complete checkpoint), or of one checkpoint, "
                                          "RUN/checkpoints/step_00000100.")],
    *,
    data: Annotated[list[str] | None, Parameter(negative="", consume_multiple=False, help="A validation set, URI or "
                                                "name=URI; may be given again. By default the run's own.")] = None,
    sequences: Annotated[int | None, Parameter(help="Take the first so many sequences of each set, 0: all.")] = None,
    device: Annotated[str, Parameter(help="cpu, cuda or cuda:1; by default the first GPU if there is one.")] = "",
    as_json: AsJson = False,
) -> int:
    """Loss, perplexity and bits per byte of a checkpoint, whichever number of workers and layout it was trained on."""
    from tidewheel.checkpoint.evaluation import Evaluator

    found = Evaluator(source, data=_named_sets(data), sequences=sequences, device=device).evaluate(source)
    rows = [{"set": name or "validation", "loss": round(score.loss, 4), "perplexity": round(score.perplexity, 2),
             "bits per byte": None if score.bits_per_byte is None else round(score.bits_per_byte, 4),
             "tokens": score.tokens} for name, score in found.scores.items()]
    if as_json:
        print(json.dumps({"checkpoint": found.checkpoint, "step": found.step, "loss": found.loss, "sets": rows}))
    else:
        print_table(rows, title=f"step {found.step:,} of {found.checkpoint}")
    return 0


def _named_sets(given: Sequence[str] | None) -> dict[str, str] | None:
    """{"": URI} of a single set, {name: URI} of several."""
    if not given:
        return None
    pairs = [each.partition("=")[::2] if "=" in each else ("", each) for each in given]
    named = dict(pairs)
    if len(named) < len(pairs) or ("" in named and len(pairs) > 1):
        raise ConfigError("several sets need a name each", where="--data", mend="--data web=URI --data code=URI")
    return named


@app.command
def workflow(
    *,
    spec: Annotated[str, Parameter(help="URI of the workflow.json that tw.Workflow(...).submit wrote.")],
    address: Address = None,
) -> int:
    """Run a workflow that was written by the SDK: its pipelines, then its training runs. Run again to resume."""
    from tidewheel.workflow.workflow import run_spec

    run_spec(spec, address=address)
    return 0


@app.command
def audit(run: Annotated[str, Parameter(help="URI of a run.")]) -> int:
    """Prove that a run consumed every sequence exactly once, in the planned order. Exit code 2 if not."""
    from tidewheel.train.audit import audit as check

    result = check(run)
    print(result.summary())
    if not result.ok:
        raise ShardError("the run did not consume the planned batches", where=run,
                         mend="the steps named above differ: compare batches.jsonl with the shard manifest")
    return 0


@app.command
def doctor(
    *,
    storage: Annotated[str | None, Parameter(help="Also try this URI: put, list, conditional put, multipart, delete, "
                                                  "with the speed.")] = None,
    address: Annotated[str | None, Parameter(help="Examine every node of this Ray cluster: auto, host:port.")] = None,
    as_json: AsJson = False,
) -> int:
    """Check this machine or every node of a cluster: what is missing or wrong, and how to mend it.

    Exit code 2 on a failure.
    """
    from tidewheel.cluster.doctor import diagnose

    if address is None:
        checks = diagnose(storage)
        rows: list[dict[str, str]] = [vars(check) for check in checks]
        _show_checks(rows) if not as_json else print(json.dumps(rows, indent=2))
    else:
        from tidewheel.cluster.session import session

        with session(address):
            from tidewheel.cluster.doctor.nodes import diagnose_cluster, flat

            nodes = diagnose_cluster(storage)
        rows = flat(nodes)
        for node in nodes if not as_json else ():
            console.print(f"[bold]{node.name}[/]")
            _show_checks([vars(check) for check in node.checks])
        if as_json:
            print(json.dumps(rows, indent=2))
    return 2 if any(row["status"] == "failure" for row in rows) else 0


def _show_checks(rows: Sequence[dict[str, str]]) -> None:
    marks = {"ok": "[green]ok     [/]", "warning": "[yellow]warning[/]", "failure": "[red]failure[/]"}
    for row in rows:
        console.print(f"{marks[row['status']]} {row['name']:<23} ", end="")
        console.print(row["detail"], markup=False, soft_wrap=True)
        if row["mend"] and row["status"] != "ok":
            console.print(f"        mend: {row['mend']}", style="dim", markup=False)


@app.command
def demo(
    *,
    output: Annotated[str, Parameter(help="Folder for everything the demo writes.")] = "demo-output",
    storage: Annotated[Literal["folder", "s3"], Parameter(help="folder: plain files. s3: the same through an "
                       "S3-protocol server that the demo starts on loopback.")] = "folder",
    steps: Annotated[int | None, Parameter(help="Training steps; fewer is quicker and learns less.")] = None,
    disturb: Annotated[bool, Parameter(help="Kill a node at 40 % and let one join at 70 %.")] = True,
) -> int:
    """Raw text to a trained model on this machine, with a node killed on the way, and a report. No network, no GPU."""
    from tidewheel.demo.run import run_demo

    return run_demo(output=output, storage=storage, steps=steps, disturb=disturb)


def run_command(tokens: Sequence[str]) -> int:
    """Run one command line and return its exit code; see the module's docstring."""
    try:
        code = app(list(tokens), exit_on_error=False, print_error=False, result_action="return_value")
        return code if isinstance(code, int) else 0
    except cyclopts.CycloptsError as error:
        console.print(f"[red]error:[/] {error}", markup=True)
        console.print("  mend: `tidewheel --help`, or --help behind a command, shows what there is", markup=False)
        return 2
    except BrokenPipeError:  # the reader of our output, `head` for one, has seen enough
        sys.stdout = None  # type: ignore[assignment]  # or Python would flush it once more at exit, and complain
        return 0
    except KeyboardInterrupt:
        console.print("interrupted; give the same command again to go on from what is committed")
        return 130
    except BaseException as error:
        cause = root_cause(error)
        if not isinstance(cause, TidewheelError):
            raise
        console.print("[red]error:[/] ", end="")
        console.print(str(cause), markup=False)
        return cause.exit_code


def main() -> None:
    """Entry point of the console command."""
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
