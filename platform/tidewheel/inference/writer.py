"""Text from a checkpoint of any layout, on one device."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from tidewheel import storage
from tidewheel.checkpoint import conversion
from tidewheel.checkpoint.manifest import read_manifest
from tidewheel.checkpoint.verify import locate, verify_files
from tidewheel.errors import CheckpointError, ConfigError
from tidewheel.inference.generate import generate
from tidewheel.models.decoder import Decoder
from tidewheel.shards.tokenizer import Encoder, load, of_manifest
from tidewheel.train.local_device import local_device
from tidewheel.train.record import recorded_source

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Writer:
    """A model and the tokenizer that it was trained with.

    Args:
        checkpoint: URI of the checkpoint.
        model: its weights, on the device that computes.
        tokenizer: of the run's shard set.
        context: longest sequence that the model is given.
    """

    checkpoint: str
    model: Decoder
    tokenizer: Encoder
    context: int

    @classmethod
    def open(cls, uri: str, *, tokenizer: str = "", device: str = "") -> Writer:
        """Load the model of a checkpoint, whichever layout wrote it, and check the hash of every file.

        Args:
            uri: a run (its newest complete checkpoint is taken), or one checkpoint, RUN/checkpoints/step_00000100.
            tokenizer: file of the tokenizer; default: that of the run's shard set, or the one beside an imported model.
            device: default: the first GPU if there is one, else the CPU.

        Raises:
            CheckpointError: there is no complete checkpoint, or it is damaged.
            ConfigError: there is no tokenizer, or it does not fit the model.
        """
        run, checkpoints, name = locate(uri)
        manifest = read_manifest(checkpoints, name)
        if problems := verify_files(checkpoints, name, manifest.files):
            raise CheckpointError("; ".join(problems)[:500], where=checkpoints.at(name),
                                  fix="`tidewheel checkpoint verify RUN` shows which are intact: give one of those")
        config, vocabulary_size = conversion.model_of(manifest, checkpoints.at(name))
        encoder, context = _tokenizer(run, tokenizer)
        if encoder.vocabulary_size > vocabulary_size:
            raise ConfigError(f"the tokenizer has {encoder.vocabulary_size} tokens, the model {vocabulary_size}",
                              where=tokenizer or run.uri, fix="give the tokenizer that the model was trained with")
        with torch.device("meta"):
            model = Decoder(config, vocabulary_size)
        names = list(model.state_dict())
        model.load_state_dict(conversion.read_weights(checkpoints, name, manifest, names), assign=True)
        model.to(local_device(device))
        logger.info("loaded %s", checkpoints.at(name))
        return cls(checkpoints.at(name), model, encoder, min(context or 1 << 31, config.max_sequence_length))

    def write(self, prompt: str, *, tokens: int, temperature: float, top_k: int, top_p: float, seed: int,
              cache: bool = True) -> str:
        """Return `prompt` and its continuation, which ends with the document.

        Args:
            prompt: beginning of the text; "": the beginning of a document.
            tokens: maximum number of new tokens.
            temperature: see `inference.generate.generate`, also for the other arguments.
            top_k: sample from this number of most likely tokens.
            top_p: sample from the most likely tokens of this share.
            seed: of the draws.
            cache: compute each token once.
        """
        ids = self.tokenizer.encode_plain([prompt])[0].tolist() or [self.tokenizer.eos]
        device = next(self.model.parameters()).device
        new = generate(self.model, ids, tokens=tokens, context=self.context, device=device, temperature=temperature,
                       top_k=top_k, top_p=top_p, seed=seed, stop=self.tokenizer.eos, cache=cache)
        return self.tokenizer.decode(ids + new)


def _tokenizer(run: storage.Store, file: str) -> tuple[Encoder, int]:
    """Return the tokenizer, and the sequence length that the model was trained with (0 if unknown)."""
    if file:
        folder, key = storage.split(file)
        try:
            return load(folder.read(key)), 0
        except FileNotFoundError:
            raise ConfigError("there is no such file", where=file, fix="give --tokenizer another path") from None
    if run.exists("run.json"):
        domain = recorded_source(run.read_json("run.json")).domains[0]
        return of_manifest(storage.store(domain.uri), domain.manifest.tokenizer), domain.manifest.sequence_length
    if run.exists(conversion.TOKENIZER):  # an imported model
        return load(run.read(conversion.TOKENIZER)), 0
    raise ConfigError("the tokenizer is not known", where=run.uri, fix="give it: --tokenizer PATH/tokenizer.json")
