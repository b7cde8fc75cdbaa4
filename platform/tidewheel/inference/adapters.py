"""Several adapters on one base in one process: those that a command or a caller names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidewheel import storage
from tidewheel.checkpoint import conversion
from tidewheel.checkpoint.adapters import adapter_of, adapter_values, base_of
from tidewheel.checkpoint.manifest import CheckpointManifest, read_manifest
from tidewheel.checkpoint.verify import check_files, locate
from tidewheel.errors import ConfigError, InputError
from tidewheel.models.adapter import Adapter
from tidewheel.models.adapting import peft_files
from tidewheel.models.adapting.merge import Values
from tidewheel.models.family import Model


@dataclass(frozen=True)
class Prompt:
    """One line of a file of prompts.

    Args:
        text: beginning of the text.
        adapter: name of the adapter that continues it; "": the base alone.
    """

    text: str
    adapter: str


def named(given: Sequence[str]) -> dict[str, str]:
    """Return {name: URI} of texts NAME=URI.

    Raises:
        ConfigError: a text has no name, or two have the same.
    """
    adapters: dict[str, str] = {}
    for text in given:
        name, _, uri = text.partition("=")
        if not name.isidentifier() or not uri or name in adapters:
            raise ConfigError(f"{text!r} is not NAME=URI with a name of its own", where="--adapter",
                              fix="give --adapter polite=runs/polite, with a name of letters and digits")
        adapters[name] = uri
    return adapters


def read_adapters(given: Mapping[str, str], manifest: CheckpointManifest | None, config: Model,
                  base: str) -> dict[str, tuple[Adapter, Values]]:
    """Return the settings and the parameters of adapters of one base, by name.

    Args:
        given: by name, the URI of a run, of one of its checkpoints, or of a folder that peft wrote.
        manifest: of the base's checkpoint; None: the base is a Hugging Face folder.
        config: of the base.
        base: its URI, for messages.

    Raises:
        ConfigError: one is of another base, or is no adapter.
        CheckpointError: one cannot be read, or is of a reward model.
    """
    adapters: dict[str, tuple[Adapter, Values]] = {}
    for name, uri in given.items():
        folder = storage.store(uri)
        if folder.exists(peft_files.CONFIG):
            adapters[name] = peft_files.read(folder, config)
            continue
        _, checkpoints, checkpoint = locate(uri)
        theirs = read_manifest(checkpoints, checkpoint)
        where = checkpoints.at(checkpoint)
        of = base_of(theirs)
        if of is None:
            raise ConfigError("this checkpoint holds a whole model, not an adapter", where=where,
                              fix="give the run that trained the adapter, or a folder that peft wrote")
        if manifest is None:
            raise ConfigError(f"the adapter {name} was trained on a checkpoint, but {base} is a Hugging Face folder",
                              where=where, fix="give the checkpoint that the run began with, or export the adapter: "
                              "tidewheel checkpoint export-adapter RUN FOLDER")
        if of.hash != manifest.model_hash:
            raise ConfigError(f"the adapter {name} was trained on {of.uri or 'initial values'} (hash {of.hash}), but "
                              f"{base} has the hash {manifest.model_hash}", where=where,
                              fix=f"give its own base{f', {of.uri}' if of.uri else ''}")
        conversion.model_of(theirs, where)  # refuses the adapter of a reward model
        check_files(checkpoints, checkpoint, theirs)
        adapters[name] = (adapter_of(theirs), adapter_values(checkpoints, checkpoint, theirs))
    return adapters


def read_prompts(uri: str, adapters: Sequence[str]) -> list[Prompt]:
    """Return the prompts of a JSONL file: {"prompt": TEXT, "adapter": NAME} a line.

    Args:
        uri: of the file.
        adapters: names that a line may choose; a line without one is continued by the base.

    Raises:
        InputError: the file is missing, or a line has no prompt or names another adapter.
    """
    folder, key = storage.split(uri)
    try:
        lines = folder.read(key).decode().splitlines()
    except FileNotFoundError:
        raise InputError("there is no such file", where=uri, fix="give --prompts another path") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            prompt = Prompt(str(record["prompt"]), str(record.get("adapter") or ""))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError("this line is not a JSON object with a prompt", where=f"{uri}:{number}",
                             fix='write {"prompt": "...", "adapter": "NAME"}') from None
        if prompt.adapter and prompt.adapter not in adapters:
            raise InputError(f"there is no adapter {prompt.adapter!r}; given: {', '.join(adapters) or 'none'}",
                             where=f"{uri}:{number}", fix="give it: --adapter NAME=URI")
        prompts.append(prompt)
    return prompts
