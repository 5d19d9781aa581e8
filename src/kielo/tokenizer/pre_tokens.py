"""The words that Kielo's tokenizers cut a text into; a token is part of one.

A token never holds two digits (numbers of any length are spelled the same way) and never joins a line's end
to what follows it. Combining marks stay with their letters.
"""

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
