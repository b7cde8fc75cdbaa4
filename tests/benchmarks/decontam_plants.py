"""Plant evaluation items into documents: reformatted, edited, halved, and texts that only resemble items."""

from __future__ import annotations

import html
import json
import random
import re
import string
import textwrap
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidewheel.data.decontaminate.evals import EvalItem

Change = Callable[[EvalItem, random.Random], str]
_ACCENTS = {"e": "\u00e9", "a": "\u00e0", "o": "\u00f6", "u": "\u00fc", "i": "\u00ee"}


@dataclass(frozen=True)
class Plant:
    """A document, the kind of its change, and the item in it (None if there is none)."""

    kind: str
    text: str
    item: EvalItem | None


def _case(item: EvalItem, random: random.Random) -> str:
    return random.choice([str.upper, str.lower, str.title])(item.text)


def _spaces(item: EvalItem, random: random.Random) -> str:
    return "".join(random.choice(["  ", "\n", " \t", "\u00a0"]) if letter == " " and random.random() < 0.4 else letter
                   for letter in item.text)


def _no_punctuation(item: EvalItem, random: random.Random) -> str:
    return item.text.translate(str.maketrans("", "", string.punctuation + "\u2019"))


def _no_apostrophes(item: EvalItem, random: random.Random) -> str:
    return re.sub("['\u2019]", random.choice(["", " "]), item.text)


def _typographic(item: EvalItem, random: random.Random) -> str:
    text = item.text.replace("'", "\u2019").replace(" - ", " \u2014 ")
    return re.sub('"([^"]*)"', "\u201c\\1\u201d", text)


def _json(item: EvalItem, random: random.Random) -> str:
    return json.dumps({"q": item.text}, ensure_ascii=random.random() < 0.5)


def _html(item: EvalItem, random: random.Random) -> str:
    return "<p>" + html.escape(item.text).replace("\n", "<br/>\n") + "</p>"


def _markdown(item: EvalItem, random: random.Random) -> str:
    lines = textwrap.wrap(item.text, 72) or [item.text]
    return "\n".join(f"> {line}" for line in lines).replace(" the ", " **the** ")


def _accents(item: EvalItem, random: random.Random) -> str:
    text = "".join(_ACCENTS.get(letter, letter) if random.random() < 0.3 else letter for letter in item.text)
    return unicodedata.normalize(random.choice(["NFC", "NFD"]), text)


def _hyphens(item: EvalItem, random: random.Random) -> str:
    """Break into lines of about 60 characters and hyphenate a word at the end of every other line."""
    lines, width = [], 0
    for word in item.text.split():
        width += len(word) + 1
        if width > 60 and len(word) > 6 and word.isalpha():
            word, width = f"{word[:4]}-\n{word[4:]}", 0
        lines.append(word)
    return " ".join(lines)


def _numbered(item: EvalItem, random: random.Random) -> str:
    """Format as an exam question, with a number before and choices after."""
    marks = random.choice(["ABCD", "1234"])
    return f"{random.randint(1, 99)}. {item.text}\n" + "\n".join(f"{mark}) {word}" for mark, word in zip(
        marks, random.choices(item.text.split(), k=4), strict=True))


def _edited(kind: str) -> Change:
    def change(item: EvalItem, random: random.Random) -> str:
        words = item.text.split(" ")
        for _ in range(random.randint(1, 3 if len(words) >= 12 else 2 if len(words) >= 10 else 1)):
            at = random.randrange(len(words))
            if kind == "substitute":
                words[at] = random.choice(_WORDS)
            elif kind == "delete" and len(words) > 1:
                del words[at]
            elif kind == "insert":
                words.insert(at, random.choice(_WORDS))
            elif kind == "swap" and len(words) > 1:
                at = min(at, len(words) - 2)
                words[at], words[at + 1] = words[at + 1], words[at]
            elif kind == "typo" and len(words[at]) > 2:
                index = random.randrange(len(words[at]))
                words[at] = words[at][:index] + random.choice(string.ascii_lowercase) + words[at][index + 1 :]
        return " ".join(words)
    return change


def _half(item: EvalItem, random: random.Random) -> str:
    words = item.text.split(" ")
    middle = (len(words) + 1) // 2
    return " ".join(words[:middle] if random.random() < 0.5 else words[len(words) - middle :])


def _phrase(item: EvalItem, random: random.Random) -> str:
    words = item.text.split()
    at = random.randrange(max(len(words) - 6, 1))
    return " ".join(words[at : at + 6])


def _shuffled(item: EvalItem, random: random.Random) -> str:
    words = item.text.split()
    random.shuffle(words)
    return " ".join(words)


_WORDS = ["copper", "often", "seven", "modern", "leaves", "behind", "written", "garden", "window", "under", "green",
          "paper", "never", "during", "small", "answer", "river", "strong", "figure", "market", "result", "people"]
#: kind -> (change, fewest words of an item, whether the document still contains the item)
KINDS: dict[str, tuple[Change, int, bool]] = {
    "verbatim": (lambda item, random: item.text, 8, True),
    "case": (_case, 8, True),
    "white space": (_spaces, 8, True),
    "no punctuation": (_no_punctuation, 8, True),
    "no apostrophes": (_no_apostrophes, 8, True),
    "typographic": (_typographic, 8, True),
    "JSON": (_json, 8, True),
    "HTML": (_html, 8, True),
    "markdown": (_markdown, 8, True),
    "accents": (_accents, 8, True),
    "hyphenated lines": (_hyphens, 8, True),
    "exam sheet": (_numbered, 8, True),
    "1-3 substituted": (_edited("substitute"), 8, True),
    "1-3 deleted": (_edited("delete"), 8, True),
    "1-3 inserted": (_edited("insert"), 8, True),
    "1-3 swapped": (_edited("swap"), 8, True),
    "1-3 typos": (_edited("typo"), 8, True),
    "half": (_half, 20, True),
    "six-word phrase": (_phrase, 8, False),
    "shuffled words": (_shuffled, 8, False),
}


def plant(items: Sequence[EvalItem], carriers: Sequence[str], each: int, seed: int = 11) -> list[Plant]:
    """Return `each` documents of every kind of `KINDS`: a carrier with a changed item between two of its lines.

    Items have up to 400 words separated by white space. Benchmarks are drawn evenly, so that small ones count.
    """
    benchmarks: dict[str, list[EvalItem]] = {}
    for item in items:
        if 8 <= len(re.findall(r"\w+", item.text)) <= 400:
            benchmarks.setdefault(item.name, []).append(item)
    plants = []
    for kind, (change, fewest, present) in KINDS.items():
        draw = random.Random(f"{seed} {kind}")
        while sum(entry.kind == kind for entry in plants[-each:]) < each:
            item = draw.choice(benchmarks[draw.choice(sorted(benchmarks))])
            if len(re.findall(r"\w+", item.text)) < fewest:
                continue
            lines = draw.choice(carriers).split("\n")
            at = draw.randrange(len(lines) + 1)
            text = "\n".join([*lines[:at], change(item, draw), *lines[at:]])
            plants.append(Plant(kind, text, item if present else None))
    return plants
