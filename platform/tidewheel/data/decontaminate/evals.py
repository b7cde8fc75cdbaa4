"""Evaluation items: loading them from storage, and fingerprints of sets of items."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from tidewheel import storage
from tidewheel.data.compression import decompress
from tidewheel.errors import InputError

TEXT_FIELDS = ("question", "text", "prompt", "query", "input", "problem")
CONTEXT_FIELDS = ("context", "passage", "story", "article")
ANSWER_FIELDS = ("answer", "answers", "solution", "canonical_solution", "target", "output")
NAME_FIELDS = ("benchmark", "name", "dataset")
_ENDINGS = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class EvalItem:
    """Evaluation item whose texts must not be trained on.

    Args:
        name: name of its benchmark.
        item: its id in the benchmark.
        text: the question, after the passage it is about.
        answer: the answer; a long one is also searched for without the question.
    """

    name: str
    item: str
    text: str
    answer: str = ""


def read_eval_items(source: str | storage.Store, keys: Sequence[str] | None = None) -> list[EvalItem]:
    """Load the items of JSONL files (plain or .gz), sorted by benchmark and id.

    Each line is a JSON object with a text (the first of `TEXT_FIELDS`). Optional fields are a text before it (the first
    of `CONTEXT_FIELDS`), an answer (the first of `ANSWER_FIELDS`: the longest of a list; a number is an index into
    "choices"), "id" (default: the line number) and "benchmark" (default: the name of the file).

    Args:
        source: a store; or the URI of a file, of a folder (every *.jsonl and *.jsonl.gz below it), or a pattern with *
            in the file name.
        keys: objects of a store; default: all *.jsonl and *.jsonl.gz.

    Raises:
        InputError: no file matches, or a line is not such an object.
    """
    if isinstance(source, storage.Store):
        store = source
        names = list(keys) if keys is not None else _all(source)
    elif source.rstrip("/").endswith(_ENDINGS) or "*" in source:
        store, name = storage.split(source)
        names = list(store.glob(name)) if "*" in name else [name]
    else:
        store = storage.store(source)
        names = _all(store)
    items = [item for name in names for item in _read(store, name)]
    if not items:
        raise InputError("no evaluation items found", where=str(source),
                         fix="give JSONL files with a question and an id on each line")
    return sorted(items, key=lambda item: (item.name, item.item, item.text, item.answer))


def fingerprints(items: Iterable[EvalItem]) -> tuple[dict[str, object], ...]:
    """Return {"name", "hash", "items"} of each benchmark, sorted by name.

    The hash covers ids and texts and does not depend on the order of the items.
    """
    groups: dict[str, list[EvalItem]] = {}
    for item in items:
        groups.setdefault(item.name, []).append(item)
    entries: list[dict[str, object]] = []
    for name in sorted(groups):
        digest = blake3()
        for item in sorted(groups[name], key=lambda item: (item.item, item.text, item.answer)):
            for part in (item.item, item.text, item.answer):
                data = part.encode()
                digest.update(len(data).to_bytes(8, "little") + data)
        entries.append({"name": name, "hash": "blake3-" + digest.hexdigest(), "items": len(groups[name])})
    return tuple(entries)


def _all(store: storage.Store) -> list[str]:
    return [entry.key for entry in store.list() if entry.key.endswith(_ENDINGS)]


def _read(store: storage.Store, name: str) -> list[EvalItem]:
    try:
        data = store.read(name)
    except FileNotFoundError:
        raise InputError("no such file of evaluation items", where=store.at(name),
                         fix="correct the path in the step decontaminate") from None
    try:
        lines = decompress(data, store.at(name)).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"cannot be read as UTF-8 text ({error})", where=store.at(name),
                         fix="give UTF-8 JSONL, plain or compressed with gzip") from None
    stem = name.rpartition("/")[2].partition(".")[0]
    return [_item(line, stem, line_number, store.at(name)) for line_number, line in enumerate(lines, 1) if line.strip()]


def _item(line: str, stem: str, line_number: int, where: str) -> EvalItem:
    try:
        values: Any = json.loads(line)
    except ValueError as error:
        raise InputError(f"not valid JSON ({error})", where=f"{where}:{line_number}",
                         fix="give one JSON object on each line") from None
    content = _first(values, TEXT_FIELDS) if isinstance(values, dict) else ""
    if not content:
        raise InputError("an evaluation item has no text", where=f"{where}:{line_number}",
                         fix=f"give each item one of the fields {', '.join(TEXT_FIELDS)}")
    name = next((str(values[key]) for key in NAME_FIELDS if values.get(key)), stem)
    context = _first(values, CONTEXT_FIELDS)
    identity = values.get("id")
    return EvalItem(name, str(line_number if identity is None else identity),
                    f"{context}\n{content}" if context else content, _answer(values))


def _first(values: dict[str, Any], names: Sequence[str]) -> str:
    """Return the first of these fields that is a string; "" if there is none."""
    return next((values[name] for name in names if isinstance(values.get(name), str)), "")


def _answer(values: dict[str, Any]) -> str:
    answer = next((values[name] for name in ANSWER_FIELDS if values.get(name) is not None), "")
    choices = values.get("choices")
    if isinstance(answer, int) and isinstance(choices, list) and 0 <= answer < len(choices):
        answer = choices[answer]
    options = answer if isinstance(answer, list) else [answer]
    return max((option for option in options if isinstance(option, str)), key=len, default="")
