"""Which tokens go on with the word of the token before them, for any tokenizer: a fact of their letters."""

import json
from dataclasses import dataclass

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from kielo.tokenizer.load import TextTokenizer, vocabulary_size

_SPACE = "▁"  # of SentencePiece


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
        byte = _BYTES.get(character)
        return byte is not None and (byte >= 0x80 or chr(byte).isalnum())
    return character != _SPACE and character.isalnum()


def _bytes_of_characters() -> dict[str, int]:
    """Returns the byte of each character of a byte-level vocabulary.

    Visible Latin-1 characters stand for themselves, and those from U+0100 on for the other bytes in their
    order (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").
    """
    alphabet = set(ByteLevel.alphabet())
    itself = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    others = sorted(set(range(256)) - set(itself.values()))
    return itself | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTES = _bytes_of_characters()
