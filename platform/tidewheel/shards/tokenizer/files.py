"""Open tokenizer files, and the tokenizer of a shard set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from tidewheel import storage
from tidewheel.errors import InputError, ShardError
from tidewheel.shards.manifest import REBUILD
from tidewheel.shards.tokenizer.encoder import Encoder, Settings
from tidewheel.shards.tokenizer.huggingface import HuggingFace
from tidewheel.shards.tokenizer.sentence_piece import SentencePiece
from tidewheel.shards.tokenizer.tiktoken_ranks import Tiktoken, looks_like_ranks

_FORMATS: dict[str, type[Encoder]] = {encoder.format: encoder for encoder in (HuggingFace, SentencePiece, Tiktoken)}


def load(data: bytes, settings: Settings = Settings()) -> Encoder:  # noqa: B008
    """Return the encoder for a tokenizer's file. Its first bytes give the format; nothing is unpickled.

    Args:
        data: content of the file.
        settings: what is not in the file.

    Raises:
        InputError: the file is not a tokenizer, or the settings do not fit it.
    """
    return _class_of(data)(data, settings)


def _class_of(data: bytes) -> type[Encoder]:
    head = data[:4096].lstrip()
    if not head:
        raise InputError("the file is empty", where="tokenizer", fix="give a tokenizer.json, a SentencePiece model or "
                                                                     "a tiktoken rank file")
    if head.startswith((b"{", b"[")) or (_is_text(head) and not looks_like_ranks(head)):
        return HuggingFace
    return Tiktoken if looks_like_ranks(head) else SentencePiece


def _is_text(head: bytes) -> bool:
    return not any(byte < 9 or 13 < byte < 32 for byte in head)


def of_manifest(set_store: storage.Store, tokenizer: Mapping[str, Any]) -> Encoder:
    """Return the encoder of a shard set.

    Args:
        set_store: the set's folder.
        tokenizer: `Manifest.tokenizer`.

    Raises:
        ShardError: the file is missing or damaged, or the manifest's settings do not fit it.
    """
    where = set_store.at(tokenizer["file"])
    known = {field.name for field in fields(Settings)}
    given = {name: value for name, value in (tokenizer.get("settings") or {}).items() if name in known}
    try:
        data = set_store.read(storage.safe_key(tokenizer["file"]))
        settings = replace(Settings(**given), bos_token=tokenizer.get("bos"), eos_token=tokenizer["eos"],
                           pad_token=tokenizer["pad"])
        return _FORMATS[tokenizer.get("format", HuggingFace.format)](data, settings)
    except FileNotFoundError:
        raise ShardError("the set's tokenizer is missing", where=where, fix=REBUILD) from None
    except (InputError, KeyError, TypeError) as error:
        reason = error.what if isinstance(error, InputError) else str(error)
        raise ShardError(f"the set's tokenizer cannot be used ({reason})", where=where, fix=REBUILD) from None
