"""How vocabularies spell text: a token → its bytes, and the words that tokens are parts of.

Tokens are spelled in GPT-2's alphabet of bytes or SentencePiece's form. A token of Kielo's own tokenizers is
part of one word. It never has two digits (all numbers are spelled the same way) and never joins a line's end
to the next character. Combining marks stay with their letters.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import regex
from tokenizers import Regex, pre_tokenizers

from kielo.recipe.errors import KieloError
from kielo.tokenizer.load import TextTokenizer, vocabulary_size

SPACE = "▁"  # how SentencePiece spells a space
BYTE_TOKEN = regex.compile(r"<0x[0-9A-F]{2}>")  # how SentencePiece vocabularies spell a byte


class Spelling:
    """The convention of a vocabulary, of which `content` is tokenizer.json. remedy: the fix of the error."""

    def __init__(self, content: Mapping[str, Any], folder: Path, remedy: str):
        keys = ("normalizer", "pre_tokenizer", "decoder")
        parts = json.dumps([content.get(key) for key in keys], ensure_ascii=False)
        self.is_byte_level = '"ByteLevel"' in parts
        if not self.is_byte_level and SPACE not in parts and '"Metaspace"' not in parts:
            raise KieloError(
                f"{folder}: its tokens are neither byte-level (GPT-2, Llama 3, Kielo) nor in SentencePiece's "
                f"form (Llama 2, Mistral, Gemma), so their texts are not known. Fix: {remedy}"
            )

    def is_byte(self, token: str) -> bool:
        return not self.is_byte_level and bool(BYTE_TOKEN.fullmatch(token))

    def bytes_of(self, token: str) -> bytes:
        if self.is_byte(token):
            return bytes([int(token[3:5], 16)])
        if self.is_byte_level and all(character in BYTES for character in token):
            return bytes(BYTES[character] for character in token)
        return token.replace(SPACE, " ").encode()

    def text_of(self, token: str) -> str:
        """Return the whole characters of a token, without bytes of others at its ends."""
        return self.bytes_of(token).decode("utf-8", "ignore")


def _byte_alphabet() -> dict[int, str]:
    """Return byte → GPT-2's character: printable Latin-1 as it is, the others from U+0100 on, in order."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    others = iter(sorted(character for character in alphabet if ord(character) >= 256))
    return {byte: chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)}


ALPHABET = _byte_alphabet()
BYTES = {character: byte for byte, character in ALPHABET.items()}


class TokenNames:
    r"""The tokens of a tokenizer as people read them: an id → `▁maja`, `jõgi`, `\xC3`, `<|endoftext|>`."""

    def __init__(self, tokenizer: TextTokenizer):
        content = json.loads(tokenizer.whole.to_str())
        self._spelling = Spelling(content, tokenizer.folder, "a vocabulary of one of these")
        self._added = {token["id"] for token in content["added_tokens"]}
        self._tokenizer = tokenizer.whole

    def __call__(self, number: int) -> str:
        token = self._tokenizer.id_to_token(number) or ""
        return token if number in self._added else readable(self._spelling.bytes_of(token))


def readable(text: bytes) -> str:
    """Return the text on one line without spaces: ▁ for a space, escapes for invisible characters."""

    def visible(character: str) -> str:
        if "\udc80" <= character <= "\udcff":  # a byte that is no UTF-8
            return f"\\x{ord(character) - 0xDC00:02X}"
        shown = character if character.isprintable() else character.encode("unicode_escape").decode()
        return SPACE if character == " " else shown

    return "".join(map(visible, text.decode("utf-8", "surrogateescape")))


# As `measure.WORD`, with joiners, which Indic scripts and Persian write between letters, and U+FFFD for bytes
# that are no whole character: vocabularies cut letters of many bytes.
_OF_WORDS = regex.compile(r"[\p{L}\p{M}\p{N}\u200c\u200d\ufffd]")


@dataclass(frozen=True)
class WordPieces:
    """Bool arrays [v]: does a token begin, and does it end, with a letter, digit, or byte of a character?"""

    begins_inside: np.ndarray
    ends_inside: np.ndarray

    def go_on(self, tokens: np.ndarray) -> np.ndarray:
        """Return for each token but the first, bool [n, s - 1], whether it continues the word before it."""
        return self.begins_inside[tokens[:, 1:]] & self.ends_inside[tokens[:, :-1]]


def word_pieces(tokenizer: TextTokenizer) -> WordPieces:
    """Read the arrays from the vocabulary. Control tokens are outside of words."""
    size = vocabulary_size(tokenizer)
    begins, ends = np.zeros(size, bool), np.zeros(size, bool)
    content = json.loads(tokenizer.whole.to_str())
    control = {token["id"] for token in content["added_tokens"]}
    is_byte_level = "ByteLevel" in json.dumps([content.get("decoder"), content.get("pre_tokenizer")])
    prefix = content["model"].get("continuing_subword_prefix") or ""
    for token, number in tokenizer.whole.get_vocab(with_added_tokens=True).items():
        if number in control or not token:
            continue
        text = _text(token, is_byte_level)
        # In a vocabulary with a prefix, a token without it begins a word.
        begins[number] = token.startswith(prefix) and bool(prefix or _OF_WORDS.match(text[0]))
        ends[number] = bool(_OF_WORDS.match(text[-1]))
    return WordPieces(begins, ends)


def _text(token: str, is_byte_level: bool) -> str:
    if is_byte_level and all(character in BYTES for character in token):
        return bytes(map(BYTES.__getitem__, token)).decode("utf-8", "replace")
    if BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)]).decode("utf-8", "replace")
    return token


# The pattern `qwen35` of llama.cpp, letter for letter: it reads no vocabulary with other patterns.
PRE_TOKENS = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"  # a word with the space or sign before it
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"  # punctuation
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"  # spaces at the end of a text; indentation, less the last space, which is the word's
    r"|\s+"
)
# Characters. The time of learning grows with the square of a word's length. No compound is longer, and a run
# of Thai or Chinese between two signs loses only the pair at a cut.
LONGEST_WORD = 128
_MAY_BE_LONG = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD + 1}}}|(?<!\s)\s{{{LONGEST_WORD + 1}}}")
_LONG = regex.compile(
    "|".join(rf"{kind}{{{LONGEST_WORD + 1},}}+" for kind in (r"[\p{L}\p{M}]", r"[^\s\p{L}\p{M}\p{N}]", r"\s"))
)
CUT = pre_tokenizers.Split(Regex(PRE_TOKENS), behavior="isolated")


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([CUT, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def cut_words(text: str) -> list[str]:
    return [word for word, _ in CUT.pre_tokenize_str(text)]


class ShortWords:
    """Texts cut in words of over LONGEST_WORD characters (DNA, base64). Such words have `cut_bytes`."""

    def __init__(self, texts: Iterable[str]):
        self._texts = texts
        self.cut_bytes = 0

    def __iter__(self) -> Iterator[str]:
        self.cut_bytes = 0
        for text in self._texts:
            begin = 0
            for word in _LONG.finditer(text) if _MAY_BE_LONG.search(text) else ():
                self.cut_bytes += len(word[0].encode())
                for end in range(word.start() + LONGEST_WORD, word.end(), LONGEST_WORD):
                    yield text[begin:end]
                    begin = end
            yield text[begin:]
