"""A task: its settings and data, and the requests of each item."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tidewheel.config import recipe_hash
from tidewheel.errors import InputError
from tidewheel.inference.tasks.config import TaskConfig, read_task
from tidewheel.inference.tasks.documents import read_splits
from tidewheel.inference.tasks.metrics import Metric, metrics_of
from tidewheel.inference.tasks.prompts import (
    SEED,
    Delimiters,
    Examples,
    RenderChat,
    Turn,
    answer_text,
    rendered,
    turns,
)
from tidewheel.inference.tasks.requests import Generate, Item, LogLikelihood, Request, Rolling
from tidewheel.inference.tasks.templates import Document, Templates, literal


class Task:
    """A task with its data.

    Args:
        config: its settings.
        where: URI of its file, for error messages.
        limit: evaluate only this number of items, from the first; 0: all.
        seed: of the examples.

    Raises:
        InputError: the data is missing, or has no items.
        ConfigError: a metric does not exist for the output type.
    """

    def __init__(self, config: TaskConfig, where: str, *, limit: int = 0, seed: int = SEED) -> None:
        self.config, self.where, self.seed = config, where, seed
        self._splits = read_splits(config, where)
        split = self._splits[config.split]
        self.documents: Sequence[Document] = split.documents[:limit or None]
        self.metrics: list[Metric] = metrics_of(config, where)
        self._templates = Templates(where, split.fields)

    @classmethod
    def open(cls, uri: str, *, num_fewshot: int | None = None, limit: int = 0, seed: int = SEED) -> Task:
        """Read a task file and its data.

        Args:
            uri: of the file.
            num_fewshot: examples of each item; default: as the file says.
            limit: see `Task`, also for the other arguments.
            seed: of the examples.

        Raises:
            ConfigError: a setting is wrong.
            InputError: the data is missing, or has no items.
        """
        config = read_task(uri)
        if num_fewshot is not None and config.output_type != "loglikelihood_rolling":
            config = config.model_copy(update={"num_fewshot": num_fewshot})
        return cls(config, uri, limit=limit, seed=seed)

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.config.task

    def key(self) -> str:
        """Return the hash of what decides the requests: settings, data and seed."""
        settings = self.config.decisive()
        settings.pop("dataset_kwargs")  # the content counts, not its place
        hashes = {name: split.hash for name, split in self._splits.items()}
        return recipe_hash([settings, hashes, self.seed])

    def items(self, chat: RenderChat | None = None) -> list[Item]:
        """Return all items with their requests.

        Args:
            chat: renders messages; None: prompts are plain text.

        Raises:
            InputError: a template uses an unknown field, an item has no choices, or its target is out of range.
        """
        if chat is not None and self.config.gen_prefix:
            raise InputError("gen_prefix begins the answer, which a chat template here cannot", where=self.where,
                             fix="leave --chat or gen_prefix out")
        examples = self._examples()
        own_split = self._pool_is_own
        return [self._item(index, document, examples.draw(document if own_split else None), chat)
                for index, document in enumerate(self.documents)]

    @cached_property
    def _pool_is_own(self) -> bool:
        """Whether an item may be drawn as its own example: the settings name one split for both."""
        return (self.config.fewshot_config.split or self.config.fewshot_split) == self.config.test_split

    def _examples(self) -> Examples:
        config = self.config
        count, first = config.num_fewshot or 0, config.fewshot_config.sampler == "first_n"
        pool: Sequence[Document] = []
        if count:
            given = config.fewshot_config.samples
            pool = given if given is not None else self._splits[config.pool_split].documents
        return Examples(pool, count, first=first, seed=self.seed, where=self.where)

    def _item(self, index: int, document: Document, examples: Sequence[Document], chat: RenderChat | None) -> Item:
        config, row = self.config, str(index + 1)
        at = f"{self.where}, item {row}"
        choices = self._choices(config.doc_to_choice, document, row)
        target = self._target(config.doc_to_target, document, row)
        said = self._description(document, row)
        for number, example in enumerate(examples, 1):
            said += self._example(example, f"{row}, example {number}")
        question = self._question(config.doc_to_text, document, row)
        prefix = self._prefix(config.gen_prefix, document, row)
        delimiters = Delimiters(config.target_delimiter, "")

        def prompt(text: Any) -> str:
            if not isinstance(text, str):
                raise InputError(f"the prompt is {text!r}, not a text", where=at,
                                 fix="make doc_to_text a text; an index needs doc_to_choice")
            return rendered([*said, *turns(text, None, prefix, delimiters)], chat)

        requests: list[Request]
        gold: Any = target
        if config.output_type == "multiple_choice":
            delimiter = "" if chat is not None else config.target_delimiter
            if isinstance(question, int):  # the choices are prompts, and the target follows each
                gold = question
                requests = [LogLikelihood(prompt(choice), f"{delimiter}{target}") for choice in choices]
            else:
                requests = [LogLikelihood(prompt(question), f"{delimiter}{choice}") for choice in choices]
            gold = _index(gold, choices, at)
        elif config.output_type == "loglikelihood":
            requests = [LogLikelihood(prompt(question), str(target))]
        elif config.output_type == "loglikelihood_rolling":
            requests, gold = [Rolling(str(target))], str(target)
        else:
            if config.doc_to_choice is not None:
                gold = answer_text(target, choices, at)
            generation = config.generation_kwargs
            requests = [Generate(prompt(question), tuple(generation.stops(config.fewshot_delimiter)),
                                 generation.max_gen_toks, generation.heat, generation.top_k, generation.top_p, index)]
            gold = [str(one) for one in gold] if isinstance(gold, list) else str(gold)
        return Item(index, tuple(requests), gold, tuple(choices))

    def _example(self, document: Document, row: str) -> list[Turn]:
        config, own = self.config, self.config.fewshot_config
        text = config.doc_to_text if own.doc_to_text is None else own.doc_to_text
        choice = config.doc_to_choice if own.doc_to_choice is None else own.doc_to_choice
        target = config.doc_to_target if own.doc_to_target is None else own.doc_to_target
        choices = self._choices(choice, document, row) if choice is not None else None
        question, answer = self._question(text, document, row), self._target(target, document, row)
        at = f"{self.where}, item {row}"
        if isinstance(question, int) and choices:
            question = answer_text(question, choices, at)
            choices = None
        prefix = self._prefix(own.gen_prefix or config.gen_prefix, document, row)
        delimiters = Delimiters(
            config.target_delimiter if own.target_delimiter is None else own.target_delimiter,
            config.fewshot_delimiter if own.fewshot_delimiter is None else own.fewshot_delimiter)
        return turns(str(question), answer_text(answer, choices, at), prefix, delimiters)

    def _description(self, document: Document, row: str) -> list[Turn]:
        text = str(self._templates.value("description", self.config.description, document, row) or "")
        return [Turn("system", text)] if text else []

    def _prefix(self, template: str | None, document: Document, row: str) -> str | None:
        return None if template is None else str(self._templates.value("gen_prefix", template, document, row))

    def _question(self, template: Any, document: Document, row: str) -> Any:
        value = self._templates.value("doc_to_text", template, document, row)
        if not isinstance(value, str) or (isinstance(template, str) and template in document):
            return value
        return int(value) if value.isdigit() and self.config.doc_to_choice is not None else value

    def _target(self, template: Any, document: Document, row: str) -> Any:
        value = self._templates.value("doc_to_target", template, document, row)
        if value is None:
            raise InputError("the item has no target", where=f"{self.where}, item {row}",
                             fix=f"add {template!r} to the item, or leave the item out")
        if not isinstance(value, str) or (isinstance(template, str) and template in document):
            return value
        if value.isdigit() and self.config.doc_to_choice is not None:
            return int(value)
        return literal(value) if value.startswith("[") and value.endswith("]") else value

    def _choices(self, template: Any, document: Document, row: str) -> list[str]:
        if template is None:
            return []
        value = list(template.values()) if isinstance(template, dict) else template
        if isinstance(value, str):
            value = self._templates.value("doc_to_choice", template, document, row)
            value = literal(value) if isinstance(value, str) else value
        at = f"{self.where}, item {row}"
        if not isinstance(value, list) or not value:
            what = "the list of choices is empty" if isinstance(value, list) else f"doc_to_choice gives {value!r}"
            raise InputError(f"{what}, not a list of choices" if not isinstance(value, list) else what, where=at,
                             fix="correct doc_to_choice, or the item's choices")
        if not all(isinstance(choice, str) and choice for choice in value):
            raise InputError(f"the choices {value!r} are not all texts", where=at, fix="make each choice a text")
        return value


def _index(gold: Any, choices: Sequence[str], where: str) -> int | list[int]:
    """Return the index of the right choice, or of the right choices.

    Raises:
        InputError: there is no such choice.
    """
    if isinstance(gold, list):
        return [_one(value, choices, where) for value in gold]
    return _one(gold, choices, where)


def _one(gold: Any, choices: Sequence[str], where: str) -> int:
    if isinstance(gold, str) and gold in choices:
        return choices.index(gold)
    if isinstance(gold, int) and 0 <= gold < len(choices):
        return int(gold)
    what = f"the target {gold!r} is out of range: there are {len(choices)} choices" if isinstance(gold, int) else \
        f"the target {gold!r} is none of the choices"
    raise InputError(what, where=where, fix="count from 0, or give the text of a choice")
