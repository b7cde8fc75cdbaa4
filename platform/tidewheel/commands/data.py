"""`tidewheel data`: run pipelines, train tokenizers and classifiers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from tidewheel.commands import outputs
from tidewheel.commands.options import Address, AsJson, DryRun, Overrides
from tidewheel.commands.preview import preview
from tidewheel.commands.similar import similar
from tidewheel.console import console, print_table
from tidewheel.errors import ConfigError

app = cyclopts.App(name="data", help="Clean, deduplicate, tokenize and pack documents into shards.")
for command in (outputs.clean, outputs.diff, preview, similar):
    app.command(command)


@app.command(name="run")
def data_run(
    config: Annotated[str, Parameter(help="Pipeline definition, a YAML file; pipelines/ has examples.")],
    *,
    input: Annotated[str, Parameter(help="Folder, s3://bucket/prefix or hf://datasets/owner/name that relative "
                                         "paths in the pipeline are below; or one file, read instead of those that "
                                         "the pipeline names.")] = ".",
    output: Annotated[str, Parameter(help="Folder or s3://bucket/prefix to write shards, verdicts, quarantine and "
                                          "the report to. Run again with the same one to resume.")],
    set_: Overrides = None,
    address: Address = None,
    fail_above: Annotated[float | None, Parameter(help="Fail if a larger share of the documents contains evaluation "
                                                       "items. Overrides the recipe's setting.")] = None,
    verify: Annotated[bool, Parameter(negative="", help="Also read published files, and rewrite damaged ones. Without "
                                                        "it, a file with the right length counts as intact until it "
                                                        "is read.")] = False,
    replace: Annotated[bool, Parameter(negative="", help="Replace the output of another recipe; "
                                                         "`tidewheel data clean` removes the old files.")] = False,
    limit: Annotated[int | None, Parameter(help="Try it on a few documents: at most this many, the first of each "
                                                "file, in proportion to its size (read.limit).")] = None,
    sample: Annotated[float | None, Parameter(help="Try it on a share of the documents, 0.01 for 1 %, chosen by the "
                                                   "hash of their id (read.sample).")] = None,
    dry_run: DryRun = False,
) -> int:
    """Run a data pipeline: documents in; packed shards, or documents for other tools, out.

    Published, intact work of earlier runs is not computed again. To resume a killed run, give the same command again;
    the output has the same bytes.
    """
    from tidewheel.config import load
    from tidewheel.data.config import PipelineConfig

    tried = [f"read.{name}={value}" for name, value in (("limit", limit), ("sample", sample)) if value is not None]
    settings = load(PipelineConfig, config, [*(set_ or ()), *tried])  # reports wrong keys before the heavy imports
    from tidewheel.data import pipeline, pipeline_plan
    from tidewheel.data.stages.replace import would_be_replaced

    if fail_above is not None and not 0 <= fail_above <= 1:
        raise ConfigError(f"a share must be from 0 to 1, not {fail_above:g}", where="--fail-above",
                          fix="give 0.001 for 0.1 %")
    if fail_above is not None and settings.step("decontaminate") is None:
        raise ConfigError("the pipeline has no decontaminate step", where="--fail-above",
                          fix="add the step to the recipe, with its evaluation sets")
    if dry_run:
        plan = pipeline_plan.plan(settings, input=input, output=output)
        print_table([line.row() for line in plan.formats], title="what would be read")
        _print_skipped(plan.skipped)
        print_table(plan.rows(), title="what would run")
        if plan.replaces and not replace:
            raise would_be_replaced(plan.replaces, output)
        if plan.replaces:
            print(f"replaces {plan.replaces}")
        return 0
    console.print("checking the input and the output")
    pipeline.check(settings, input=input, output=output, may_replace=replace)  # before a cluster starts for it
    from tidewheel.cluster.session import session
    from tidewheel.data.progress import stage_bars
    from tidewheel.report.pipeline import write_pipeline_report
    from tidewheel.stopping import stopping

    with stage_bars(pipeline.stages(settings)) as on_progress, stopping(), session(address):
        summary = pipeline.run(settings, input=input, output=output, on_progress=on_progress,
                               fail_above=fail_above, verify=verify, may_replace=replace)
    _print_skipped(summary.skipped)
    print_table(summary.rows(), title="what each stage kept")
    for line in summary.most_frequent_reasons():
        print(line)
    if speeds := summary.filter_speeds():
        print_table(speeds, title="what filters cost")
    if written := summary.sets():
        print_table(written, title="what was written")
    if settings.step("pack"):
        print(f"shards: {output}/shards")
    if settings.product:
        print(f"data set: {output}/dataset")
    print(f"report: {write_pipeline_report(output)}")
    return 0


def _print_skipped(skipped: Mapping[str, int]) -> None:
    """Print which files of source trees are left out."""
    from tidewheel.data.readers.code import REASONS

    if skipped:
        print_table([{"left out": reason, "files": f"{count:,}", "because": REASONS[reason]}
                     for reason, count in sorted(skipped.items(), key=lambda item: (-item[1], item[0]))])


@app.command(name="example")
def data_example(
    folder: Annotated[str, Parameter(help="Folder or s3://bucket/prefix to write corpus/ and evals/ to.")],
    *,
    max_bytes: Annotated[int, Parameter(help="Bytes of text, at most.")] = 8_000_000,
    seed: Annotated[int, Parameter(help="Seed that selects the documents, if there are more than fit.")] = 0,
) -> int:
    """Write example documents from this machine's Python, with a few broken records and an evaluation set.

    The same Python environment gives the same bytes.
    """
    from tidewheel.demo.corpus import build_corpus
    from tidewheel.storage import store

    if max_bytes < 1:
        raise ConfigError(f"{max_bytes} bytes of text", where="--max-bytes", fix="give 1 or more, such as 600000")
    made = build_corpus(store(folder), max_bytes=max_bytes, seed=seed)
    print(f"{folder}: {made.documents:,} documents, {made.bytes / 1e6:.1f} MB, in {len(made.files)} files; "
          f"{made.bad_records} broken records; {len(made.evals)} files of evaluation items, of which "
          f"{len(made.planted)} documents hold one")
    return 0


@app.command(name="train-classifier")
def data_train_classifier(
    positive: Annotated[str, Parameter(help="Good documents: a file or a quoted pattern.")],
    negative: Annotated[str, Parameter(help="Ordinary documents: a file or a quoted pattern.")],
    *,
    output: Annotated[str, Parameter(help="Path of the model, a .bin file in fastText's format.")],
    text: Annotated[str, Parameter(help="Field with a document's text.")] = "text",
    keep: Annotated[float, Parameter(help="Share of ordinary documents that the threshold keeps.")] = 0.1,
    set_: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Train a quality classifier on two sets of documents, and test it on a held-out part.

    --set changes how it is trained: epochs, learning_rate, word_ngrams, dimension, buckets, min_count, held_out, seed.
    The same documents give the same bytes, in whatever files and order they come.
    """
    from dataclasses import asdict

    from tidewheel.config import build
    from tidewheel.data.fasttext import HIGH_QUALITY
    from tidewheel.data.fasttext.training import TrainClassifier, read_texts
    from tidewheel.data.fasttext.training import train as train_classifier
    from tidewheel.storage import absolute, split

    settings = build(TrainClassifier, {"keep": keep}, set_ or (), where="train-classifier")
    folder, name = split(output)
    sets = [read_texts(pattern, field=text) for pattern in (positive, negative)]
    trained = train_classifier(sets[0][0], sets[1][0], settings)
    folder.write(name, trained.model)
    figures = {"documents": [len(texts) for texts, _ in sets], "unusable": [bad for _, bad in sets],
               "in_both": trained.in_both, "trained_on": trained.trained, **asdict(trained.quality),
               "label": HIGH_QUALITY, "output": output}
    if as_json:
        print(json.dumps(figures, indent=2))
        return 0
    for key, value in figures.items():
        if key != "output":
            print(f"{key.replace('_', ' '):<16}{f'{value:.6f}' if isinstance(value, float) else value}")
    print(f"model: {output}")
    print(f"use it: - filter: {{classifier: {{file: {absolute(output)}, min_score: {trained.quality.threshold:.6f}}}}}")
    return 0


@app.command(name="train-tokenizer")
def data_train_tokenizer(
    inputs: Annotated[list[str], Parameter(help="Files of documents, or quoted patterns; s3://bucket/... too.")],
    *,
    vocabulary_size: Annotated[int, Parameter(help="Number of tokens, with the 256 bytes and special tokens.")],
    output: Annotated[str, Parameter(help="Path of the tokenizer.json.")],
    sample_bytes: Annotated[int, Parameter(help="Bytes of text to train on. Documents are taken in order of their "
                                                "content's hash.")] = 100_000_000,
    text: Annotated[str, Parameter(help="Field with a document's text.")] = "text",
    special_token: Annotated[list[str] | None, Parameter(
        negative="", consume_multiple=False, help="A further special token, for chat templates. May be "
                                                  "repeated.")] = None,
    as_json: AsJson = False,
) -> int:
    """Train a byte-level BPE tokenizer on a sample of documents.

    The same documents give the same bytes, in whatever files and order they come.
    """
    from tidewheel.data.tokenize.tokenizer_training import train_tokenizer
    from tidewheel.storage import split

    folder, name = split(output)
    made = train_tokenizer(inputs, field=text, vocabulary_size=vocabulary_size, sample_bytes=sample_bytes,
                           special_tokens=special_token or ())
    folder.write(name, made.tokenizer)
    figures = {**made.figures(), "output": output}
    if as_json:
        print(json.dumps(figures, indent=2))
        return 0
    if made.bytes_per_token is None:
        figures["bytes_per_token"] = "not measured: all text was trained on"
    print_table([{"what": key.replace("_", " "), "": f"{value:,}" if isinstance(value, int) else str(value)}
                 for key, value in figures.items()], title="tokenizer trained")
    return 0
