"""Evaluate tasks durably: a unit of items is answered once, published as a whole, and found again.

The key of a unit is a hash of everything that its answers depend on: the task, its data, the examples' seed, and the
weights and tokenizer of the model. Results are computed from the published units, so a killed evaluation that is run
again gives the same figures, and so does any number of workers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tidewheel import expressions, storage
from tidewheel.config import recipe_hash
from tidewheel.data.stage import Published, Unit, UnitWriter, lookup, read_file, unit_key
from tidewheel.errors import ConfigError, InputError
from tidewheel.inference.tasks.metrics import Figure, figures, judged
from tidewheel.inference.tasks.prompts import SEED
from tidewheel.inference.tasks.requests import Answer, Item, Likelihood, Request, Scorer
from tidewheel.inference.tasks.task import Task

UNIT = 64
"""Items of a unit: what is lost at most, on each worker, when the evaluation is killed."""
FORMAT = 1
"""Part of the keys; raised when equal items of equal models get another answer."""
STAGE, ANSWERS, RESULTS = "tasks", "answers.jsonl", "results"
OnProgress = Callable[[int, int], None]
"""Called with the items done so far and their total."""


@dataclass(frozen=True)
class Options:
    """What to evaluate.

    Args:
        files: URIs of task files.
        num_fewshot: examples of each item; None: as each file says.
        limit: evaluate only this number of items of each task; 0: all.
        seed: of the examples.
        chat: prompts are rendered by the model's chat template.
    """

    files: tuple[str, ...]
    num_fewshot: int | None = None
    limit: int = 0
    seed: int = SEED
    chat: bool = False

    def open(self) -> list[Task]:
        """Read the tasks and their data.

        Raises:
            ConfigError: a setting is wrong, or two tasks have one name.
            InputError: data is missing.
        """
        tasks = [Task.open(uri, num_fewshot=self.num_fewshot, limit=self.limit, seed=self.seed) for uri in self.files]
        names = [task.name for task in tasks]
        for task in tasks:
            if names.count(task.name) > 1:
                raise ConfigError(f"two task files are called {task.name!r}", where=task.where,
                                  fix="give them different names in `task`")
        return tasks


@dataclass(frozen=True)
class TaskResult:
    """Results of a task.

    Args:
        task: its name.
        figures: the metrics.
        items: number of items.
        answered: of them, those that were answered now; the others were there.
        uri: of the file with these results.
        adapter: name of the adapter that answered; "": the model itself.
    """

    task: str
    figures: tuple[Figure, ...]
    items: int
    answered: int
    uri: str
    adapter: str = ""

    def rows(self) -> list[dict[str, Any]]:
        """Return the figures for a table."""
        return [{"task": self.task, "metric": figure.name, "value": round(figure.value, 4),
                 "stderr": None if figure.stderr is None else round(figure.stderr, 4), "items": figure.items}
                for figure in self.figures]


def units_of(task: Task, identity: Mapping[str, Any], *, chat: bool) -> list[Unit]:
    """Return the units of a task, in the order of their items.

    Args:
        task: the task.
        identity: of the model, see `Scorer`.
        chat: see `Options`.
    """
    total = len(task.documents)
    units = []
    for number, first in enumerate(range(0, total, UNIT)):
        last = min(first + UNIT, total)
        key = unit_key(STAGE, settings=[FORMAT, task.key(), chat, first, last], version=None,
                       inputs=[recipe_hash(dict(identity))])
        units.append(Unit(STAGE, f"{task.name} {first + 1}-{last}", key, number))
    return units


def items_of(task: Task, scorer: Scorer, *, chat: bool) -> list[Item]:
    """Return the items of a task with their requests; see `Task.items`.

    Args:
        task: the task.
        scorer: the model, which has the chat template.
        chat: see `Options`.
    """
    return task.items(scorer.chat if chat else None)


def answer(task: Task, items: Sequence[Item], scorer: Scorer, output: str, unit: Unit, *, chat: bool) -> Published:
    """Answer the items of a unit, and publish it.

    Args:
        task: the task.
        items: all its items.
        scorer: the model.
        output: folder of the evaluation.
        unit: the unit.
        chat: see `Options`.

    Raises:
        InputError: a text does not fit into the model's context.
    """
    mine = items[unit.number * UNIT:(unit.number + 1) * UNIT]
    answers = scorer.answers([request for item in mine for request in item.requests], chat=chat)
    lines = []
    begin = 0
    for item in mine:
        end = begin + len(item.requests)
        lines.append(_line(task, item, answers[begin:end]))
        begin = end
    writer = UnitWriter(output, unit)
    writer.file(ANSWERS, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return writer.publish({"task": task.name, "items": len(mine)})


def result_of(task: Task, units: Sequence[Unit], published: Mapping[str, Published], output: str, answered: int,
              about: Mapping[str, Any]) -> TaskResult:
    """Compute the results of a task from its published units, and write them.

    Args:
        task: the task.
        units: all its units.
        published: units by key.
        output: folder of the evaluation.
        answered: items that were answered now.
        about: what to write beside the figures.

    Raises:
        StorageError: a unit is damaged.
    """
    target = storage.store(output)
    values = []
    for unit in units:
        content = read_file(target, published[unit.key].files[ANSWERS])
        values += [json.loads(line)["values"] for line in content.splitlines()]
    results = figures(values, task.metrics)
    name = f"{RESULTS}/{task.name}-{recipe_hash([unit.key for unit in units])}.json"
    target.write_json(name, {
        "task": task.name, "file": task.where, "num_fewshot": task.config.num_fewshot or 0, "items": len(values),
        **about, "figures": [asdict(figure) for figure in results], "units": [unit.key for unit in units]})
    return TaskResult(task.name, tuple(results), len(values), answered, target.at(name))


def missing(output: str, units: Iterable[Unit]) -> tuple[dict[str, Published], list[Unit]]:
    """Return the units that are published, by key, and those that are not.

    Args:
        output: folder of the evaluation.
        units: the units.
    """
    units = list(units)
    present = lookup(storage.store(output), units)
    return present, [unit for unit in units if unit.key not in present]


def evaluate(scorer: Scorer, options: Options, output: str, *, about: Mapping[str, Any] | None = None,
             on_progress: OnProgress = lambda done, total: None) -> list[TaskResult]:
    """Evaluate tasks in this process.

    Args:
        scorer: the model.
        options: what to evaluate.
        output: folder for the units and the results.
        about: what to write into the results, such as the checkpoint.
        on_progress: called as units are done.

    Raises:
        ConfigError: a task file is wrong.
        InputError: a task's data is missing or wrong.
    """
    tasks = options.open()
    items = [items_of(task, scorer, chat=options.chat) for task in tasks]  # before the first answer
    total, done = sum(len(part) for part in items), 0
    results = []
    for task, own in zip(tasks, items):
        units = units_of(task, scorer.identity(), chat=options.chat)
        present, to_do = missing(output, units)
        done += len(own) - sum(size_of(unit, task) for unit in to_do)
        on_progress(done, total)
        for unit in to_do:
            present[unit.key] = answer(task, own, scorer, output, unit, chat=options.chat)
            done += size_of(unit, task)
            on_progress(done, total)
        results.append(result_of(task, units, present, output, sum(size_of(unit, task) for unit in to_do),
                                 {"chat": options.chat, **(about or {})}))
    return results


def size_of(unit: Unit, task: Task) -> int:
    """Return the number of items of a unit."""
    return min(UNIT, len(task.documents) - unit.number * UNIT)


def _line(task: Task, item: Item, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the record of an item: what the model was asked, what it answered, and the metrics."""
    try:
        values = judged(item, answers, task.config, task.metrics)
    except expressions.ExpressionError as error:
        raise InputError(str(error), where=f"{task.where}, item {item.index + 1}", fix="write the filter or metric "
                         "without a repetition inside a repetition, such as (a+)+") from None
    return {"item": item.index, "requests": [_request(request) for request in item.requests],
            "answers": [_answer(one) for one in answers], "gold": item.gold, "values": values}


def _request(request: Request) -> dict[str, Any]:
    return asdict(request)


def _answer(value: Answer) -> Any:
    return asdict(value) if isinstance(value, Likelihood) else value
