"""Byte-level BPE: training, and encoding of document columns. Hugging Face `tokenizers` does the work."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tidewheel.errors import InputError

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"  # ids 0 and 1 of the tokenizers trained here
PADDING_MULTIPLE = 128  # of the embedding's rows, for tensor cores
MIN_VOCABULARY = 256 + 2  # every byte and the two special tokens
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>")
_PAD_NAMES = (PAD, "<pad>", "<|finetune_right_pad_id|>", "[PAD]")
# how text is cut before merging: Llama 3's pattern (words with a leading space, digits in threes, symbols, line ends)
_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
_BATCH = 512  # documents a call, so that memory stays bounded


def train_bpe(texts: Iterable[str], vocabulary_size: int) -> bytes:
    """Train a byte-level BPE and return its tokenizer.json.

    The same multiset of texts gives the same bytes, in any order and with any number of threads: merges
    depend on counts only, and ties are broken by token ids. Fewer merges than asked for are made when
    the texts have no more repeating pairs.

    Raises:
        ValueError: vocabulary_size below `MIN_VOCABULARY`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocabulary_size < MIN_VOCABULARY:
        raise ValueError(f"vocabulary_size must be at least {MIN_VOCABULARY} (256 bytes and 2 special tokens), "
                         f"got {vocabulary_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary_size, special_tokens=[END_OF_TEXT, PAD], show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(texts, trainer)
    return (tokenizer.to_str(pretty=True) + "\n").encode()


class Encoder:
    """Encodes documents with a tokenizer.json; picklable by its JSON.

    Attributes: vocabulary_size (largest token id + 1), padded_size (next multiple of 128), eos and pad
    (token ids; pad is eos where the tokenizer has none).

    Raises:
        InputError: the bytes are no tokenizer.json, or it has no end-of-text token.
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        from tokenizers import Tokenizer

        self._json = bytes(tokenizer_json)
        try:
            json.loads(self._json)
            self._tokenizer = Tokenizer.from_str(self._json.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"not a tokenizer.json ({str(error)[:200]})", where="tokenizer",
                             mend="give the tokenizer.json file of a Hugging Face fast tokenizer") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # "<|endoftext|>" inside a document is plain text: only `encode` itself may end a document
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary_size = max(vocabulary.values()) + 1
        self.padded_size = -(-self.vocabulary_size // PADDING_MULTIPLE) * PADDING_MULTIPLE
        eos = next((vocabulary[name] for name in _END_NAMES if name in vocabulary), None)
        if eos is None:
            raise InputError(f"the tokenizer has no end-of-text token; looked for {', '.join(_END_NAMES)}",
                             where="tokenizer", mend="add one of these as a special token")
        self.eos: int = eos
        self.pad: int = next((vocabulary[name] for name in _PAD_NAMES if name in vocabulary), eos)

    def __reduce__(self) -> tuple[type[Encoder], tuple[bytes]]:
        return Encoder, (self._json,)

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(tokens uint32 [t], offsets int64 [n+1]): all documents in a row, each with EOS at its end."""
        parts, lengths = [], np.zeros(len(texts) + 1, np.int64)
        end = np.array([self.eos], np.uint32)
        for first, batch in _batches(texts):
            encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            for place, encoding in enumerate(encodings, first + 1):
                ids = np.asarray(encoding.ids, np.uint32)
                lengths[place] = len(ids) + 1
                parts += [ids, end]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint32), np.cumsum(lengths)

    def decode(self, tokens: np.ndarray | Sequence[int]) -> str:
        """The text of tokens; special tokens are left out, broken UTF-8 at the edges becomes U+FFFD."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)


def _batches(texts: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    for first in range(0, len(texts), _BATCH):
        yield first, [str(item) for item in texts[first : first + _BATCH]]
