"""The tokenizer of a shard set, from a file of Hugging Face tokenizers, SentencePiece or tiktoken."""

from tidewheel.shards.tokenizer.encoder import Encoder, Policy, Settings
from tidewheel.shards.tokenizer.files import load, of_manifest

__all__ = ["Encoder", "Policy", "Settings", "load", "of_manifest"]
