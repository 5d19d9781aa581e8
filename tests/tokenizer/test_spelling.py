"""Bytes of tokens in both spellings, against GPT-2's own table."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from kielo.recipe.errors import KieloError
from kielo.tokenizer.spelling import ALPHABET, BYTES, Spelling


def spelling(**parts: Any) -> Spelling:
    """Of a tokenizer with this normaliser, pre-tokenizer or decoder."""
    tokenizer = Tokenizer(models.BPE())
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return Spelling(json.loads(tokenizer.to_str()), Path("here"), "another one")


def test_the_alphabet_is_gpt2s() -> None:
    """188 bytes are their own characters; the others, in order, are those from U+0100 on."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    expected = {byte: chr(byte) for byte in own} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    assert expected == ALPHABET and {character: byte for byte, character in expected.items()} == BYTES


def test_bytes_of_byte_level_tokens() -> None:
    """A token with another character is an added one: its text. <0x0A> is six characters."""
    for part in ({"pre_tokenizer": pre_tokenizers.ByteLevel()}, {"decoder": decoders.ByteLevel()}):
        found = spelling(**part)
        assert found.is_byte_level and not found.is_byte("<0x0A>") and found.bytes_of("<0x0A>") == b"<0x0A>"
        assert (found.bytes_of("ĠÃµ"), found.bytes_of("Ā")) == (" õ".encode(), b"\0")
        assert found.bytes_of("▁a") == b" a" and found.bytes_of("ÃŁ漢") == "ÃŁ漢".encode()
        assert (found.text_of("Ãµa"), found.text_of("µaÃ")) == ("õa", "a")


def test_bytes_of_sentencepieces_tokens() -> None:
    replaced = normalizers.Replace(" ", "▁")
    for part in ({"pre_tokenizer": pre_tokenizers.Metaspace("_")}, {"normalizer": replaced}):
        found = spelling(**part)
        assert not found.is_byte_level and found.is_byte("<0xC3>")
        assert not found.is_byte("<0xc3>") and not found.is_byte("a<0xC3>") and not found.is_byte("<0xC3>a")
        assert (found.bytes_of("<0xC3>"), found.bytes_of("<0x0A>")) == (b"\xc3", b"\n")
        assert found.bytes_of("▁õ▁") == " õ ".encode() and found.bytes_of("Ġ") == "Ġ".encode()
        assert (found.text_of("<0xC3>"), found.text_of("▁õ")) == ("", " õ")


def test_another_spelling_is_refused() -> None:
    with pytest.raises(KieloError, match="^here: its tokens are neither byte-level .* Fix: another one$"):
        spelling(pre_tokenizer=pre_tokenizers.Whitespace())
