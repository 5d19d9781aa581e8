"""Tokens as people read them, whatever their vocabulary's spelling: an id → `▁maja`, `jõgi`, `\\xC3`."""

import json

from kielo.tokenizer.load import TextTokenizer
from kielo.tokenizer.spelling import SPACE, Spelling


class TokenNames:
    """The names of a tokenizer's tokens: their text, with ▁ for a space, and bytes of no whole character.

    A control token has its own name.
    """

    def __init__(self, tokenizer: TextTokenizer):
        content = json.loads(tokenizer.whole.to_str())
        self._spelling = Spelling(content, tokenizer.folder, "a vocabulary of one of these")
        self._added = {token["id"] for token in content["added_tokens"]}
        self._tokenizer = tokenizer.whole

    def __call__(self, number: int) -> str:
        """Returns the name of the token with this id; "" for an id without a token."""
        token = self._tokenizer.id_to_token(number) or ""
        return token if number in self._added else readable(self._spelling.bytes_of(token))


def readable(text: bytes) -> str:
    """Returns the text on one line without spaces: ▁ for a space, escapes for what cannot be seen."""
    return "".join(map(_visible, text.decode("utf-8", "surrogateescape")))


def _visible(character: str) -> str:
    if character == " ":
        return SPACE
    if "\udc80" <= character <= "\udcff":  # a byte that is no UTF-8
        return f"\\x{ord(character) - 0xDC00:02X}"
    return character if character.isprintable() else character.encode("unicode_escape").decode()
