"""`tidewheel evaluate`: the loss of a checkpoint on validation sets, and its answers to evaluation tasks."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from tidewheel.commands.options import Address, AsJson
from tidewheel.console import bars, print_table
from tidewheel.errors import ConfigError

if TYPE_CHECKING:
    from tidewheel.inference.evaluate import Evaluator
    from tidewheel.inference.tasks.evaluation import Options, TaskResult


def evaluate(
    source: Annotated[str, Parameter(help="URI of a run (its newest complete checkpoint), or of one checkpoint, "
                                          "RUN/checkpoints/step_00000100; with --tasks also a Hugging Face folder.")],
    *,
    adapter: Annotated[list[str] | None, Parameter(negative="", consume_multiple=False, help="Adapter of this model as "
                       "NAME=URI: a run, one of its checkpoints, or a folder that peft wrote; may be repeated. Scores "
                       "are shown without and with each.")] = None,
    data: Annotated[list[str] | None, Parameter(negative="", consume_multiple=False, help="Validation set: URI or "
                                                "name=URI; may be repeated. Default: the run's own.")] = None,
    sequences: Annotated[int | None, Parameter(help="Number of sequences to read of each set; 0: all.")] = None,
    positions: Annotated[str, Parameter(help="Show the loss by the position in a document instead: the ends of the "
                                             "ranges, 1024,2048,4096.")] = "",
    tasks: Annotated[list[str] | None, Parameter(negative="", consume_multiple=True, help="Evaluate these "
                                                 "task files of lm-evaluation-harness, with local data.")] = None,
    num_fewshot: Annotated[int | None, Parameter(help="With --tasks: examples before each item; default: as the file "
                                                      "says.")] = None,
    limit: Annotated[int, Parameter(help="With --tasks: evaluate this number of items of each task; 0: all.")] = 0,
    fewshot_seed: Annotated[int, Parameter(help="With --tasks: seed of the examples.")] = 1234,
    chat: Annotated[bool, Parameter(negative="", help="With --tasks: put prompts into the model's chat template.")
                    ] = False,
    chat_template: Annotated[str, Parameter(help="With --chat: a Jinja file; default: that of the run's "
                                                 "conversations.")] = "",
    tokenizer: Annotated[str, Parameter(help="With --tasks: tokenizer file; default: that of the run's "
                                             "shard set.")] = "",
    precision: Annotated[Literal["fp32", "bf16"], Parameter(help="With --tasks: type of matrix products.")] = "fp32",
    output: Annotated[str, Parameter(help="With --tasks: folder for answers and results; default: evaluations/ below "
                                          "SOURCE's run or folder.")] = "",
    workers: Annotated[int, Parameter(help="With --tasks: answer on this number of workers of a Ray cluster; 0: in "
                                           "this process, without Ray.")] = 0,
    cpus_per_worker: Annotated[float, Parameter(help="CPUs and threads of a worker.")] = 1.0,
    gpus_per_worker: Annotated[float, Parameter(help="GPUs of a worker.")] = 0.0,
    address: Address = None,
    device: Annotated[str, Parameter(help="cpu, cuda or cuda:1; default: the first GPU, or else cpu.")] = "",
    as_json: AsJson = False,
) -> int:
    """Show loss, perplexity and bits per byte of a checkpoint, from any number of workers and any layout.

    On preference pairs, show the loss and the metrics of the run's objective. With --tasks, show the metrics of tasks
    with their standard errors; if the command is killed, give it again: it continues.
    """
    from tidewheel.inference.adapters import named

    adapters = named(adapter or ())
    if tasks:
        from tidewheel.inference.tasks.evaluation import Options

        if data or sequences is not None or positions:
            raise ConfigError("--data, --sequences and --positions are of validation sets", where="--tasks",
                              fix="leave them or --tasks out")
        if workers < 0 or limit < 0 or cpus_per_worker <= 0 or gpus_per_worker < 0:
            raise ConfigError("--workers, --limit and --gpus-per-worker are 0 or more, --cpus-per-worker above 0",
                              where="tidewheel evaluate", fix="correct the option")
        options = Options(tuple(tasks), num_fewshot, limit, fewshot_seed, chat)
        settings = {"tokenizer": tokenizer, "chat_template": chat_template, "device": device, "precision": precision,
                    "adapters": adapters}
        return _tasks(source, options, settings, output, workers, (cpus_per_worker, gpus_per_worker), address, as_json)
    if chat or workers or num_fewshot is not None or limit or output:
        raise ConfigError("--chat, --workers, --num-fewshot, --limit and --output are of tasks",
                          where="tidewheel evaluate", fix="give task files: --tasks FILE")
    if positions and adapters:
        raise ConfigError("--positions is of the model alone", where="tidewheel evaluate",
                          fix="leave --adapter out, or give the adapter's own run instead")
    from tidewheel.inference.evaluate import Evaluator

    evaluator = Evaluator(source, data=_named_sets(data), sequences=sequences, device=device)
    if positions:
        return _by_position(evaluator, source, positions, as_json)
    evaluations = (evaluator.evaluate_adapters(source, adapters) if adapters else
                   {"": evaluator.evaluate(source)})
    rows = {name: [{"set": data_set or "validation", **score.shown()} for data_set, score in scores.scores.items()]
            for name, scores in evaluations.items()}
    base = evaluations[""]
    if as_json:
        losses = {"loss": base.loss, "sets": rows.pop("")}
        with_adapters = {name: {"loss": evaluations[name].loss, "sets": sets} for name, sets in rows.items()}
        print(json.dumps({"checkpoint": base.checkpoint, "step": base.step, **losses,
                          **({"adapters": with_adapters} if adapters else {})}))
    else:
        print_table([{**_column(name, adapters), **row} for name, sets in rows.items() for row in sets],
                    title=f"step {base.step:,} of {base.checkpoint}")
    return 0


def _column(adapter: str, adapters: Collection[str]) -> dict[str, str]:
    """Return the column of a table that names what the figures of a row are of; none unless there are adapters."""
    return {"adapter": adapter or "(none)"} if adapters else {}


def _tasks(source: str, options: Options, settings: dict[str, Any], output: str, workers: int,
           per_worker: tuple[float, float], address: str | None, as_json: bool) -> int:
    """Evaluate tasks and print their figures."""
    from tidewheel.inference.scorer import evaluated_checkpoint, open_scorer, place_of_results
    from tidewheel.inference.tasks.evaluation import evaluate as evaluate_here

    checkpoint = evaluated_checkpoint(source)
    target = output or place_of_results(source)
    about = {"checkpoint": checkpoint}
    adapters: dict[str, str] = settings["adapters"]
    with bars() as group, group.bar("tasks", 1, unit="items") as bar:
        def progress(done: int, total: int) -> None:
            bar.update(done, total=total)

        if workers:
            from tidewheel.cluster.session import session
            from tidewheel.elastic.task_workers import Model, Resources, evaluate_on_workers
            from tidewheel.storage import absolute

            settings = {**settings, "adapters": {name: absolute(uri) for name, uri in adapters.items()}}
            with session(address):
                results = evaluate_on_workers(Model(checkpoint, settings), options, absolute(target),
                                              Resources(workers, *per_worker), about=about, on_progress=progress)
        else:
            scorer = open_scorer(checkpoint, **settings)
            results = [replace(result, adapter=name) for name in ("", *adapters)
                       for result in evaluate_here(scorer.of(name), options, target, on_progress=progress,
                                                   about={**about, "adapter": name})]
    _print_tasks(results, checkpoint, adapters, as_json)
    return 0


def _print_tasks(results: Sequence[TaskResult], checkpoint: str, adapters: Collection[str], as_json: bool) -> None:
    if as_json:
        tasks: dict[str, dict[str, Any]] = {name: {} for name in ("", *adapters)}
        for result in results:
            figures = {figure.name: {"value": figure.value, "stderr": figure.stderr} for figure in result.figures}
            tasks[result.adapter][result.task] = {"items": result.items, "answered": result.answered,
                                                  "results": result.uri, **figures}
        own = tasks.pop("")
        print(json.dumps({"checkpoint": checkpoint, "tasks": own, **({"adapters": tasks} if adapters else {})},
                         indent=2))
        return
    print_table([{**_column(result.adapter, adapters), **row} for result in results for row in result.rows()],
                title=f"Tasks, {checkpoint}")
    for result in results:
        by = f" by {result.adapter or 'the model alone'}" if adapters else ""
        print(f"{result.task}: {result.answered:,} of {result.items:,} items answered now{by}, answers and results in "
              f"{result.uri}")


def _by_position(evaluator: Evaluator, source: str, positions: str, as_json: bool) -> int:
    """Print the loss of each range of positions."""
    try:
        edges = [int(edge) for edge in positions.split(",")]
    except ValueError:
        raise ConfigError(f"{positions!r} are not numbers", where="--positions", fix="give --positions 1024,2048,4096"
                          ) from None
    rows = [{"set": name or "validation", "positions": f"{score.start:,} to {score.end - 1:,}",
             "loss": None if score.loss is None else round(score.loss, 4), "tokens": score.tokens}
            for name, scores in evaluator.by_position(source, edges).items() for score in scores]
    if as_json:
        print(json.dumps(rows))
    else:
        print_table(rows, title=f"Loss by the position in a document, {source}")
    return 0


def _named_sets(given: Sequence[str] | None) -> dict[str, str] | None:
    """Return {"": URI} for a single set, {name: URI} for several.

    Raises:
        ConfigError: several sets, and not all have a name.
    """
    if not given:
        return None
    pairs = [text.partition("=")[::2] if "=" in text else ("", text) for text in given]
    named = dict(pairs)
    if len(named) < len(pairs) or ("" in named and len(pairs) > 1):
        raise ConfigError("each of several sets needs a name of its own", where="--data",
                          fix="give --data web=URI --data code=URI")
    return named
