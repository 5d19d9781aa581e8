"""Which tokens go on with the word of the token before them, for any tokenizer: a fact of their letters."""

import json
from dataclasses import dataclass

import numpy as np

from kielo.tokenizer.load import TextTokenizer, vocabulary_size
from kielo.tokenizer.spelling import BYTES, SPACE


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
        if prefix and token.startswith(prefix):
            begins[number], ends[number] = True, _is_inside(token[-1], is_byte_level)
        else:
            begins[number], ends[number] = (_is_inside(one, is_byte_level) for one in (token[0], token[-1]))
    return WordPieces(begins, ends)


def _is_inside(character: str, is_byte_level: bool) -> bool:
    """Returns True for a letter or digit. In a byte-level vocabulary a character stands for a byte."""
    if is_byte_level:
        byte = BYTES.get(character)
        return byte is not None and (byte >= 0x80 or chr(byte).isalnum())
    return character != SPACE and character.isalnum()
