"""A model in a Hugging Face folder, read in place: weights, tokenizer and chat template."""

from __future__ import annotations

import json

import torch

from tidewheel.checkpoint import tokenizer_files
from tidewheel.errors import ConfigError, InputError
from tidewheel.models import huggingface
from tidewheel.models.decoder import Decoder
from tidewheel.shards.tokenizer import Encoder, Settings, load
from tidewheel.storage import Store, content_hash, store


def is_folder(uri: str) -> bool:
    """Return whether a URI is a Hugging Face folder, not a run."""
    folder = store(uri)
    return folder.exists(huggingface.CONFIG) and not folder.exists("run.json") and not folder.list("checkpoints")


def read_model(folder: Store) -> Decoder:
    """Return the model of a folder, in fp32 on the CPU.

    Raises:
        ConfigError: the model is not supported.
        CheckpointError: its weights cannot be read.
    """
    config, rows = huggingface.read_config(folder)
    with torch.device("meta"):
        model = Decoder(config, rows)
    weights = {name: tensor.float() for name, tensor in huggingface.read_weights(folder, config, rows)}
    model.load_state_dict(weights, assign=True)
    return model


def read_encoder(folder: Store) -> Encoder:
    """Return the tokenizer beside a model.

    Texts begin with the BOS token if the file's post-processor puts it there.

    Raises:
        ConfigError: there is no tokenizer.json.
        InputError: it cannot be used.
    """
    try:
        data = folder.read(tokenizer_files.TOKENIZER)
    except FileNotFoundError:
        raise ConfigError("there is no tokenizer.json", where=folder.uri,
                          fix="give the tokenizer: --tokenizer PATH/tokenizer.json") from None
    begins = _leading(data)
    settings = Settings() if begins is None else Settings(bos="document", bos_token=begins)
    try:
        return load(data, settings)
    except InputError:
        named = _eos_token(folder)
        if named is None:
            raise
        return load(data, Settings(bos=settings.bos, bos_token=begins, eos_token=named))


def fingerprint(folder: Store) -> str:
    """Return a hash of the weights and the settings of a folder's model. Reads all of them."""
    names = sorted(entry.key for entry in folder.list()
                   if "/" not in entry.key and (entry.key.endswith(".safetensors") or entry.key == huggingface.CONFIG))
    return content_hash("\n".join(f"{name} {folder.hash(name)}" for name in names).encode())


def _leading(data: bytes) -> int | None:
    """Return the token that the file's post-processor puts before a text; None if it puts none there."""
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(data.decode())
    except Exception:  # the library raises bare Exception; `load` then says what is wrong
        return None
    with_marks, plain = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
    added = len(with_marks) > len(plain) and with_marks[1:1 + len(plain)] == plain
    return int(with_marks[0]) if added else None


def _eos_token(folder: Store) -> str | None:
    if not folder.exists(tokenizer_files.CONFIG):
        return None
    value = json.loads(folder.read(tokenizer_files.CONFIG)).get("eos_token")
    return value.get("content") if isinstance(value, dict) else value
