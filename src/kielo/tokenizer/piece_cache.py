"""The encoding of much text: the pieces between two spaces or signs are encoded once, and then looked up.

Looking a word up takes a tenth of the time of encoding it. A tokenizer encodes each pre-token by itself. So
if its pre-tokeniser always begins a pre-token at certain places (`cut_rule`), the ids of a text are the ids
of its pieces between these places. Other tokenizers encode each text as a whole.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kielo.recipe.errors import KieloError
from kielo.tokenizer.load import TextTokenizer, encode
from kielo.tokenizer.measure import WORD
from kielo.tokenizer.spelling import PRE_TOKENS

MOST_BYTES = 1 << 27  # of kept pieces; then all are dropped
BYTES_OF_ENTRIES = 200  # of a piece's entries in two dictionaries, at most
LONGEST_KEPT = 64  # characters of a piece: longer pieces (scripts without spaces) seldom recur

_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace("{1,3}", "")
# As in the published tokenizer.json of Qwen 3.5. Kielo's own has llama.cpp's spelling.
_QWEN_35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SCRIPTS = r"\p{Latin} \p{Cyrillic} \p{Greek} \p{Hangul} \p{Han}々〆 \p{Hiragana} \p{Katakana}ー"
_ONE_SCRIPT = "|".join(rf"[{script}][{script}\p{{M}}]*" for script in _SCRIPTS.split())
# Of tokenizers that Kielo trained until version 1 of the stage.
_KIELO_1 = (
    rf"[^\r\n\p{{L}}\p{{M}}\p{{N}}]?(?:{_ONE_SCRIPT}|[\p{{L}}\p{{M}}]+)|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+"
    r"|[\r\n]+|[^\S\r\n]+(?=[\r\n]|$)|[^\S\r\n]+(?!\S)|\s+"
)
# Pattern of pre-tokens → whether a pre-token always ends after a line's end that no white space follows.
ENDS_LINES = {PRE_TOKENS: True, _QWEN_35: True, _KIELO_1: True, _GPT_2: False, _LLAMA_3: True, _QWEN_2: True}
_NORMALISERS = {"NFC", "NFKC"}
_MODELS = {"BPE", "Unigram", "WordPiece", "WordLevel"}  # each encodes a pre-token without looking at others


class CutRule(NamedTuple):
    at_signs: bool  # between a letter or digit of LETTERS and a sign of ASCII
    at_lines: bool  # after a line's end
    first_differs: bool  # a text's first piece may have other ids than the same characters inside a text


class EncodedText(NamedTuple):
    """The ids, int32 [tokens], without special tokens. Words are runs of letters, marks and digits."""

    ids: np.ndarray
    num_words: int


class PieceCache:
    """A cache of a tokenizer's pieces, with about MOST_BYTES at most after a call."""

    def __init__(self, tokenizer: TextTokenizer):
        self._tokenizer = tokenizer
        self.cut_rule = cut_rule(tokenizer)
        # Keys: a piece with the space before it; (piece,) for the first piece of a text if first_differs.
        self._ids: dict[str | tuple[str], bytes] = {}
        self._words: dict[str | tuple[str], int] = {}
        self.num_bytes = 0

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        rule = self.cut_rule
        if rule is None:
            return [
                EncodedText(np.array(row, dtype=np.int32), len(WORD.findall(text)))
                for text, row in zip(texts, encode(self._tokenizer, texts), strict=True)
            ]
        rows = [_keys(text, rule) for text in texts]
        missing = list({key for row in rows for key in row if key not in self._ids})
        self._learn(missing, texts)
        ids, words = self._ids.__getitem__, self._words.__getitem__
        encoded = [
            EncodedText(np.frombuffer(b"".join(map(ids, row)), dtype=np.int32), sum(map(words, row)))
            for row in rows
        ]
        self._forget(missing)
        return encoded

    def _learn(self, keys: Sequence[str | tuple[str]], texts: Sequence[str]) -> None:
        pieces = [_piece(key) for key in keys]
        try:
            rows = encode(self._tokenizer, pieces)
        except KieloError:
            encode(self._tokenizer, texts)  # whose error names the text
            raise
        for key, piece, row in zip(keys, pieces, rows, strict=True):
            self._ids[key] = np.array(row, dtype=np.int32).tobytes()
            self._words[key] = len(WORD.findall(piece))
            self.num_bytes += self._bytes(key)

    def _forget(self, learnt: Sequence[str | tuple[str]]) -> None:
        for key in learnt:
            if len(_piece(key)) > LONGEST_KEPT:
                self.num_bytes -= self._bytes(key)
                del self._ids[key], self._words[key]
        if self.num_bytes > MOST_BYTES:
            self._ids.clear()
            self._words.clear()
            self.num_bytes = 0

    def _bytes(self, key: str | tuple[str]) -> int:
        return sys.getsizeof(_piece(key)) + sys.getsizeof(self._ids[key]) + BYTES_OF_ENTRIES


def cut(text: str, at_signs: bool, at_lines: bool) -> list[str]:
    """Cut a text before each space between two characters that are no white space.

    `at_signs` cuts also between a character of LETTERS and one of SIGNS, `at_lines` also between a line's end
    and a character that is no white space. White space is Python's, a few characters more than Unicode's.
    """
    places, usual, unusual = _PIECES[at_signs, at_lines]
    if not text or unusual.search(text):
        return places.split(text)
    pieces = usual.findall(text)
    pieces.pop()  # the empty piece at the end of the text
    return pieces


def _patterns(at_signs: bool, at_lines: bool) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    # The places of cuts, which a search must look for at each character. The pieces of usual texts, in which
    # all white space is single spaces and line ends inside the text. What other texts have.
    places, spaces, end = r"(?<=\S)(?= \S)", " ", ""
    unusual = r"\s | \s|\A | \Z"
    if at_lines:
        places, spaces, end = places + r"|(?<=\n)(?=\S)", r" \n", r"\n*"
        unusual = r"\s(?:[^\S\n]|(?<!\n)\s)|\A\s| \Z"
    usual = f" ?[^{spaces}]*"
    if at_signs:
        places += f"|(?<=[{LETTERS}])(?=[{SIGNS}])"
        letters = f"[^{spaces}{LETTERS}]*[{LETTERS}]*"
        usual = f" ?{letters}(?:[^{spaces}{LETTERS}{SIGNS}]{letters})*"
    return re.compile(places), re.compile(usual + end), re.compile(unusual)


# Letters and digits in all versions of Unicode, and so are the ends of their normal forms NFC and NFKC.
LETTERS = "0-9A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u013e\u0141-\u02af"
LETTERS += "\u0391-\u03a1\u03a3-\u03ce\u0400-\u0481\u048a-\u052f"
SIGNS = re.escape("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
_PIECES = {(signs, lines): _patterns(signs, lines) for signs in (False, True) for lines in (False, True)}


def cut_rule(tokenizer: TextTokenizer) -> CutRule | None:
    r"""Return where texts may be cut without a change of their ids, or None if that is not known.

    The border between a character A that is no white space and a space is a border of pre-tokens if no
    pre-token has a space after such a character. This holds for the patterns of ENDS_LINES, whose
    alternatives have a space only at their beginning or among white space, and for `Metaspace`, which cuts
    before every space. No pattern looks back, and lookaheads start from white space, which A is not. So
    neither side depends on the other. The same holds between a character of LETTERS and a sign: no
    alternative has a sign after a letter or digit (a combining mark is neither, so there is no cut behind
    it). With ENDS_LINES it holds after a line's end: all white space before another character, up to its last
    line's end, is matched by alternatives that end there. `[\r\n]*` behind signs and `\s*[\r\n]+` take all
    line ends that follow, and no alternative has anything but white space behind a line's end.

    NFC and NFKC change neither the space of a cut nor a line's end, join neither with a mark after it, and
    make no white space at the end of another character. Their form of a character of LETTERS ends in a letter
    or digit, and no letter is joined with a sign. Added tokens must not reach over a cut: if one has a sign
    after a letter, texts are cut at spaces and lines alone.
    """
    content = json.loads(tokenizer.for_text.tokenizer.to_str())
    normalisers = _parts(content["normalizer"], "normalizers")
    model, hidden = content["model"], set(tokenizer.for_text.hidden_names.values())
    added = [token for token in content["added_tokens"] if token["content"] not in hidden]
    is_known = (
        all(part["type"] in _NORMALISERS for part in normalisers)
        and all(is_within_pieces(token, bool(normalisers)) for token in added)
        and model["type"] in _MODELS
    )
    rule = rule_of(_parts(content["pre_tokenizer"], "pretokenizers")) if is_known else None
    if rule and any(len(cut(token["content"], at_signs=True, at_lines=False)) > 1 for token in added):
        return rule._replace(at_signs=False)
    return rule


def rule_of(pre_tokenisers: Sequence[Mapping[str, Any]]) -> CutRule | None:
    *before, last = pre_tokenisers or [{"type": ""}]
    if last["type"] == "Metaspace" and not before:
        return CutRule(False, False, last["prepend_scheme"] != "never") if last["split"] else None
    if last["type"] != "ByteLevel":
        return None
    if not before:
        # A space is put before a piece without one at its beginning, so pieces inside a text must have it.
        puts_space = last["add_prefix_space"]
        return CutRule(not puts_space, ENDS_LINES[_GPT_2], puts_space) if last["use_regex"] else None
    if len(before) > 1 or last["use_regex"] or last["add_prefix_space"] or before[0]["type"] != "Split":
        return None
    pattern = before[0]["pattern"].get("Regex")
    if before[0]["behavior"] != "Isolated" or before[0]["invert"] or pattern not in ENDS_LINES:
        return None
    return CutRule(True, ENDS_LINES[pattern], False)


def is_within_pieces(token: Mapping[str, Any], is_normalised: bool) -> bool:
    """Return True if an added token is all white space or has none, and does not look at its neighbours."""
    content = token["content"]
    looks_around = token["lstrip"] or token["rstrip"] or token["single_word"]
    if looks_around or token["normalized"] and is_normalised:
        return False
    return content.isspace() or not any(character.isspace() for character in content)


def _parts(content: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    if content is None:
        return []
    return list(content[key]) if content["type"] == "Sequence" else [content]


def _keys(text: str, rule: CutRule) -> list[str | tuple[str]]:
    pieces = cut(text, rule.at_signs, rule.at_lines)
    return [(pieces[0],), *pieces[1:]] if pieces and rule.first_differs else [*pieces]


def _piece(key: str | tuple[str]) -> str:
    return key if isinstance(key, str) else key[0]
