"""Log-probabilities of a preference set's answers under a reference model, made once and durably.

Each shard's values are a file of their own, whose name holds its content's hash. A run that was killed finds the files
that are whole, and computes only the others. Neighbouring rows of a shard are computed together, always the same ones,
so the bytes depend on nothing but the model, the set, the precision and the machine's arithmetic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tidewheel import storage
from tidewheel.checkpoint import conversion
from tidewheel.checkpoint.digest import digest
from tidewheel.checkpoint.manifest import read_manifest as read_checkpoint
from tidewheel.checkpoint.verify import locate
from tidewheel.errors import ConfigError
from tidewheel.models.decoder import Decoder
from tidewheel.shards.manifest import PARTS, WITH_MISMATCHED, Manifest, read_manifest
from tidewheel.shards.opened import Rows
from tidewheel.shards.pairs import PairSet
from tidewheel.shards.references import SHOWN, VERSION, Head, as_bytes, folder_of, read_head, write_head
from tidewheel.storage import Stamp, Store, content_hash
from tidewheel.train.batches import micro_batch
from tidewheel.train.length_groups import cut, longest, padded_length
from tidewheel.train.local_device import local_device
from tidewheel.train.objective import Outputs
from tidewheel.train.precision import Precision, fp32_products, precision_context
from tidewheel.train.preferences.log_probabilities import answers

logger = logging.getLogger(__name__)
CHUNK_TOKENS = 1024
"""Tokens whose logits are in memory at once."""
PAIRS = 8
"""Pairs computed together."""
PADDED = 64
"""Their rows are padded to a multiple of this many tokens."""


@dataclass(frozen=True)
class Made:
    """What `make` did."""

    uri: str
    """Folder of the reference model's columns: what `data.reference` is to be."""
    pairs: int
    """Pairs of all sets."""
    computed: int
    """Pairs computed now; the others were there."""


class ReferenceModel:
    """A decoder with frozen weights.

    Args:
        uri: a run, or one of its checkpoints.
        device: default: the first GPU if there is one, else the CPU.
        precision: type of the matrix products.

    Attributes:
        checkpoint: URI of the checkpoint.
        digest: SHA-256 of its parameters.

    Raises:
        CheckpointError: there is no complete checkpoint, it is damaged, or it is not of a decoder.
    """

    def __init__(self, uri: str, *, device: str = "", precision: Precision = "fp32") -> None:
        _, checkpoints, name = locate(uri)
        manifest = read_checkpoint(checkpoints, name)
        config, self.vocabulary_size = conversion.model_of(manifest, checkpoints.at(name))
        self.checkpoint, self.digest = checkpoints.at(name), digest(checkpoints.at(name)).groups["model"]
        with torch.device("meta"):
            self._model = Decoder(config, self.vocabulary_size)
        names = [parameter for parameter, _ in self._model.named_parameters()]
        self._model.load_state_dict(conversion.read_weights(checkpoints, name, manifest, names), assign=True)
        self._device, self.precision = local_device(device), precision
        self._model.to(self._device).requires_grad_(False)

    @torch.no_grad()
    def log_probabilities(self, rows: Rows) -> np.ndarray:
        """Return the log-probabilities of the answers of B rows of pairs, fp32 [B, parts]."""
        rows = cut(rows, slice(None), padded_length(longest(rows), PADDED, rows.width))
        micro = micro_batch(rows, slice(None), 0, self._device)

        def of(hidden: torch.Tensor, make_logits: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            return answers(Outputs(hidden, make_logits), micro, CHUNK_TOKENS).sums

        with precision_context(self._device, self.precision), fp32_products(self._device, False):
            found = self._model(micro.tokens, micro.positions, micro.segment_ids, micro.targets, of, micro.documents)
        return found.float().cpu().numpy()


def make(model: ReferenceModel, sets: list[str], output: str, *, mismatched: bool = False,
         on_progress: Callable[[int, int], None] = lambda done, total: None) -> Made:
    """Make the columns of some preference sets under one model. What exists is kept.

    Args:
        model: the reference model.
        sets: URIs of preference sets.
        output: folder; the columns are below it, in a folder with the model's digest as its name.
        mismatched: add the log-probabilities of mismatched answers, which KTO needs.
        on_progress: called with the pairs done so far and their total.

    Raises:
        ConfigError: the model has fewer tokens than a set.
        ShardError: a set is missing or damaged, or both answers of a pair are equal.
    """
    parts = WITH_MISMATCHED if mismatched else PARTS
    folder = storage.join(output, model.digest[:SHOWN])
    manifests = {uri: read_manifest(storage.store(uri)) for uri in sets}
    total, done, computed = sum(manifest.rows for manifest in manifests.values()), 0, 0
    for uri, manifest in manifests.items():
        if manifest.vocabulary_size > model.vocabulary_size:
            raise ConfigError(f"the set has a vocabulary of {manifest.vocabulary_size}, the model of "
                              f"{model.vocabulary_size}", where=uri, fix="give a model of the set's tokenizer")
        target = storage.store(folder_of(folder, manifest))
        head = read_head(target)
        if head is not None and head.parts >= parts and head.version == VERSION.number \
                and head.precision == model.precision:
            done += manifest.rows
            on_progress(done, total)
            continue
        files = []
        for stamp, new in _files(model, uri, manifest, target, parts):
            files.append(stamp)
            done += manifest.shards[len(files) - 1].rows
            computed += manifest.shards[len(files) - 1].rows if new else 0
            on_progress(done, total)
        write_head(target, Head(manifest.hash, model.digest, model.checkpoint, parts, model.precision, VERSION.number,
                                tuple(files)))
        logger.info("wrote the log-probabilities of %s to %s", uri, target.uri)
    return Made(storage.store(folder).uri, total, computed)


def _files(model: ReferenceModel, uri: str, manifest: Manifest, target: Store, parts: int
           ) -> Iterator[tuple[Stamp, bool]]:
    """Yield each shard's file, and whether it was computed now."""
    pairs = PairSet.open(uri, manifest=manifest).reading(parts)
    kind = f"{model.precision}-{parts}-v{VERSION.number}"
    present = [entry.key for entry in target.list()]
    for index, info in enumerate(manifest.shards):
        beginning = f"{info.name.removesuffix('.arrow')}-{kind}-"
        whole = [stamp for key in present if key.startswith(beginning)
                 if (stamp := _whole(target, key, beginning)).bytes == info.rows * parts * 4]
        if whole:
            yield whole[0], False
            continue
        values = [model.log_probabilities(pairs.rows(np.full(len(rows), index), rows))
                  for rows in np.split(np.arange(info.rows), range(PAIRS, info.rows, PAIRS))]
        pairs.settle()
        data = as_bytes(np.concatenate(values))
        yield target.write(_key(beginning, data), data), True
    pairs.close()


def _whole(target: Store, key: str, beginning: str) -> Stamp:
    """Return the stamp of a file, with 0 bytes if its content is not what its name says."""
    data = target.read(key)
    return Stamp(key, len(data) if key == _key(beginning, data) else 0, content_hash(data))


def _key(beginning: str, data: bytes) -> str:
    """Return the name of a shard's file, which holds the hash of its content."""
    return f"{beginning}{content_hash(data).removeprefix('blake3-')[:32]}.f32"
