"""Resolve a recipe into a `Job`: find its files, check its inputs and its output, and count its partitions.

Every mistake in paths and files is reported here, before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidewheel.data import resources
from tidewheel.data.config import PipelineConfig
from tidewheel.data.decontaminate.evals import EvalItem, read_eval_items
from tidewheel.data.stages import input_versions, near_index, one_file
from tidewheel.data.stages.job import Job
from tidewheel.data.stages.sources import SourceFile, source_files
from tidewheel.errors import InputError, StorageError
from tidewheel.storage import absolute, content_hash, is_remote, join, split, store

PARTITION_BYTES = 64 << 20
"""Text in a partition; a worker needs several times as much memory to sort or pack one."""
PARTITION_DOCUMENTS = 4096
"""Documents in a partition when `read.limit` is given, whatever the size of the files."""
PACKED_ENDINGS = (".gz", ".zst", ".parquet")
"""Endings of files that hold about `UNPACKED` times as much text as they have bytes."""
UNPACKED = 3
MIN_PARTITIONS = 4


def resolve(config: PipelineConfig, *, input: str, output: str) -> Job:
    """Find a recipe's files and check everything it reads and its output.

    Args:
        config: the recipe.
        input: URI that relative paths are resolved against.
        output: URI to write to.

    Raises:
        StorageError: the input or output cannot be used.
        InputError: no file matches a pattern, or evaluation items, the tokenizer or an index of an earlier dump are
            missing or invalid.
    """
    input, output = absolute(input), absolute(output)
    commits = input_versions.resolved([input, *config.read.paths], output)
    config, input = one_file.of_input(config, input_versions.at_commit(input, commits))
    sources = source_files(config, input, output, commits)
    files = sources.files
    evals = _eval_items(config, input)
    tokenizer, template = _tokenizer(config, input), chat_template(config, input)
    references = _filter_files(config, input)
    target = store(output)
    target.check_writable()
    if is_remote(output):
        target.check()
    elif Path(output).exists() and not Path(output).is_dir():
        raise StorageError("the output is a file, it must be a folder", where=output, fix="choose another path")
    return Job(config, input_versions.as_given(input, commits), output, files, partition_count(config, files), evals,
               tokenizer, template, _indexes(config, input), references, commits, sources.skipped)


def content(config: PipelineConfig, *, input: str, output: str, given: bool = False) -> dict[str, Any]:
    """Return the identity of everything a pipeline reads, as JSON values that are equal exactly if the contents are.

    Args:
        config: the recipe.
        input: URI that relative paths are resolved against.
        output: URI of the output; files below it are not input.
        given: the tokenizer file does not exist yet and the caller identifies it, so leave it out.

    Raises:
        StorageError: the input cannot be used.
        InputError: as `resolve`.
    """
    input, output = absolute(input), absolute(output)
    commits = input_versions.resolved([input, *config.read.paths], output)
    config, input = one_file.of_input(config, input_versions.at_commit(input, commits))
    files = source_files(config, input, output, commits).files
    references = _filter_files(config, input)
    identity: dict[str, Any] = {"files": [[file.name, file.bytes, file.fingerprint] for file in files],
                                "filters": {path: references[path].partition("@")[0] for path in sorted(references)},
                                "indexes": [index.hash for index in _indexes(config, input)],
                                "evals": content_hash(repr(_eval_items(config, input)).encode())}
    if not given:
        identity["tokenizer"] = content_hash(_tokenizer(config, input))
    return identity


def _eval_items(config: PipelineConfig, input: str) -> tuple[EvalItem, ...]:
    step = config.step("decontaminate")
    if step is None:
        return ()
    items: set[EvalItem] = set()
    for pattern in step.evals:
        uri = _below(input, pattern)
        try:
            items.update(read_eval_items(uri))
        except FileNotFoundError:
            raise InputError("there is no such file of evaluation items", where=uri,
                             fix="correct evals; relative paths are below --input") from None
    return tuple(sorted(items, key=lambda item: (item.name, item.item, item.text, item.answer)))


def _below(input: str, path: str) -> str:
    """Return the URI of a path in the recipe: relative paths are below `input`."""
    return path if "://" in path or path.startswith(("/", "~")) else join(input, path)


def _indexes(config: PipelineConfig, input: str) -> tuple[near_index.Index, ...]:
    step = config.step("dedup_near")
    return near_index.open_indexes(step, input) if step is not None and step.against else ()


def _tokenizer(config: PipelineConfig, input: str) -> bytes:
    step = config.step("tokenize")
    if step is None or step.file is None:
        return b""
    from tidewheel.data.tokenize.tokenizer import settings_of
    from tidewheel.shards.tokenizer import load
    from tidewheel.shards.tokenizer.huggingface import HuggingFace
    from tidewheel.shards.tokenizer.tiktoken_ranks import from_gpt2

    folder, name = split(_below(input, step.file))
    try:
        data = folder.read(name)
        if name.endswith(".bpe"):
            name = "encoder.json"
            data = from_gpt2(data, folder.read(name))
        encoder = load(data, settings_of(step))
        if config.read.kind != "documents" and encoder.format != HuggingFace.format:
            raise InputError(f"chat templates need a Hugging Face tokenizer.json, this is a {encoder.format} file",
                             fix="give the tokenizer.json of the model")
    except FileNotFoundError:
        raise InputError("there is no such tokenizer file", where=folder.at(name),
                         fix="correct tokenize.file; a relative path is below --input") from None
    except InputError as error:
        raise InputError(error.what, where=folder.at(name), fix=error.fix) from None
    return data


def chat_template(config: PipelineConfig, input: str) -> str:
    """Return the chat template of the recipe's tokenizer; "" if the records are documents.

    Raises:
        InputError: the template is missing, or cannot be used.
    """
    step = config.step("tokenize")
    if step is None or config.read.kind == "documents":
        return ""
    from tidewheel.data.tokenize.chat import ChatTemplate, read_template

    def read(path: str) -> tuple[str, bytes | None]:
        template_store, name = split(_below(input, path))
        try:
            return template_store.at(name), template_store.read(name)
        except FileNotFoundError:
            return template_store.at(name), None

    where = ""
    values: bytes | None = None
    template: bytes | None = None
    if step.file:
        folder = "".join(step.file.rpartition("/")[:2])
        where, values = read(f"{folder}tokenizer_config.json")
        if not step.chat_template:  # transformers 4.51 and later save the template in a file of its own
            beside, template = read(f"{folder}chat_template.jinja")
            where = beside if template is not None else where
    if step.chat_template:
        where, template = read(step.chat_template)
        if template is None:
            raise InputError("there is no such chat template", where=where,
                             fix="correct tokenize.chat_template; a relative path is below --input")
    source = read_template(values, template, where=where, date=step.template_date)
    if config.read.kind == "chat" and not ChatTemplate(source, ()).learns(step.loss):
        raise InputError("nothing that the assistant says would be learnt with this chat template", where=where,
                         fix="put {% generation %} and {% endgeneration %} around the assistant's text, or set "
                             "tokenize.loss: all")
    return source


def _filter_files(config: PipelineConfig, input: str) -> dict[str, str]:
    """Return references of the files that filters read, after checking each file."""
    filters = [filter for step in config.steps if step.filter is not None for filter in step.filter.filters]
    references = resources.find([path for filter in filters for path in filter.paths()], input)
    for filter in filters:
        filter.with_files(references.__getitem__).check()
    return references


def partition_count(config: PipelineConfig, files: Sequence[SourceFile]) -> int:
    """Return the number of partitions of the documents: from the recipe, or from the size of its input."""
    if config.partitions != "auto":
        return config.partitions
    size = sum(file.bytes * (UNPACKED if file.key.endswith(PACKED_ENDINGS) or file.shape.packing else 1)
               for file in files)
    size = int(size * (config.read.sample or 1))
    count = max(-(-size // PARTITION_BYTES), MIN_PARTITIONS)
    if config.read.limit is not None:
        count = min(count, max(config.read.limit // PARTITION_DOCUMENTS, MIN_PARTITIONS))
    return 1 << (count - 1).bit_length()
