"""Deterministic training of a byte-level BPE with Hugging Face `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidewheel.data.config import TokenizeStep
from tidewheel.shards.tokenizer import Settings

END_OF_TEXT = "<|endoftext|>"
"""Special token with id 0."""
PAD = "<|pad|>"
"""Special token with id 1."""
MIN_VOCABULARY = 256 + 2  # all bytes and two special tokens
# Llama 3's pattern for splitting text before merging: words with a leading space, three digits, symbols, line ends
_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
WORD_CHARACTERS = 2048
"""Maximum length of a word in training; longer words are cut, because the work is quadratic in the length of a word."""


def train_bpe(texts: Iterable[str], vocabulary_size: int, special_tokens: Sequence[str] = (), *,
              progress: bool = False) -> bytes:
    """Train a byte-level BPE and return its tokenizer.json.

    The same multiset of texts gives the same bytes, in any order and with any number of threads: merges depend only on
    counts, and ties are broken by token ids. Words longer than `WORD_CHARACTERS` are cut in training only; the
    tokenizer itself does not cut them.

    Args:
        texts: the texts.
        vocabulary_size: maximum number of tokens. There are fewer if the texts have no more repeated pairs.
        special_tokens: special tokens for chat templates; their ids follow those of `END_OF_TEXT` and `PAD`.
        progress: show the trainer's progress.

    Raises:
        ValueError: `vocabulary_size` is less than `MIN_VOCABULARY` and the special tokens need.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    least = MIN_VOCABULARY + len(special_tokens)
    if vocabulary_size < least:
        raise ValueError(f"vocabulary_size must be at least {least} (256 bytes and {least - 256} special tokens), "
                         f"got {vocabulary_size}")
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    cut = pre_tokenizers.FixedLength(length=WORD_CHARACTERS)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, cut, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary_size, show_progress=progress,
                                  special_tokens=list(dict.fromkeys([END_OF_TEXT, PAD, *special_tokens])),
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    return (tokenizer.to_str(pretty=True) + "\n").encode()


def settings_of(step: TokenizeStep) -> Settings:
    """Return the recipe's settings of a tokenizer, apart from its file."""
    return Settings(bos=step.bos, eos=step.eos, bos_token=step.bos_token, eos_token=step.eos_token,
                    pad_token=step.pad_token, vocabulary_multiple=step.vocabulary_multiple, encoding=step.encoding,
                    pattern=step.pattern, special_tokens=dict(step.special_tokens))
