"""The words that Kielo's tokenizers cut a text into; a token is part of one.

A token never holds two digits (numbers of any length are spelled the same way) and never joins a line's end
to what follows it. Combining marks stay with their letters.
"""

import re
from collections.abc import Iterable, Iterator

import regex
from tokenizers import Regex, pre_tokenizers

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
    """Returns the cut into words, followed by GPT-2's alphabet of bytes."""
    return pre_tokenizers.Sequence([_CUT, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def word_splitter() -> pre_tokenizers.PreTokenizer:
    """Returns the cut into words alone."""
    return _CUT


def cut_words(text: str) -> list[str]:
    """Returns the words of a text, which are all of it."""
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
