"""Which tokens go on with the word of the token before them, for any tokenizer: a fact of their letters.

A word is a run of letters, combining marks and digits, as in `measure.WORD`. Within it may be the joiners
that Indic scripts and Persian write between letters.
"""

import json
from dataclasses import dataclass

import numpy as np
import regex

from kielo.tokenizer.load import TextTokenizer, vocabulary_size
from kielo.tokenizer.spelling import BYTE_TOKEN, BYTES

# U+FFFD stands for bytes that are no whole character: vocabularies cut letters of many bytes.
_OF_WORDS = regex.compile(r"[\p{L}\p{M}\p{N}\u200c\u200d\ufffd]")


@dataclass(frozen=True)
class WordPieces:
    """Bool arrays [v]: does a token begin, and does it end, with a letter, digit, or byte of a character?"""

    begins_inside: np.ndarray
    ends_inside: np.ndarray

    def go_on(self, tokens: np.ndarray) -> np.ndarray:
        """Returns True for each token but the first [n, s - 1] that is in the word of the one before it."""
        return self.begins_inside[tokens[:, 1:]] & self.ends_inside[tokens[:, :-1]]


def word_pieces(tokenizer: TextTokenizer) -> WordPieces:
    """Reads them from the vocabulary; control tokens are outside of words."""
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
    """Returns the text of a token; bytes that are no whole character are U+FFFD."""
    if is_byte_level and all(character in BYTES for character in token):
        return bytes(map(BYTES.__getitem__, token)).decode("utf-8", "replace")
    if BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)]).decode("utf-8", "replace")
    return token
