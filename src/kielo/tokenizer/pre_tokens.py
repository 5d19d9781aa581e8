"""The words that Kielo's tokenizers cut a text into; a token is part of one.

A token never joins letters of two scripts, never holds two digits (numbers of any length are spelled the same
way) and never joins a line's end to a word. Combining marks stay with their letters.
"""

from tokenizers import Regex, pre_tokenizers

# One alternative for each script whose words often stand beside another's without a space.
_SCRIPTS = (
    r"\p{Latin}",
    r"\p{Cyrillic}",
    r"\p{Greek}",
    r"\p{Hangul}",
    r"\p{Han}々〆",
    r"\p{Hiragana}",
    r"\p{Katakana}ー",
)
_WORDS = [rf"[{script}][{script}\p{{M}}]*" for script in _SCRIPTS] + [r"[\p{L}\p{M}]+"]
PRE_TOKENS = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{M}}\p{{N}}]?(?:{'|'.join(_WORDS)})",  # a word with the space or sign before it
        r"\p{N}",
        r" ?[^\s\p{L}\p{M}\p{N}]+",  # punctuation
        r"[\r\n]+",
        r"[^\S\r\n]+(?=[\r\n]|$)",  # spaces at the end of a line
        r"[^\S\r\n]+(?!\S)",  # indentation, less the last space, which belongs to the word
        r"\s+",
    ]
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
