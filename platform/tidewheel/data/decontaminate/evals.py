"""Evaluation items: reading them from storage, and the fingerprint of a set of them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from tidewheel import storage
from tidewheel.errors import InputError

TEXT_FIELDS = ("question", "text", "prompt", "query", "input", "problem")
CONTEXT_FIELDS = ("context", "passage", "story", "article")
ANSWER_FIELDS = ("answer", "answers", "solution", "canonical_solution", "target", "output")
NAME_FIELDS = ("benchmark", "name", "dataset")
_ENDINGS = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class EvalItem:
    """One item: name of its benchmark, its id there, and the texts that must not be trained on: the question with
    the passage it is about, and the answer, which is searched for alone where it is long."""

    name: str
    item: str
    text: str
    answer: str = ""


def read_eval_items(place: str | storage.Store, keys: Sequence[str] | None = None) -> list[EvalItem]:
    """Items of JSONL files (plain or .gz), sorted by benchmark and id.

    Args:
        place: the URI of a file, of a folder (every *.jsonl and *.jsonl.gz below it) or a pattern with
            * in the file name; or a store, then `keys` says which objects.
        keys: objects of a store; default all *.jsonl and *.jsonl.gz.

    A line is an object with a text (the first of `TEXT_FIELDS`), and optionally a text that comes before it (the
    first of `CONTEXT_FIELDS`), an answer (the first of `ANSWER_FIELDS`; of a list the longest; a number is the place
    of the answer in "choices"), "id" (default: the line's number) and "benchmark" (default: the file's name).

    Raises:
        InputError: no file matches, or a line is no such object.
    """
    if isinstance(place, storage.Store):
        where, names = place, list(keys) if keys is not None else _all(place)
    elif place.rstrip("/").endswith(_ENDINGS) or "*" in place:
        where, name = storage.split(place)
        names = list(where.glob(name)) if "*" in name else [name]
    else:
        where = storage.store(place)
        names = _all(where)
    items = [item for name in names for item in _read(where, name)]
    if not items:
        raise InputError("no evaluation items found", where=str(place),
                         fix="give JSONL files with a question and an id on each line")
    return sorted(items, key=lambda item: (item.name, item.item, item.text, item.answer))


def fingerprints(items: Iterable[EvalItem]) -> tuple[dict[str, object], ...]:
    """{"name", "hash", "items"} of each benchmark, sorted by name; the hash covers ids and texts in any order."""
    groups: dict[str, list[EvalItem]] = {}
    for item in items:
        groups.setdefault(item.name, []).append(item)
    found: list[dict[str, object]] = []
    for name in sorted(groups):
        digest = blake3()
        for item in sorted(groups[name], key=lambda item: (item.item, item.text, item.answer)):
            for part in (item.item, item.text, item.answer):
                data = part.encode()
                digest.update(len(data).to_bytes(8, "little") + data)
        found.append({"name": name, "hash": "blake3-" + digest.hexdigest(), "items": len(groups[name])})
    return tuple(found)


def _all(place: storage.Store) -> list[str]:
    return [entry.key for entry in place.list() if entry.key.endswith(_ENDINGS)]


def _read(place: storage.Store, name: str) -> list[EvalItem]:
    try:
        data = place.read(name)
    except FileNotFoundError:
        raise InputError("no such file of evaluation items", where=place.at(name),
                         fix="correct the path in the decontaminate step") from None
    try:
        lines = (gzip.decompress(data) if name.endswith(".gz") else data).decode("utf-8").split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read as UTF-8 text ({error})", where=place.at(name),
                         fix="give UTF-8 JSONL, plain or gzip") from None
    stem = name.rpartition("/")[2].partition(".")[0]
    return [_item(line, stem, number, place.at(name)) for number, line in enumerate(lines, 1) if line.strip()]


def _item(line: str, stem: str, number: int, where: str) -> EvalItem:
    try:
        values: Any = json.loads(line)
    except ValueError as error:
        raise InputError(f"not valid JSON ({error})", where=f"{where}:{number}",
                         fix="one JSON object on each line") from None
    content = _first(values, TEXT_FIELDS) if isinstance(values, dict) else ""
    if not content:
        raise InputError("an item has no text", where=f"{where}:{number}",
                         fix=f"give one of the fields {', '.join(TEXT_FIELDS)}")
    name = next((str(values[key]) for key in NAME_FIELDS if values.get(key)), stem)
    context = _first(values, CONTEXT_FIELDS)
    identity = values.get("id")
    return EvalItem(name, str(number if identity is None else identity),
                    f"{context}\n{content}" if context else content, _answer(values))


def _first(values: dict[str, Any], names: Sequence[str]) -> str:
    """The first of these fields that is a string, or empty."""
    return next((values[name] for name in names if isinstance(values.get(name), str)), "")


def _answer(values: dict[str, Any]) -> str:
    found = next((values[name] for name in ANSWER_FIELDS if values.get(name) is not None), "")
    choices = values.get("choices")
    if isinstance(found, int) and isinstance(choices, list) and 0 <= found < len(choices):
        found = choices[found]
    options = found if isinstance(found, list) else [found]
    return max((option for option in options if isinstance(option, str)), key=len, default="")
