"""How a vocabulary spells text, in GPT-2's alphabet of bytes or SentencePiece's form: a token → its bytes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import regex
from tokenizers import pre_tokenizers

from kielo.recipe.errors import KieloError
from kielo.tokenizer.load import TextTokenizer

SPACE = "▁"  # how SentencePiece spells a space
BYTE_TOKEN = regex.compile(r"<0x[0-9A-F]{2}>")  # how SentencePiece vocabularies spell a byte


class Spelling:
    """The convention of a vocabulary, of which `content` is tokenizer.json. remedy: the fix of the error."""

    def __init__(self, content: Mapping[str, Any], folder: Path, remedy: str):
        self.is_byte_level = _is_byte_level(content, folder, remedy)

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


def _is_byte_level(content: Mapping[str, Any], folder: Path, remedy: str) -> bool:
    parts = json.dumps(
        [content.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")], ensure_ascii=False
    )
    if '"ByteLevel"' in parts:
        return True
    if SPACE in parts or '"Metaspace"' in parts:
        return False
    raise KieloError(
        f"{folder}: its tokens are neither byte-level (GPT-2, Llama 3, Kielo) nor in SentencePiece's form "
        f"(Llama 2, Mistral, Gemma), so their texts are not known. Fix: {remedy}"
    )


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
    return "".join(map(_visible, text.decode("utf-8", "surrogateescape")))


def _visible(character: str) -> str:
    if character == " ":
        return SPACE
    if "\udc80" <= character <= "\udcff":  # a byte that is no UTF-8
        return f"\\x{ord(character) - 0xDC00:02X}"
    return character if character.isprintable() else character.encode("unicode_escape").decode()
