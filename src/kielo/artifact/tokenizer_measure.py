"""`tokenizer/measure.json`: figures of the tokenizer on text that it was not trained on."""

from typing import ClassVar

from kielo.artifact.stage_json import JsonFile


class TokenizerMeasure(JsonFile):
    """Figures of a tokenizer. A word is a run of letters, marks and digits."""

    FILE_NAME: ClassVar[str] = "measure.json"

    measured_on: str
    """The text, in words."""
    end_of_text_id: int
    """Id of the end-of-text token."""
    vocabulary_size: int
    """Tokens of the vocabulary, added ones included."""
    tokens_per_word: float
    """Tokens per word."""
    bytes_per_token: float
    """UTF-8 bytes per token."""
    characters_per_token: float
    """Characters (code points) per token."""
    exact_round_trip_share: float
    """Share (0 to 1) of the texts that are the same after encoding and decoding."""
    vocabulary_used_share: float
    """Share (0 to 1) of the vocabulary that occurs in the text."""
    single_byte_token_share: float
    """Share (0 to 1) of the tokens written that are a single byte."""
    renyi_efficiency: float
    """Rényi entropy of order 2.5 divided by the logarithm of the vocabulary's size, 0 to 1."""
    shannon_efficiency: float
    """Shannon entropy divided by the logarithm of the vocabulary's size, 0 to 1."""
    texts: int
    """Texts that were measured."""
    words: int
    """Words of the texts."""
    bytes: int
    """UTF-8 bytes of the texts."""
    tokens: int
    """Tokens of the texts."""
    f95: int | None = None
    """Occurrences of the rarest token among the 95 % most frequent of the vocabulary."""
