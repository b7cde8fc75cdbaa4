"""What one run of a pipeline works on: the recipe with its files found, its places checked, its partitions counted.

Everything a person can have wrong about places and files is found here, before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidewheel import hub
from tidewheel.data import resources
from tidewheel.data.config import PipelineConfig
from tidewheel.data.decontaminate.evals import EvalItem, read_eval_items
from tidewheel.data.filter import Filter
from tidewheel.data.stages import filters, hub_commits, one_file
from tidewheel.data.stages.sources import SourceFile, source_files
from tidewheel.errors import InputError, StorageError
from tidewheel.storage import Store, absolute, content_hash, is_remote, join, split, store

if TYPE_CHECKING:
    from tidewheel.data.stages.near_index import Index

PARTITION_BYTES = 64 << 20  # of text: a worker holds several times as much while it sorts or packs a partition
PARTITION_DOCUMENTS = 4096  # where only so many documents are read, whatever the size of the files
PACKED_ENDINGS = (".gz", ".zst", ".parquet")  # files that hold about three times as much text as they have bytes
UNPACKED = 3
MIN_PARTITIONS = 4


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
        commits: of the data sets of the Hugging Face hub that it reads, by their URIs as in the recipe.
        skipped: files of source trees that are left out by their names or lengths, by reason.
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
    commits: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        """The output."""
        return store(self.output)

    def bound(self, filter: Filter) -> list[Any]:
        """Return a filter as JSON values for workers."""
        return filters.bound(filter, self.references)

    def identity(self, filter: Filter) -> list[Any]:
        """Return a filter as JSON values for unit keys."""
        return filters.identity(filter, self.references)


def resolve(config: PipelineConfig, *, input: str, output: str) -> Job:
    """Check the places and find the files.

    Raises:
        StorageError: the input or output cannot be used.
        InputError: no file matches a pattern, or evaluation items, the tokenizer or an index of an earlier dump are
            missing or wrong.
    """
    input, output = absolute(input), absolute(output)
    commits = hub_commits.resolved([input, *config.read.paths], output)
    config, input = one_file.of_input(config, hub_commits.at_commit(input, commits))
    sources = source_files(config, input, output, commits)
    files = sources.files
    evals = _eval_items(config, input)
    tokenizer, template = _tokenizer(config, input), _chat_template(config, input)
    references = _filter_files(config, input)
    if hub.is_hub(output):
        raise StorageError("the Hugging Face hub is only read from", where=output,
                           mend=hub.WRITE_ELSEWHERE)
    target = store(output)
    if is_remote(output):
        target.check()
    elif Path(output).exists() and not Path(output).is_dir():
        raise StorageError("the output is a file, it must be a folder", where=output, mend="choose another path")
    return Job(config, hub_commits.as_given(input, commits), output, files, _partitions(config, files), evals,
               tokenizer, template, _indexes(config, input), references, commits, sources.skipped)


def content(config: PipelineConfig, *, input: str, output: str, given: bool = False) -> dict[str, Any]:
    """Identity of everything that a pipeline reads, as JSON values: equal exactly if the contents are.

    Args:
        output: files below it are not input.
        given: the tokenizer's file is not there yet, and its identity known otherwise.

    Raises:
        StorageError, InputError: as `resolve`.
    """
    input, output = absolute(input), absolute(output)
    commits = hub_commits.resolved([input, *config.read.paths], output)
    config, input = one_file.of_input(config, hub_commits.at_commit(input, commits))
    files = source_files(config, input, output, commits).files
    references = _filter_files(config, input)
    found: dict[str, Any] = {"files": [[file.name, file.bytes, file.fingerprint] for file in files],
                             "filters": {path: references[path].partition("@")[0] for path in sorted(references)},
                             "indexes": [index.hash for index in _indexes(config, input)],
                             "evals": content_hash(repr(_eval_items(config, input)).encode())}
    if not given:
        found["tokenizer"] = content_hash(_tokenizer(config, input))
    return found


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
    found = [filter for step in config.steps if step.filter is not None for filter in step.filter.filters]
    references = resources.find([path for filter in found for path in filter.paths()], input)
    for filter in found:
        filter.with_files(references.__getitem__).check()
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
