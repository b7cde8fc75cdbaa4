"""The frozen tables of the tokens of `gopher_quality`: properties of each character, and words with special splits.

Like `unicode_table`, the package contains the character table (`token_table.bin`, xz). `build()` computes it on a
Python whose `unicodedata.unidata_version` is `UNICODE_VERSION`, and a test compares the two. To write the file again:

    python -m tidewheel.data.text.token_table
"""

from __future__ import annotations

import lzma
import unicodedata
from functools import lru_cache
from pathlib import Path

import numpy as np

from tidewheel.data.text.unicode_table import CODE_POINTS, UNICODE_VERSION

PATH = Path(__file__).with_name("token_table.bin")

# Properties of a character, one bit each.
SPACE = 1 << 0  # white space: ends a chunk
ALPHA = 1 << 1  # letters and marks
LOWER = 1 << 2  # those that are not upper case
UPPER = 1 << 3  # those that are not lower case
NUMERAL = 1 << 4  # 0 to 9
OPENS = 1 << 5  # a token of its own at the start of a chunk
CLOSES = 1 << 6  # a token of its own at the end of a chunk
QUOTE = 1 << 7  # quotation marks and CJK brackets
STOPS = 1 << 8  # a full stop behind it is a token of its own
ICON = 1 << 9  # pictures: a token of their own anywhere
CURRENCY = 1 << 10  # a token of its own before a chunk, or behind a digit
SYMBOL = 1 << 11  # punctuation and controls: a token of these alone is not a word
LETTER = 1 << 12  # general category L*
SENTENCE = 1 << 13  # ends a sentence when a token of its own
PUNCTUATION = 1 << 14  # general category P*: does not begin a sentence
INFIX = 1 << 15  # may cut a chunk

_PUNCTUATION = "…,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪"
_QUOTES = "'\"”“`‘´’‚,„»«「」『』（）〔〕【】《》〈〉〈〉⟦⟧"
_CURRENCIES = "$£€¥฿₽﷼₴" + "".join(map(chr, range(0x20A0, 0x20C0)))
_STOPS = "%²-+|(?:)"
_INFIXES = ".…+-*^,:<>=/–—~"
SENTENCE_ENDS = (
    "!.?։؟۔܀܁܂߹।॥၊။។፧፨᙮᜵᜶᠃᠉᥄᥅᪨᪩᪪᪫᭚᭛᭞᭟᰻᰼᱾᱿‼‽⁇⁈⁉⸮⸼꓿꘎꘏꛳꛷꡶꡷꣎꣏꤯꧈꧉꩝꩞꩟꫰꫱꯫﹒﹖﹗！．？｡。")
"""Marks that end a sentence, in the scripts of the basic plane."""


def _split(words: str) -> list[str]:
    return words.split()


# Words that are split, or not, contrary to the rules (`special_words`).
_NEGATED = _split(
    "ca could do does did had may might must need ought sha should wo would ai are is was were have has dare")
_PERSONS = _split(
    "i you he she it we they")
_QUESTIONS = _split(
    "who what when where why how there that this these those")
_ABBREVIATIONS = _split(
    "Mt. Ak. Ala. Apr. Ariz. Ark. Aug. Calif. Colo. Conn. Dec. Del. Feb. Fla. Ga. Ia. Id. Ill. Ind. Jan. Jul. "
    "Jun. Kan. Kans. Ky. La. Mar. Mass. Mich. Minn. Miss. N.C. N.D. N.H. N.J. N.M. N.Y. Neb. Nebr. Nev. Nov. "
    "Oct. Okla. Ore. Pa. S.C. Sep. Sept. Tenn. Va. Wash. Wis. a.m. Adm. Bros. co. Co. Corp. D.C. Dr. e.g. "
    "E.g. E.G. Gen. Gov. i.e. I.e. I.E. Inc. Jr. Ltd. Md. Messrs. Mo. Mont. Mr. Mrs. Ms. p.m. Ph.D. Prof. "
    "Rep. Rev. Sen. St. vs. v.s. and/or w/o o'clock O'clock ma'am Ma'am 'cause 'Cause 'bout 'em 'll 'd 're 's "
    "'S '' C++")
_EMOTICONS = _split(
    ":) :-) :)) (: (-: =) (= :] :-] [: [= :o) (o: :} :-} 8) 8-) ;) ;-) (; (-; :( :-( :(( ): )-: =( :') :/ :-/ "
    "=/ =| :| :-| ]= =[ :1 :P :-P :p :-p :O :o :0 :() :* :-* :3 :> :-> :X :x :D :-D ;D =D 8D ^_^ >.< >.> <.< "
    "._. -_- v.v V.V o.O O.o O.O o.o 0.0 o.0 0.o <3 </3")
UNITS = _split(
    "km km² km³ m m² m³ dm dm² dm³ cm cm² cm³ mm mm² mm³ ha µm nm yd in ft kg g mg µg t lb oz m/s km/h kmh "
    "mph hPa Pa mbar mb MB kb KB gb GB tb TB T G M K %")


def build() -> np.ndarray:
    """Compute the properties of every code point from this Python's `unicodedata`, uint16 [0x110000]."""
    table = np.zeros(CODE_POINTS, np.uint16)
    for code in range(CODE_POINTS):
        if not 0xD800 <= code < 0xE000:
            table[code] = _bits(chr(code))
    return table


def _bits(character: str) -> int:
    category = unicodedata.category(character)
    alpha = category[0] in "LM"
    lower = alpha and category not in ("Lu", "Lt")
    upper = alpha and category != "Ll"
    numeral = character in "0123456789"
    icon = category == "So"
    edge = character in _PUNCTUATION or character in _QUOTES or icon or character in "—–"
    bits = {
        SPACE: character.isspace(), ALPHA: alpha, LOWER: lower, UPPER: upper, NUMERAL: numeral,
        OPENS: edge or character in "§%=" or character in _CURRENCIES, CLOSES: edge, QUOTE: character in _QUOTES,
        STOPS: lower or numeral or character in _STOPS or character in _PUNCTUATION or character in _QUOTES,
        ICON: icon, CURRENCY: character in _CURRENCIES,
        SYMBOL: category[0] == "P" or category == "Cc" or (character.isascii() and category[0] == "S"),
        LETTER: category[0] == "L", SENTENCE: character in SENTENCE_ENDS, PUNCTUATION: category[0] == "P",
        INFIX: icon or character in _INFIXES,
    }
    return sum(bit for bit, is_set in bits.items() if is_set)


@lru_cache(maxsize=1)
def load() -> np.ndarray:
    """Return the package's table, uint16 [0x110000], read-only."""
    return np.frombuffer(lzma.decompress(PATH.read_bytes()), "<u2")


@lru_cache(maxsize=1)
def special_words() -> dict[str, tuple[str, ...]]:
    """Return the tokens of each chunk that the rules alone would split differently, with "'" and with "’"."""
    splits: dict[str, tuple[str, ...]] = {}

    def add(*parts: str) -> None:
        for first in {parts[0], parts[0].title()}:
            tokens = (first, *parts[1:])
            splits["".join(tokens)] = tokens

    for verb in _NEGATED:
        add(verb, "n't")
        add(verb, "nt")
        if verb in ("could", "might", "must", "should", "would"):
            add(verb, "'ve")
    for person in _PERSONS:
        endings = ["'ll", "'d"] + ["'ve"] * (person in ("i", "you", "we", "they")) + [
            "'re"] * (person in ("you", "we", "they")) + ["'s"] * (person in ("he", "she", "it"))
        for ending in [*endings, *(["'m"] if person == "i" else [])]:
            add(person, ending)
            add(person, ending[1:])
    for word in _QUESTIONS:
        for ending in ("'s", "'ll", "'d", "'re", "'ve"):
            if not (word in ("these", "those") and ending == "'s") and not (
                    word in ("that", "this") and ending in ("'re", "'ve")):
                add(word, ending)
                add(word, ending[1:])
    for first, second in (("can", "not"), ("gon", "na"), ("got", "ta"), ("let", "'s"), ("c'm", "on"), ("y'", "all")):
        add(first, second)
    for word in ("ill", "its", "hell", "shell", "shed", "were", "well"):  # words in their own right
        for form in (word, word.title()):
            splits.pop(form, None)
    for whole in (*_ABBREVIATIONS, *_EMOTICONS, *(f"{letter}." for letter in "abcdefghijklmnopqrstuvwxyzäöü")):
        splits[whole] = (whole,)
    for hour in range(1, 13):
        for part in ("am", "pm", "a.m.", "p.m."):
            splits[f"{hour}{part}"] = (str(hour), part)
    curly = {chunk: tokens for chunk, tokens in splits.items() if "'" in chunk}
    splits.update({chunk.replace("'", "’"): tuple(token.replace("'", "’") for token in tokens)
                   for chunk, tokens in curly.items()})
    return splits


def main() -> None:
    """Write the package's table from this Python's `unicodedata`."""
    if unicodedata.unidata_version != UNICODE_VERSION:
        raise SystemExit(f"this Python has Unicode {unicodedata.unidata_version}; the table is {UNICODE_VERSION}")
    PATH.write_bytes(lzma.compress(build().astype("<u2").tobytes(), preset=9))


if __name__ == "__main__":
    main()
