"""The words that Kielo's tokenizers cut a text into; a token is part of one.

A token never holds two digits (numbers of any length are spelled the same way) and never joins a line's end
to what follows it. Combining marks stay with their letters.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import regex
from tokenizers import Regex, pre_tokenizers

from kielo.tokenizer.load import TextTokenizer, vocabulary_size
from kielo.tokenizer.spelling import BYTE_TOKEN, BYTES

# Which tokens go on with the word of the token before them, for any tokenizer: a fact of their letters.
#
# A word is a run of letters, combining marks and digits, as in `measure.WORD`. Within it may be the joiners
# that Indic scripts and Persian write between letters.


# U+FFFD stands for bytes that are no whole character: vocabularies cut letters of many bytes.
_OF_WORDS = regex.compile(r"[\p{L}\p{M}\p{N}\u200c\u200d\ufffd]")


@dataclass(frozen=True)
class WordPieces:
    """Bool arrays [v]: does a token begin, and does it end, with a letter, digit, or byte of a character?"""

    begins_inside: np.ndarray
    ends_inside: np.ndarray

    def go_on(self, tokens: np.ndarray) -> np.ndarray:
        """Return True for each token but the first [n, s - 1] that is in the word of the one before it."""
        return self.begins_inside[tokens[:, 1:]] & self.ends_inside[tokens[:, :-1]]


def word_pieces(tokenizer: TextTokenizer) -> WordPieces:
    """Read them from the vocabulary; control tokens are outside of words."""
    size = vocabulary_size(tokenizer)
    begins, ends = np.zeros(size, bool), np.zeros(size, bool)
    content = json.loads(tokenizer.whole.to_str())
    control = {token["id"] for token in content["added_tokens"]}
    is_byte_level = "ByteLevel" in json.dumps([content.get("decoder"), content.get("pre_tokenizer")])
    prefix = content["model"].get("continuing_subword_prefix") or ""
    for token, number in tokenizer.whole.get_vocab(with_added_tokens=True).items():
        if number in control or not token:
            continue
        # Without the prefix a token begins a word, whatever stands before it.
        begins[number] = token.startswith(prefix) and (bool(prefix) or _is_inside(token, is_byte_level, 0))
        ends[number] = _is_inside(token, is_byte_level, -1)
    return WordPieces(begins, ends)


def _is_inside(token: str, is_byte_level: bool, place: int) -> bool:
    return bool(_OF_WORDS.match(_text(token, is_byte_level)[place]))


def _text(token: str, is_byte_level: bool) -> str:
    """Return the text of a token; bytes that are no whole character are U+FFFD."""
    if is_byte_level and all(character in BYTES for character in token):
        return bytes(map(BYTES.__getitem__, token)).decode("utf-8", "replace")
    if BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)]).decode("utf-8", "replace")
    return token


# The pattern that llama.cpp calls `qwen35`, letter for letter: it reads no vocabulary with other patterns.
PRE_TOKENS = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"  # a word with the space or sign before it
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"  # punctuation
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"  # spaces at the end of a text; indentation, less the last space, which is the word's
    r"|\s+"
)
# Characters. The time of learning grows with the square of a word's length. No compound is longer, and no run
# of Thai or Chinese between two signs loses more than the pair at a cut.
LONGEST_WORD = 128
_MAY_BE_LONG = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD + 1}}}|(?<!\s)\s{{{LONGEST_WORD + 1}}}")
_LONG = regex.compile(
    "|".join(rf"{kind}{{{LONGEST_WORD + 1},}}+" for kind in (r"[\p{L}\p{M}]", r"[^\s\p{L}\p{M}\p{N}]", r"\s"))
)
_CUT = pre_tokenizers.Split(Regex(PRE_TOKENS), behavior="isolated")


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Return the cut into words, followed by GPT-2's alphabet of bytes."""
    return pre_tokenizers.Sequence([_CUT, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def word_splitter() -> pre_tokenizers.PreTokenizer:
    """Return the cut into words alone."""
    return _CUT


def cut_words(text: str) -> list[str]:
    """Return the words of a text, which are all of it."""
    return [word for word, _ in _CUT.pre_tokenize_str(text)]


class ShortWords:
    """Texts to learn from, cut within words of more than LONGEST_WORD characters (DNA, base64, ruled lines).

    cut_bytes: of those words, in the last reading.
    """

    def __init__(self, texts: Iterable[str]):
        self._texts = texts
        self.cut_bytes = 0

    def __iter__(self) -> Iterator[str]:
        self.cut_bytes = 0
        for text in self._texts:
            if _MAY_BE_LONG.search(text):
                yield from self._parts(text)
            else:
                yield text

    def _parts(self, text: str) -> Iterator[str]:
        begin = 0
        for word in _LONG.finditer(text):
            self.cut_bytes += len(word[0].encode())
            for end in range(word.start() + LONGEST_WORD, word.end(), LONGEST_WORD):
                yield text[begin:end]
                begin = end
        yield text[begin:]
