"""Text from a checkpoint of any layout, on one device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch

from tidewheel import storage
from tidewheel.checkpoint import conversion, tokenizer_files
from tidewheel.checkpoint.adapters import adapter_of, adapter_values, base_of, read_base
from tidewheel.checkpoint.manifest import read_manifest
from tidewheel.checkpoint.verify import check_files, locate
from tidewheel.data.tokenize.chat_template import ChatTemplate
from tidewheel.errors import ConfigError
from tidewheel.inference import folder
from tidewheel.inference.adapters import read_adapters
from tidewheel.inference.generate import generate
from tidewheel.models.adapting.merge import add as add_adapter
from tidewheel.models.adapting.merge import add_several, rows
from tidewheel.models.decoder import Decoder
from tidewheel.shards.tokenizer import Encoder, load, of_manifest
from tidewheel.shards.tokenizer.huggingface import HuggingFace
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
        template: chat template of the run's conversations; None if it has none.
        adapters: names of the adapters that `using` takes.
    """

    checkpoint: str
    model: Decoder
    tokenizer: Encoder
    context: int
    template: ChatTemplate | None = None
    adapters: tuple[str, ...] = ()

    @classmethod
    def open(cls, uri: str, *, tokenizer: str = "", chat_template: str = "", device: str = "",
             adapters: Mapping[str, str] | None = None) -> Writer:
        """Load the model of a checkpoint, whichever layout wrote it, and check the hash of every file.

        Args:
            uri: a run (its newest complete checkpoint is taken), one checkpoint, RUN/checkpoints/step_00000100, or a
                Hugging Face folder.
            tokenizer: file of the tokenizer; default: that of the run's shard set, or the one beside an imported model.
            chat_template: a Jinja file; default: the template of the run's conversations, if it has any.
            device: default: the first GPU if there is one, else the CPU.
            adapters: of this model, which must be their base: URIs by name; see `read_adapters`.

        Raises:
            CheckpointError: there is no complete checkpoint, or it is damaged.
            ConfigError: there is no tokenizer or no such template, the tokenizer does not fit the model, or an adapter
                is of another base.
        """
        if folder.is_folder(uri):
            return cls._of_folder(storage.store(uri), tokenizer, chat_template, device, adapters or {})
        run, checkpoints, name = locate(uri)
        manifest = read_manifest(checkpoints, name)
        check_files(checkpoints, name, manifest)
        config, vocabulary_size = conversion.model_of(manifest, checkpoints.at(name))
        encoder, context = _tokenizer(run, tokenizer)
        if encoder.vocabulary_size > vocabulary_size:
            raise ConfigError(f"the tokenizer has {encoder.vocabulary_size} tokens, the model {vocabulary_size}",
                              where=tokenizer or run.uri, fix="give the tokenizer that the model was trained with")
        source = tokenizer_files.template_of_run(run, chat_template)
        template = ChatTemplate(source, tuple(encoder.special)) if source else None
        with torch.device("meta"):
            model = Decoder(config, vocabulary_size)
        shapes = {tensor_name: tensor.shape for tensor_name, tensor in model.state_dict().items()}
        if (base := base_of(manifest)) is None:
            model.load_state_dict(conversion.read_weights(checkpoints, name, manifest, list(shapes)), assign=True)
        else:
            model.load_state_dict(read_base(base, config, shapes, checkpoints, name, manifest), assign=True)
            values = adapter_values(checkpoints, name, manifest)
            add_adapter(model, adapter_of(manifest), values)
        if adapters:
            add_several(model, read_adapters(adapters, manifest, config, checkpoints.at(name)))
        model.to(local_device(device))
        logger.info("loaded %s", checkpoints.at(name))
        context = min(context or 1 << 31, config.max_sequence_length)
        return cls(checkpoints.at(name), model, encoder, context, template, tuple(adapters or ()))

    def using(self, adapter: str) -> AbstractContextManager[None]:
        """Let the model compute with one of `adapters` inside the block; "": with none."""
        assert not adapter or adapter in self.adapters
        return rows(self.model, [adapter])

    @classmethod
    def _of_folder(cls, place: storage.Store, tokenizer: str, chat_template: str, device: str,
                   adapters: Mapping[str, str]) -> Writer:
        model = folder.read_model(place)
        encoder = _tokenizer(place, tokenizer)[0] if tokenizer else folder.read_encoder(place)
        if encoder.vocabulary_size > model.vocabulary_size:
            raise ConfigError(f"the tokenizer has {encoder.vocabulary_size} tokens, the model {model.vocabulary_size}",
                              where=tokenizer or place.uri, fix="give the tokenizer that the model was trained with")
        source = tokenizer_files.template_of_run(place, chat_template)
        template = ChatTemplate(source, tuple(encoder.special)) if source else None
        if adapters:
            add_several(model, read_adapters(adapters, None, model.config, place.uri))
        return cls(place.uri, model.to(local_device(device)), encoder, model.config.max_sequence_length, template,
                   tuple(adapters))

    @cached_property
    def ends(self) -> frozenset[int]:
        """Ids of the tokens that end a text: the end of a document and, with a template, the end of a turn."""
        return ends_of(self.tokenizer, self.template)

    def write(self, prompt: str, *, tokens: int, temperature: float, top_k: int, top_p: float, seed: int,
              special_tokens: bool = False, cache: bool = True) -> str:
        """Return `prompt` and its continuation, which ends with the document or the turn.

        Args:
            prompt: beginning of the text; "": the beginning of a document.
            tokens: maximum number of new tokens.
            temperature: see `inference.generate.generate`, also for the other arguments.
            top_k: sample from this number of most likely tokens.
            top_p: sample from the most likely tokens of this share.
            seed: of the draws.
            special_tokens: encode special tokens that the prompt spells out ("<|im_start|>") as such. Only for a text
                that a template made: in the text of a user they would speak for the assistant.
            cache: compute each token once.

        Raises:
            ConfigError: `special_tokens`, and the tokenizer is not a tokenizer.json.
        """
        ids = (self._with_special_tokens(prompt) if special_tokens else
               self.tokenizer.encode_plain([prompt])[0].tolist()) or [self.tokenizer.eos]
        new = generate(self.model, ids, tokens=tokens, context=self.context, device=self.device,
                       temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=self.ends, cache=cache)
        return self.tokenizer.decode(ids + new)

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return next(self.model.parameters()).device

    def _with_special_tokens(self, prompt: str) -> list[int]:
        if not isinstance(self.tokenizer, HuggingFace):
            raise ConfigError(f"special tokens in a prompt need a tokenizer.json, not a {self.tokenizer.format} file",
                              where="--special-tokens", fix="leave the option out")
        ids: list[int] = self.tokenizer.with_control_tokens.encode(prompt, add_special_tokens=False).ids
        return ids


def ends_of(tokenizer: Encoder, template: ChatTemplate | None) -> frozenset[int]:
    """Return the ids of the tokens that end a text: the end of a document and, with a template, the end of a turn."""
    turn = template.turn_token() if template is not None else None
    return frozenset({tokenizer.eos, *([tokenizer.special[turn]] if turn is not None else [])})


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
    if run.exists(tokenizer_files.TOKENIZER):  # an imported model
        return load(run.read(tokenizer_files.TOKENIZER)), 0
    raise ConfigError("the tokenizer is not known", where=run.uri, fix="give it: --tokenizer PATH/tokenizer.json")
