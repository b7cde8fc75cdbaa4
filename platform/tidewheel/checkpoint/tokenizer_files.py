"""The tokenizer's files beside a model: those of a run, and those that `AutoTokenizer` reads.

A run of conversations or pairs ends its texts with the token that ends a turn, which its chat template gives.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidewheel import storage
from tidewheel.data.tokenize.chat_template import ChatTemplate, read_template
from tidewheel.errors import ConfigError, ShardError, StorageError
from tidewheel.models.huggingface import GENERATION
from tidewheel.shards.source import Domain
from tidewheel.storage import Store

TOKENIZER, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
"""Names of the files beside the weights."""


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer.

    Args:
        files: content by name; {} if there is no tokenizer.
        ends: ids of the tokens that end a text, the end of a turn first; () if they are not known.
    """

    files: dict[str, bytes]
    ends: tuple[int, ...] = ()


def of_run(run: Store, tokenizer: str = "", chat_template: str = "") -> TokenizerFiles:
    """Return the files for an export of a run, or of an imported model.

    Args:
        run: folder of the run.
        tokenizer: a tokenizer.json; default: that of the run's shard set.
        chat_template: a Jinja file; default: see `template_of_run`.

    Raises:
        ConfigError: the tokenizer or the template cannot be found.
    """
    ends: Sequence[int] = ()
    pad = None
    if tokenizer:
        source, key = storage.split(tokenizer)
    elif domains := _domains(run):
        described = domains[0].manifest.tokenizer
        source, key = storage.store(domains[0].uri), str(described["file"])
        ends, pad = [described["eos"]], described.get("pad")
    elif run.exists(TOKENIZER):  # imported
        source, key = run, TOKENIZER
        ends = _recorded_ends(run)
    else:
        return TokenizerFiles({})
    if not key.endswith(".json"):
        raise ConfigError(f"the tokenizer is {key}, not a tokenizer.json", where=source.uri,
                          fix="convert it with Hugging Face's tools and give it: --tokenizer PATH/tokenizer.json")
    try:
        content = source.read(key)
    except FileNotFoundError:
        raise ConfigError("there is no such file", where=source.at(key), fix="give --tokenizer another path") from None
    config, ends = _config(content, template_of_run(run, chat_template), ends, pad)
    return TokenizerFiles({TOKENIZER: content, CONFIG: json.dumps(config, indent=1).encode()}, tuple(ends))


def template_of_run(run: Store, given: str = "") -> str:
    """Return the chat template of a run, as JSON text of `read_template`; "" if it has none.

    Args:
        run: folder of a run, or of an imported model.
        given: path or URI of a Jinja file, instead of the template of the run's shard sets.

    Raises:
        ConfigError: there is no such file, the shard sets cannot be read, or their templates differ.
    """
    if given:
        folder, key = storage.split(given)
        try:
            source = folder.read(key)
        except FileNotFoundError:
            raise ConfigError("there is no such file", where=given, fix="give --chat-template another path") from None
        return read_template(run.read(CONFIG) if run.exists(CONFIG) else None, source, where=given)
    if domains := _domains(run):
        templates = sorted({domain.manifest.chat_template for domain in domains} - {""})
        if len(templates) > 1:
            raise ConfigError("the run's shard sets have different chat templates", where=run.uri,
                              fix="give one of them: --chat-template PATH/chat_template.jinja")
        return templates[0] if templates else ""
    config = run.read(CONFIG) if run.exists(CONFIG) else None
    template = run.read(TEMPLATE) if run.exists(TEMPLATE) else None
    if template is None and not (config and json.loads(config).get("chat_template")):
        return ""
    return read_template(config, template, where=run.uri)


def copy(source: Store, target: Store) -> bool:
    """Copy the tokenizer's files that exist; return whether there is a tokenizer.json.

    Args:
        source: folder to read.
        target: folder to write.
    """
    for name in (TOKENIZER, CONFIG, TEMPLATE, GENERATION):
        if source.exists(name):
            target.write(name, source.read(name))
    return target.exists(TOKENIZER)


def hash_of_run(run: Store) -> str:
    """Return the hash of the tokenizer's file of a run or an imported model; "" if it is not known."""
    try:
        domains = _domains(run)
    except ConfigError:  # the shard set is gone
        return ""
    if domains:
        return str(domains[0].manifest.tokenizer["hash"])
    return run.hash(TOKENIZER) if run.exists(TOKENIZER) else ""


def _domains(run: Store) -> Sequence[Domain]:
    """Return the shard sets of a run; () of an imported model."""
    from tidewheel.train.record import recorded_source

    if not run.exists("run.json"):
        return ()
    try:
        return recorded_source(run.read_json("run.json")).domains
    except (ShardError, StorageError, FileNotFoundError) as error:
        raise ConfigError(f"cannot read the run's shard set, which holds the tokenizer ({error})".splitlines()[0],
                          where=run.uri, fix="give the tokenizer: --tokenizer PATH/tokenizer.json") from None


def _recorded_ends(folder: Store) -> list[int]:
    """Return the ids that generation_config.json of an imported model ends texts with; [] without that file."""
    ends = folder.read_json(GENERATION).get("eos_token_id", []) if folder.exists(GENERATION) else []
    return ends if isinstance(ends, list) else [ends]


def _config(content: bytes, template: str, ends: Sequence[int], pad: int | None) -> tuple[dict[str, Any], list[int]]:
    """Return (content of tokenizer_config.json, ids of the tokens that end a text).

    Args:
        content: of tokenizer.json.
        template: see `template_of_run`.
        ends: ids that are known to end a text.
        pad: id of the padding token.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(content.decode())
    values: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    known = list(ends)
    if template:
        given = json.loads(template)
        values |= given["tokens"]
        values["chat_template"] = given["template"]
        if "tool_template" in given:
            values["chat_template"] = [{"name": "default", "template": given["template"]},
                                       {"name": "tool_use", "template": given["tool_template"]}]
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        names = [ChatTemplate(template, special).turn_token(), given["tokens"].get("eos_token")]
        ids = [tokenizer.token_to_id(name) for name in names if name is not None]
        known = list(dict.fromkeys([*(token for token in ids if token is not None), *known]))
    if known:
        values["eos_token"] = tokenizer.id_to_token(known[0])
    if pad is not None:
        values["pad_token"] = tokenizer.id_to_token(pad)
    return values, known
