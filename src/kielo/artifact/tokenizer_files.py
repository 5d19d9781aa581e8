"""JSON of the tokenizer stage: `measure.json`, its figures, and `row_map.json`, old rows for new tokens."""

from typing import ClassVar, Literal

from kielo.artifact.stage_json import JsonFile

# `tokenizer/measure.json`: figures of the tokenizer on text that it was not trained on.


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


# `tokenizer/row_map.json`: which rows of a model's old vocabulary each row of a new one is made of.


Transplant = Literal["mean", "focus", "random"]


class RowMap(JsonFile):
    """The old rows that each row of a new vocabulary is made of, in a vocabulary transplant."""

    FILE_NAME: ClassVar[str] = "row_map.json"

    method: Transplant
    """The method that was asked for: means of old rows, sums weighted by similarity, or no row taken over."""
    old_tokenizer: str
    """Hash of the tokenizer that the old rows belong to."""
    old_vocabulary_size: int
    """Its largest id plus one; the model may have more rows."""
    rows: list[list[int]]
    """The old ids of each new id, ascending, repeated where the text has a token twice; none: random."""
    control_tokens: dict[str, str]
    """New control token to the old one whose row it takes."""
    weights: dict[str, list[float]] = {}
    """New id to the weights (fp32) of its old rows, in their order; those of others weigh the same."""

    def is_composed(self, new_id: int) -> bool:
        """Return True for a row that is the mean or the weighted sum of old rows."""
        return len(self.rows[new_id]) > 1 or str(new_id) in self.weights

    @property
    def copied(self) -> int:
        """Rows that are one old row."""
        return len(self.rows) - self.composed - self.random

    @property
    def composed(self) -> int:
        """Rows that are the mean of several old rows, or a sum of old rows weighted by similarity."""
        return sum(map(self.is_composed, range(len(self.rows))))

    @property
    def random(self) -> int:
        """Rows that are made of no old row."""
        return sum(not row for row in self.rows)

    @property
    def tokens_per_composed_row(self) -> float:
        """Mean number of old tokens of a composed row; 0 without any."""
        return (sum(map(len, self.rows)) - self.copied) / max(1, self.composed)
