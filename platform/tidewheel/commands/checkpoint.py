"""`tidewheel checkpoint`: list, verify, compare, export, merge, unmerge, import and upcycle."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import cyclopts
from cyclopts import Parameter

from tidewheel.commands.options import AsJson
from tidewheel.console import print_table

app = cyclopts.App(name="checkpoint", help="List, verify, compare, export, merge, unmerge, import and upcycle "
                                          "checkpoints.")


@app.command(name="list")
def checkpoint_list(run: Annotated[str, Parameter(help="URI of a run.")], *, as_json: AsJson = False) -> int:
    """List the checkpoints of a run, oldest first, with partial ones marked."""
    from tidewheel.checkpoint.verify import list_checkpoints
    from tidewheel.errors import CheckpointError
    from tidewheel.storage import store

    run_store = store(run)
    saved = list_checkpoints(run_store.child("checkpoints"))
    if not saved and not run_store.exists("run.json"):
        raise CheckpointError("there is no run here: neither checkpoints nor run.json", where=run,
                              fix="give the URI of a run: run.uri and run.id of its configuration, such as runs/demo")
    rows = [{"checkpoint": checkpoint.name, "step": checkpoint.step,
             "state": "complete" if checkpoint.complete else "partial",
             "MB": round(checkpoint.bytes / 1e6, 2), "world size": checkpoint.world_size}
            for checkpoint in saved]
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        print_table(rows, title=f"checkpoints of {run}")
    else:
        print(f"{run}: no checkpoint yet")
    return 0


@app.command(name="verify")
def checkpoint_verify(
    run: Annotated[str, Parameter(help="URI of a run.")],
    *,
    name: Annotated[str | None, Parameter(help="One checkpoint, such as step_00000100; default: all.")] = None,
) -> int:
    """Read every file of the checkpoints and compare its hash. Exit code 2 if a file is damaged."""
    from tidewheel.checkpoint.verify import list_checkpoints, verify_checkpoint
    from tidewheel.errors import CheckpointError
    from tidewheel.storage import store

    checkpoints = store(run).child("checkpoints")
    names = [name] if name else [info.name for info in list_checkpoints(checkpoints)]
    if not names:
        raise CheckpointError("no checkpoints", where=run, fix="give the URI of a run, as in --set run.uri=...")
    problems = {checkpoint: verify_checkpoint(checkpoints, checkpoint) for checkpoint in names}
    print("\n".join(f"{checkpoint}: {'; '.join(info) or 'intact'}" for checkpoint, info in problems.items()))
    if damaged := sum(map(bool, problems.values())):
        raise CheckpointError(f"{damaged} of {len(names)} checkpoints are damaged", where=run,
                              fix="training skips damaged checkpoints and resumes from the newest intact one")
    return 0


@app.command(name="digest")
def checkpoint_digest(
    source: Annotated[str, Parameter(help="URI of a run (its newest complete checkpoint), or of one checkpoint, "
                                          "RUN/checkpoints/step_00000100.")],
    *,
    as_json: AsJson = False,
) -> int:
    """Print the SHA-256 of a checkpoint's tensors. Equal bits have equal hashes in any layout."""
    from dataclasses import asdict

    from tidewheel.checkpoint.digest import digest

    result = digest(source)
    if as_json:
        print(json.dumps(asdict(result), indent=2))
        return 0
    print(f"{result.checkpoint}: step {result.step}")
    for name, value in {**result.groups, "state": result.state}.items():
        print(f"{name:<10} {value}")
    return 0


@app.command(name="export")
def checkpoint_export(
    source: Annotated[str, Parameter(help="URI of a run (its newest intact checkpoint), or of one checkpoint, "
                                          "RUN/checkpoints/step_00000100.")],
    out: Annotated[str, Parameter(help="Folder or s3://bucket/prefix to write.")],
    *,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Parameter(help="dtype of the weights.")] = "float32",
    tokenizer: Annotated[str, Parameter(help="A tokenizer.json; default: that of the run's shard set.")] = "",
    chat_template: Annotated[str, Parameter(help="A Jinja file; default: that of the run's conversations.")] = "",
    average: Annotated[str, Parameter(help="Write this average of the parameters in their place, such as ema.")] = "",
) -> int:
    """Write a checkpoint as a Hugging Face folder that AutoModelForCausalLM.from_pretrained loads."""
    from tidewheel.checkpoint.conversion import export

    done = export(source, out, dtype=dtype, tokenizer=tokenizer, chat_template=chat_template, average=average)
    beside = "with its tokenizer" if done.tokenizer else "without a tokenizer: give one with --tokenizer"
    print(f"{done.uri}: {done.parameters:,} parameters, vocabulary {done.vocabulary_size:,}, {beside}")
    return 0


@app.command(name="merge")
def checkpoint_merge(
    source: Annotated[str, Parameter(help="URI of a run that trained an adapter, or of one of its checkpoints.")],
    out: Annotated[str, Parameter(help="New folder or s3://bucket/prefix for the checkpoint of the whole model.")],
    *,
    tokenizer: Annotated[str, Parameter(help="A tokenizer.json; default: that of the run's shard set.")] = "",
    chat_template: Annotated[str, Parameter(help="A Jinja file; default: that of the run's conversations.")] = "",
) -> int:
    """Merge an adapter into its base. Training starts from the result with model.init_from."""
    from tidewheel.checkpoint.adapter_files import merge_run

    parameters, reason = merge_run(source, out, tokenizer=tokenizer, chat_template=chat_template)
    beside = f"without a tokenizer ({reason}): give one with --tokenizer" if reason else "with its tokenizer"
    print(f"{out}: {parameters:,} parameters, {beside}; start from them with --set model.init_from={out}")
    return 0


@app.command(name="unmerge")
def checkpoint_unmerge(
    source: Annotated[str, Parameter(help="URI of a merged model: what `checkpoint merge` wrote, or a run that was "
                                          "trained from it.")],
    out: Annotated[str, Parameter(help="New folder or s3://bucket/prefix for the checkpoint of the model without the "
                                       "adapter.")],
    *,
    adapter: Annotated[str, Parameter(help="URI of the run that trained the adapter, or of one of its checkpoints; "
                                           "default: the one that `checkpoint merge` recorded.")] = "",
    tokenizer: Annotated[str, Parameter(help="A tokenizer.json; default: that of the merged model.")] = "",
    chat_template: Annotated[str, Parameter(help="A Jinja file; default: that of the merged model.")] = "",
) -> int:
    """Take an adapter out of the model that it was merged into.

    If the base can be read and the model is the base with the adapter, the result has the base's bits. Otherwise the
    adapter is subtracted: merged again, no value differs by more than 8 roundings (in fp32, 1e-6 of the largest).
    """
    from tidewheel.checkpoint.adapter_files import unmerge_run

    done = unmerge_run(source, out, adapter=adapter, tokenizer=tokenizer, chat_template=chat_template)
    how = (f"the bits of {done.base}" if done.base else
           f"the adapter is subtracted (merged again, values differ by at most {done.difference:.1e} of the largest)")
    beside = f"without a tokenizer ({done.reason}): give one with --tokenizer" if done.reason else "with its tokenizer"
    print(f"{out}: {done.parameters:,} parameters, {how}, {beside}")
    return 0


@app.command(name="export-adapter")
def checkpoint_export_adapter(
    source: Annotated[str, Parameter(help="URI of a run that trained an adapter, or of one of its checkpoints.")],
    out: Annotated[str, Parameter(help="Folder or s3://bucket/prefix to write.")],
    *,
    base: Annotated[str, Parameter(help="Name or folder of the base in transformers' format, for the "
                                        "settings.")] = "",
) -> int:
    """Write an adapter alone, as adapter_config.json and adapter_model.safetensors that peft loads.

    With the adapter of a reward model goes its head.
    """
    from tidewheel.checkpoint.adapter_files import export_adapter

    print(f"{out}: {export_adapter(source, out, base=base):,} parameters of an adapter")
    return 0


@app.command(name="import-adapter")
def checkpoint_import_adapter(
    folder: Annotated[str, Parameter(help="Adapter as peft's save_pretrained writes it.")],
    base: Annotated[str, Parameter(help="URI of the run or the checkpoint of its base model.")],
    uri: Annotated[str, Parameter(help="New folder or s3://bucket/prefix for the checkpoint.")],
) -> int:
    """Convert an adapter of peft to a checkpoint that training can start from, and print its settings.

    With the adapter of a reward model goes its head.
    """
    import yaml

    from tidewheel.checkpoint.adapter_files import import_adapter

    settings: dict[str, dict[str, Any]] = {"model": {"init_from": base}, **import_adapter(folder, base, uri)}
    shown = {group: {name: value for name, value in values.items() if value not in ("", {}, None)}
             for group, values in settings.items()}
    print(yaml.safe_dump(shown, sort_keys=False), end="")
    return 0


@app.command(name="import")
def checkpoint_import(
    folder: Annotated[str, Parameter(help="A model in safetensors: a folder that save_pretrained wrote, or "
                                           "hf://owner/name[@revision].")],
    uri: Annotated[str, Parameter(help="New folder or s3://bucket/prefix for the checkpoint.")],
    *,
    vocabulary_size: Annotated[int | None, Parameter(help="Pad the vocabulary to this number of tokens: that of the "
                                                          "shard set to train on.")] = None,
) -> int:
    """Convert a Hugging Face model to a checkpoint that training can start from, and print its settings."""
    from tidewheel.checkpoint.conversion import import_

    print(import_(folder, uri, vocabulary_size=vocabulary_size).settings(), end="")
    return 0


@app.command(name="upcycle")
def checkpoint_upcycle(
    source: Annotated[str, Parameter(help="URI of a run (its newest intact checkpoint) of a dense model, of one "
                                          "checkpoint, or of an imported model.")],
    uri: Annotated[str, Parameter(help="New folder or s3://bucket/prefix for the checkpoint.")],
    *,
    settings: Annotated[list[str], Parameter(name="--set", help="Settings of the mixture of experts, as in --set "
                                             "kind=mixtral --set num_experts=8.")],
    noise: Annotated[float, Parameter(help="Noise added to each expert's matrices, relative to their standard "
                                           "deviation; 0: none.")] = 0.0,
    seed: Annotated[int, Parameter(help="Seed of the router and the noise.")] = 0,
) -> int:
    """Make a mixture of experts whose experts are copies of a dense model's feed-forward, and print its settings."""
    from tidewheel.checkpoint.upcycling import upcycle
    from tidewheel.config import setting

    values = dict(setting(text) for text in settings)
    print(upcycle(source, uri, values, noise=noise, seed=seed).settings(), end="")
    return 0
