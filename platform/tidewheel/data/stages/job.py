"""What one run of a pipeline works on: the recipe with its files found, its places checked, its partitions counted.

Everything a person can have wrong about places and files is found here, before anything is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidewheel.config import Config
from tidewheel.data import readers
from tidewheel.data.config import PipelineConfig
from tidewheel.data.decontaminate.evals import EvalItem, read_eval_items
from tidewheel.data.filters import resources
from tidewheel.data.stages import one_file
from tidewheel.errors import InputError, StorageError
from tidewheel.storage import Store, absolute, content_hash, is_remote, join, split, store

if TYPE_CHECKING:
    from tidewheel.data.stages.near_index import Index

PARTITION_BYTES = 64 << 20  # of text: a worker holds several times as much while it sorts or packs a partition
PARTITION_DOCUMENTS = 4096  # where only so many documents are read, whatever the size of the files
PACKED_ENDINGS = (".gz", ".zst", ".parquet")  # files that hold about three times as much text as they have bytes
UNPACKED = 3
MIN_PARTITIONS = 4
_PARALLEL_LOOKUPS = 16


@dataclass(frozen=True)
class SourceFile:
    """One input file: its place, its name in quarantine and lineage, its length, the identity of its content, and the
    ranges it is read in (`readers.ranges`); () when it is read as a whole; what its first bytes say it holds; and how
    many documents are read of it, None for all."""

    root: str
    key: str
    name: str
    bytes: int
    fingerprint: str
    ranges: tuple[tuple[int, int], ...] = ()
    shape: readers.Shape = field(default_factory=lambda: readers.Shape("jsonl"))
    limit: int | None = None


@dataclass(frozen=True)
class Job:
    """A recipe, resolved.

    Args:
        config: the recipe.
        input: URI that relative paths are below.
        output: URI of everything the pipeline writes.
        files: input files, sorted by name.
        partitions: number of partitions of the documents.
        evals: evaluation items of the decontamination step; () without one.
        tokenizer: bytes of the given tokenizer's file; b"" when one is trained.
        chat_template: of chat and preference data, what `chat.read_template` gave.
        indexes: signatures of earlier dumps to deduplicate against, oldest first.
        references: of the files that filters read, by path as in the recipe (`resources`).
    """

    config: PipelineConfig
    input: str
    output: str
    files: tuple[SourceFile, ...]
    partitions: int
    evals: tuple[EvalItem, ...]
    tokenizer: bytes
    chat_template: str = ""
    indexes: tuple[Index, ...] = ()
    references: Mapping[str, str] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        """The output."""
        return store(self.output)

    def bound(self, settings: Config) -> dict[str, Any]:
        """Settings of a filter as JSON values for workers."""
        return resources.bound(settings, self.references)

    def identity(self, settings: Config) -> dict[str, Any]:
        """Settings of a filter as JSON values for unit keys."""
        return resources.identity(settings, self.references)


def resolve(config: PipelineConfig, *, input: str, output: str) -> Job:
    """Check the places and find the files.

    Raises:
        StorageError: the input or output cannot be used.
        InputError: no file matches a pattern, or evaluation items, the tokenizer or an index of an earlier dump are
            missing or wrong.
    """
    config, input = one_file.of_input(config, absolute(input))
    output = absolute(output)
    files = _source_files(config, input, output)
    evals = _eval_items(config, input)
    tokenizer, template = _tokenizer(config, input), _chat_template(config, input)
    references = _filter_files(config, input)
    target = store(output)
    if is_remote(output):
        target.check()
    elif Path(output).exists() and not Path(output).is_dir():
        raise StorageError("the output is a file, it must be a folder", where=output, mend="choose another path")
    return Job(config, input, output, files, _partitions(config, files), evals, tokenizer, template,
               _indexes(config, input), references)


def content(config: PipelineConfig, *, input: str, output: str, given: bool = False) -> dict[str, Any]:
    """Identity of everything that a pipeline reads, as JSON values: equal exactly if the contents are.

    Args:
        output: files below it are not input.
        given: the tokenizer's file is not there yet, and its identity known otherwise.

    Raises:
        StorageError, InputError: as `resolve`.
    """
    config, input = one_file.of_input(config, absolute(input))
    output = absolute(output)
    files = _source_files(config, input, output)
    references = _filter_files(config, input)
    found: dict[str, Any] = {"files": [[file.name, file.bytes, file.fingerprint] for file in files],
                             "filters": {path: references[path].partition("@")[0] for path in sorted(references)},
                             "indexes": [index.hash for index in _indexes(config, input)],
                             "evals": content_hash(repr(_eval_items(config, input)).encode())}
    if not given:
        found["tokenizer"] = content_hash(_tokenizer(config, input))
    return found


def _source_files(config: PipelineConfig, input: str, output: str) -> tuple[SourceFile, ...]:
    found: dict[str, tuple[Store, str, str]] = {}
    for pattern in config.read.paths:
        place, rest, relative = _locate(pattern, input)
        _must_exist(place)
        keys = [key for key in place.glob(rest) if not f"{place.at(key)}/".startswith(f"{output}/")]
        if not keys:
            raise InputError(f"no file matches {pattern!r}", where=place.uri,
                             mend="correct --input or read.paths; patterns know *, ? and ** for any folders")
        for key in keys:
            found.setdefault(place.at(key), (place, key, key if relative else place.at(key)))

    def look(entry: tuple[Store, str, str]) -> SourceFile:
        place, key, name = entry
        size = place.size(key)
        try:
            shape = readers.shape_of(place, key, config.read)
        except readers.UnreadableFile as error:
            shape = readers.Shape("jsonl", problem=str(error), hint="correct the file, or leave it out of read.paths")
        cut = readers.ranges(place, key, size, config.read, shape)
        return SourceFile(place.uri, key, name, size, place.fingerprint(key), tuple(cut), shape)

    with ThreadPoolExecutor(_PARALLEL_LOOKUPS) as pool:
        files = tuple(sorted(pool.map(look, found.values()), key=lambda file: file.name))
    _check_formats(files, config.max_bad_fraction)
    readers.check_installed(file.shape for file in files)
    return files if config.read.limit is None else limited(files, config.read.limit)


def limited(files: Sequence[SourceFile], limit: int) -> tuple[SourceFile, ...]:
    """The files that `limit` documents are read of, each with its part, by largest remainder of its size."""
    total = sum(file.bytes for file in files)
    exact = [limit * file.bytes / total if total else 0.0 for file in files]
    parts = [int(share) for share in exact]
    order = sorted(range(len(files)), key=lambda number: (parts[number] - exact[number], files[number].name))
    for number in order[: limit - sum(parts)]:
        parts[number] += 1
    return tuple(replace(file, ranges=(), limit=part) for file, part in zip(files, parts, strict=True) if part)


def _check_formats(files: Sequence[SourceFile], allowed: float) -> None:
    """InputError when a larger share of the files than is allowed of the records cannot be read; others are put in
    quarantine later."""
    unreadable = [file for file in files if file.shape.problem]
    if len(unreadable) <= allowed * len(files):
        return
    first = unreadable[0]
    others = Counter(file.shape.problem for file in unreadable[1:])
    more = "".join(f"; {count} more: {problem}" for problem, count in others.most_common(3))
    raise InputError(f"this is {first.shape.problem}{more} ({len(unreadable)} of {len(files)} files cannot be read)",
                     where=first.name, mend=first.shape.hint)


def _locate(pattern: str, input: str) -> tuple[Store, str, bool]:
    """(store, pattern below it, whether it is the input) of a pattern."""
    standalone = "://" in pattern or pattern.startswith(("/", "~"))
    if not standalone:
        return store(input), pattern, True
    parts = pattern.split("/")
    wild = next((place for place, part in enumerate(parts) if any(mark in part for mark in "*?[")), len(parts) - 1)
    wild = min(wild, len(parts) - 1)
    return store("/".join(parts[:wild]) or "/"), "/".join(parts[wild:]), False


def _must_exist(place: Store) -> None:
    if is_remote(place.uri):
        place.check()
    elif not Path(place.uri).is_dir():
        raise StorageError("there is no such folder", where=place.uri, mend="correct --input or read.paths")


def _eval_items(config: PipelineConfig, input: str) -> tuple[EvalItem, ...]:
    step = config.step("decontaminate")
    if step is None:
        return ()
    items: set[EvalItem] = set()
    for pattern in step.evals:
        standalone = "://" in pattern or pattern.startswith(("/", "~"))
        place = pattern if standalone else join(input, pattern)
        try:
            items.update(read_eval_items(place))
        except FileNotFoundError:
            raise InputError("there is no such file of evaluation items", where=place,
                             mend="correct evals; relative paths are below --input") from None
    return tuple(sorted(items, key=lambda item: (item.name, item.item, item.text, item.answer)))


def _indexes(config: PipelineConfig, input: str) -> tuple[Index, ...]:
    step = config.step("dedup_near")
    if step is None or not step.against:
        return ()
    from tidewheel.data.stages.near_index import open_indexes

    return open_indexes(step, input)


def _tokenizer(config: PipelineConfig, input: str) -> bytes:
    step = config.step("tokenize")
    if step is None or step.file is None:
        return b""
    from tidewheel.data.tokenize.tokenizer import settings_of
    from tidewheel.shards.tokenizer import load
    from tidewheel.shards.tokenizer.huggingface import HuggingFace
    from tidewheel.shards.tokenizer.tiktoken_ranks import from_gpt2

    standalone = "://" in step.file or step.file.startswith(("/", "~"))
    place, name = split(step.file if standalone else join(input, step.file))
    try:
        data = place.read(name)
        if name.endswith(".bpe"):
            name = "encoder.json"
            data = from_gpt2(data, place.read(name))
        encoder = load(data, settings_of(step))
        if config.read.kind != "documents" and encoder.format != HuggingFace.format:
            raise InputError(f"chat templates need a Hugging Face tokenizer.json, this is a {encoder.format} file",
                             mend="give the tokenizer.json of the model")
    except FileNotFoundError:
        raise InputError("there is no such tokenizer file", where=place.at(name),
                         mend="correct tokenize.file; a relative path is below --input") from None
    except InputError as error:
        raise InputError(error.what, where=place.at(name), mend=error.mend) from None
    return data


def _chat_template(config: PipelineConfig, input: str) -> str:
    step = config.step("tokenize")
    if step is None or config.read.kind == "documents":
        return ""
    from tidewheel.data.tokenize.chat import read_template

    def read(path: str) -> tuple[str, bytes | None]:
        place, name = split(path if "://" in path or path.startswith(("/", "~")) else join(input, path))
        try:
            return place.at(name), place.read(name)
        except FileNotFoundError:
            return place.at(name), None

    where, values, template = "", None, None
    if step.file:
        folder = "".join(step.file.rpartition("/")[:2])
        where, values = read(f"{folder}tokenizer_config.json")
        if not step.chat_template:  # as transformers 4.51 and later save it
            beside, template = read(f"{folder}chat_template.jinja")
            where = beside if template is not None else where
    if step.chat_template:
        where, template = read(step.chat_template)
        if template is None:
            raise InputError("there is no such chat template", where=where,
                             mend="correct tokenize.chat_template; a relative path is below --input")
    return read_template(values, template, where=where, date=step.template_date)


def _filter_files(config: PipelineConfig, input: str) -> dict[str, str]:
    """References of the files that filters read, each looked into."""
    steps = [step.filter for step in config.steps if step.filter is not None]
    settings = [rule for step in steps for _, rule in step.rules() if isinstance(rule, resources.FileConfig)]
    references = resources.find([path for rule in settings for path in rule.paths()], input)
    for rule in settings:
        rule.with_files(references.__getitem__).check()
    return references


def _partitions(config: PipelineConfig, files: Sequence[SourceFile]) -> int:
    if config.partitions != "auto":
        return config.partitions
    size = sum(file.bytes * (UNPACKED if file.key.endswith(PACKED_ENDINGS) or file.shape.packing else 1)
               for file in files)
    size = int(size * (config.read.sample or 1))
    wanted = max(-(-size // PARTITION_BYTES), MIN_PARTITIONS)
    if config.read.limit is not None:
        wanted = min(wanted, max(config.read.limit // PARTITION_DOCUMENTS, MIN_PARTITIONS))
    return 1 << (wanted - 1).bit_length()
