"""A corpus of real text from this machine's Python installation, as messy as a small web crawl.

It consists of docstrings of the standard library and of Tidewheel's dependencies, source files, help topics, bundled
documents, licences and readmes. Licences are near-duplicates of each other, vendored packages are exact duplicates, and
source files fail quality filters. Some documents contain items of a small evaluation set, and a few records are broken
on purpose, so that the demo shows how the pipeline handles them.

The same Python environment gives the same bytes: hashes of ids determine the order, and the corpus contains no time, no
host name and no path outside the packages.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from tidewheel.demo.eval_items import QUESTIONS
from tidewheel.storage import Store

NUM_FILES = 16
# Share of the corpus by source. Package docstrings come last and fill the room that other sources leave.
SHARES = {"licences": 0.16, "topics": 0.04, "bundled": 0.02, "readmes": 0.08, "sources": 0.05,
          "stdlib_docstrings": 0.15}
PACKAGES = ("numpy", "torch", "ray", "pyarrow", "matplotlib", "pydantic", "pandas", "numba", "networkx", "fsspec",
            "sympy", "aiohttp", "rich", "cyclopts", "datasketch", "tokenizers", "botocore", "pip/_vendor")
SKIPPED_FOLDERS = frozenset({"test", "tests", "site-packages", "__pycache__", "idle_test", "lib-dynload"})
MIN_CHARACTERS, MAX_CHARACTERS = 200, 250_000
NUM_HELD_OUT = 20  # number of evaluation items that are cut from documents; the corpus leaves these documents out
PLANT_EVERY = 5  # one evaluation item in five is not planted, and decontamination must not find it
LICENCE_NAMES = ("LICEN", "COPYING", "NOTICE", "AUTHORS")
_DOCSTRING = re.compile(r'^[ \t]*[rRuU]{0,2}("""|\'\'\')(.*?)\1', re.S | re.M)
_RULER = re.compile(r"^[ \t]*[-=~^*\"'#]{3,}[ \t]*\n", re.M)
_LETTERS, _OTHER = re.compile(r"\b\d*[^\W\d]\w*"), re.compile(r"[^\w\s]+|\b\d+\b")
MIN_ALPHABETIC = 0.8  # Gopher's share of tokens with a letter, applied to paragraphs: prose passes, code does not
_SENTENCE = re.compile(r"(?<=\.\s|\n\n)([A-Z][a-z]+(?:[ \n]\w[\w,'-]*){15,28}\.)(?=\s)")


@dataclass(frozen=True)
class CorpusInfo:
    """What `build_corpus` wrote.

    Attributes:
        files: keys of the JSONL files, below "corpus/".
        documents: readable documents in them.
        bytes: UTF-8 bytes of their text.
        planted: ids of the documents that hold an evaluation item, sorted.
        evals: keys of the evaluation files, below "evals/".
        bad_records: records in the files that no reader should accept.
        sources: documents by source.
    """

    files: tuple[str, ...]
    documents: int
    bytes: int
    planted: tuple[str, ...]
    evals: tuple[str, ...]
    bad_records: int
    sources: dict[str, int]


@dataclass
class _Document:
    id: str
    text: str
    source: str
    licence: str = ""

    def line(self) -> bytes:
        meta = json.dumps({"licence": self.licence, "path": self.id.partition("/")[2]}, sort_keys=True)
        record = {"id": self.id, "text": self.text, "source": self.source, "meta": meta}
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def build_corpus(store: Store, *, max_bytes: int = 8_000_000, seed: int = 0, bad_records: bool = True) -> CorpusInfo:
    """Write the corpus below "corpus/" and its evaluation set below "evals/" of `store`.

    Args:
        store: where to write; files of an earlier corpus are overwritten.
        max_bytes: approximate size limit of the text, in UTF-8 bytes.
        seed: selects the documents if more exist than fit, and the places of planted items.
        bad_records: also write five broken records (bad JSON, truncated, no text, text is not a string, not UTF-8).

    Raises:
        StorageError: the store cannot be written to.
    """
    documents = _collect(max_bytes, seed)
    documents, items = _hold_out(documents, seed)
    planted, placed = _plant(documents, items, seed)
    files = _write_files(store, documents, _broken() if bad_records else [])
    evals = _write_evals(store, items, placed)
    counts: dict[str, int] = {}
    for document in documents:
        counts[document.source] = counts.get(document.source, 0) + 1
    return CorpusInfo(tuple(files), len(documents), sum(len(d.text.encode()) for d in documents),
                      tuple(sorted(planted)), tuple(evals), len(_broken()) if bad_records else 0,
                      dict(sorted(counts.items())))


# -- sources of text ---------------------------------------------------------------------------


def _collect(max_bytes: int, seed: int) -> list[_Document]:
    """Return documents of every source up to its share, sorted by id; ids are unique."""
    sources = {"licences": _licences, "topics": _topics, "bundled": _bundled, "readmes": _readmes,
               "sources": _sources, "stdlib_docstrings": _stdlib_docstrings, "package_docstrings": _package_docstrings}
    taken: dict[str, _Document] = {}
    total = 0
    for name, documents in sources.items():
        room = int(max_bytes * SHARES[name]) if name in SHARES else max_bytes - total
        for document in documents(seed):
            size = len(document.text.encode())
            if document.id in taken or size > room or not MIN_CHARACTERS <= len(document.text) <= MAX_CHARACTERS:
                continue
            taken[document.id] = document
            room -= size
            total += size
            if room < MIN_CHARACTERS:
                break
    return [taken[key] for key in sorted(taken)]


def _topics(seed: int) -> Iterator[_Document]:
    topics = importlib.import_module("pydoc_data.topics").topics
    for name in _shuffled(topics, seed):
        yield _Document(f"topics/{name}", topics[name], "topics", "PSF-2.0")


def _bundled(seed: int) -> Iterator[_Document]:
    """Yield the interpreter's own text files: its licence, IDLE's help and news, turtle's demos, grammars."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in _shuffled(_files(root, ".txt", ".rst", ".html", ".md"), seed):
        text = _text(path)
        if path.suffix == ".html":
            text = re.sub(r"\n{3,}", "\n\n", re.sub(r"<[^>]+>", "", text))
        yield _Document(f"bundled/{path.relative_to(root).as_posix()}", text, "bundled", "PSF-2.0")


def _stdlib_docstrings(seed: int) -> Iterator[_Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in _shuffled(_files(root, ".py"), seed):
        yield _Document(f"docstrings/python/{_module(path, root)}", _docstrings(path), "docstrings", "PSF-2.0")


def _package_docstrings(seed: int) -> Iterator[_Document]:
    roots = [Path(entry) for entry in dict.fromkeys(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib"))]
    root_of = {path: root for root in roots for name in PACKAGES for path in _files(root / name, ".py")}
    for path in _shuffled(root_of, seed):
        module = _module(path, root_of[path])
        yield _Document(f"docstrings/{module.partition('.')[0]}/{module}", _docstrings(path), "docstrings")


def _sources(seed: int) -> Iterator[_Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in _shuffled(_files(root, ".py"), seed):
        yield _Document(f"sources/python/{_module(path, root)}", _text(path), "sources", "PSF-2.0")


def _licences(seed: int) -> Iterator[_Document]:
    files = {f"licences/{name}/{path.relative_to(folder).as_posix()}": (path, licence)
             for name, licence, folder, _ in _distributions() for path in sorted(folder.rglob("*"))
             if path.is_file() and any(mark in path.name.upper() for mark in LICENCE_NAMES)}
    for key in _shuffled(files, seed):
        yield _Document(key, _text(files[key][0]), "licences", files[key][1])


def _readmes(seed: int) -> Iterator[_Document]:
    readmes = {f"readmes/{name}": (text, licence) for name, licence, _, text in _distributions()}
    for key in _shuffled(readmes, seed):
        yield _Document(key, readmes[key][0], "readmes", readmes[key][1])


def _distributions() -> list[tuple[str, str, Path, str]]:
    """Return (name, licence, dist-info folder, readme) of every installed package but Tidewheel, which changes "
      "often."""
    folders = {path.name: path for entry in sys.path if entry for path in sorted(Path(entry).glob("*.dist-info"))}
    distributions = []
    for folder in (folders[name] for name in sorted(folders)):
        headers = HeaderParser().parsestr(_text(folder / "METADATA"))
        name = str(headers["Name"] or "").lower()
        if name and name != "tidewheel":
            licence = str(headers["License-Expression"] or headers["License"] or "").strip().partition("\n")[0][:60]
            distributions.append((name, licence, folder, str(headers.get_payload())))
    return distributions


def _files(root: Path, *suffixes: str) -> list[Path]:
    """Return the files below `root` with one of the suffixes, without tests and generated files."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        files += [Path(folder, name) for name in names
                  if name.endswith(suffixes) and not name.startswith("_sysconfigdata")]  # generated: has our paths
    return sorted(files)


def _text(path: Path) -> str:
    """Return the file's text; "" if it is missing or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _docstrings(path: Path) -> str:
    """Return the prose of all docstrings of a module, in order. A regular expression is 30 times faster than `ast`."""
    docs = (_RULER.sub("", inspect.cleandoc(match[2])) for match in _DOCSTRING.finditer(_text(path)))
    paragraphs = (paragraph.strip("\n") for doc in docs for paragraph in re.split(r"\n[ \t]*\n", doc))
    return "\n\n".join(paragraph for paragraph in paragraphs if _is_prose(paragraph))


def _is_prose(paragraph: str) -> bool:
    letters = len(_LETTERS.findall(paragraph))
    return letters > 3 and letters * (1 - MIN_ALPHABETIC) >= len(_OTHER.findall(paragraph)) * MIN_ALPHABETIC


def _module(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _shuffled(keys, seed: int) -> list:
    """Return `keys` in an order that depends on the seed and each key's last parts, not on Python's location."""
    def rank(key: str | Path) -> str:
        name = "/".join(key.parts[-3:]) if isinstance(key, Path) else key
        return hashlib.blake2b(f"{seed}:{name}".encode()).hexdigest()

    return sorted(sorted(keys), key=rank)


# -- the evaluation set ------------------------------------------------------------------------


def _hold_out(documents: list[_Document], seed: int) -> tuple[list[_Document], list[dict[str, str]]]:
    """Take a few documents out of the corpus and cut a sentence from each that nothing else contains.

    Returns:
        The documents that stay, and the evaluation items: invented questions and held-out sentences.
    """
    items = [{"id": f"question-{index:02d}", "question": question, "answer": answer}
             for index, (question, answer) in enumerate(QUESTIONS)]
    everything = "\n".join(_words(document.text) for document in documents)
    out: set[str] = set()
    for document in sorted(documents, key=lambda d: _rank(seed, "held-out", d.id)):
        if len(out) == NUM_HELD_OUT:
            break
        if document.source != "docstrings" or len(document.text) > 20_000:
            continue
        for match in _SENTENCE.finditer(document.text):
            sentence = " ".join(match[1].split())
            words = _words(sentence).split()
            # every 8-gram must be unique to this document, or decontamination would correctly flag other documents too
            grams = [" ".join(words[i:i + 8]) for i in range(len(words) - 7)]
            if len(words) >= 16 and all(everything.find(g, everything.find(g) + 1) < 0 for g in grams):
                items.append({"id": f"sentence-{len(out):02d}", "text": sentence})
                out.add(document.id)
                break
    return [document for document in documents if document.id not in out], items


def _plant(documents: list[_Document], items: list[dict[str, str]], seed: int) -> tuple[list[str], dict[str, str]]:
    """Insert items verbatim between paragraphs of documents; return the documents' ids and {item: document}."""
    hosts = [d for d in sorted(documents, key=lambda d: _rank(seed, "host", d.id))
             if d.source == "docstrings" and 1500 <= len(d.text) <= 30_000 and d.text.count("\n\n") >= 4]
    placed = {}
    planted_items = [item for index, item in enumerate(items) if index % PLANT_EVERY != PLANT_EVERY - 1]
    for item, host in zip(planted_items, hosts):
        passage = item.get("text") or f"{item['question']} {item['answer']}"
        paragraphs = host.text.split("\n\n")
        at = 1 + int(_rank(seed, "place", host.id), 16) % (len(paragraphs) - 1)
        host.text = "\n\n".join([*paragraphs[:at], passage, *paragraphs[at:]])
        placed[item["id"]] = host.id
    return list(placed.values()), placed


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _rank(seed: int, use: str, key: str) -> str:
    return hashlib.blake2b(f"{seed}:{use}:{key}".encode(), digest_size=8).hexdigest()


# -- writing -----------------------------------------------------------------------------------


def _broken() -> list[bytes]:
    """Return records broken as in real crawls and exports. A pipeline must report each one and not stop."""
    return [b'{"id": "broken/bad-json", "text": "the quote that never closes}\n',
            b'{"id": "broken/no-text", "source": "broken", "body": "the text is under another key"}\n',
            b'{"id": "broken/text-is-a-number", "text": 42, "source": "broken"}\n',
            '{"id": "broken/latin-1", "text": "caf\u00e9 na\u00efve \u00fcber"}\n'.encode("latin-1"),
            b'{"id": "broken/cut-off", "text": "the disk was full when this li\n']


def _write_files(store: Store, documents: list[_Document], broken: list[bytes]) -> list[str]:
    parts: list[list[bytes]] = [[] for _ in range(NUM_FILES)]
    for document in documents:
        parts[int(_rank(0, "file", document.id), 16) % NUM_FILES].append(document.line())
    for index, record in enumerate(broken):
        lines = parts[(3 * index + 1) % NUM_FILES]
        lines.insert(len(lines) // 2, record)
    keys = [f"corpus/part-{index:05d}.jsonl" for index in range(NUM_FILES)]
    for key, lines in zip(keys, parts):
        store.write(key, b"".join(lines))
    return keys


def _write_evals(store: Store, items: list[dict[str, str]], placed: dict[str, str]) -> list[str]:
    """Write two benchmarks in the usual form, and, outside the pipeline's input, which document holds which item."""
    keys = []
    for name in ("question", "sentence"):
        lines = [json.dumps(item).encode() + b"\n" for item in items if item["id"].startswith(name)]
        keys.append(f"evals/{name}s.jsonl")
        store.write(keys[-1], b"".join(lines))
    store.write_json("planted.json", placed)
    return keys
