"""JSON of the tokenizer stage: `measure.json`, its figures, and `row_map.json`, old rows for new tokens."""

from typing import ClassVar, Literal

from kielo.artifact.stage_json import JsonFile


class TokenizerMeasure(JsonFile):
    """Figures of a tokenizer. A word is a run of letters, marks and digits."""

    FILE_NAME: ClassVar[str] = "measure.json"

    measured_on: str
    end_of_text_id: int
    vocabulary_size: int
    """Tokens of the vocabulary, added tokens included."""
    tokens_per_word: float
    bytes_per_token: float
    characters_per_token: float
    """Characters (code points) per token."""
    exact_round_trip_share: float
    """Share of the texts that are the same after encoding and decoding."""
    vocabulary_used_share: float
    """Share of the vocabulary that occurs in the text."""
    single_byte_token_share: float
    """Share of the written tokens that are a single byte."""
    renyi_efficiency: float
    """Rényi entropy of order 2.5 divided by the logarithm of the vocabulary's size."""
    shannon_efficiency: float
    """Shannon entropy divided by the logarithm of the vocabulary's size."""
    texts: int
    words: int
    bytes: int
    tokens: int
    f95: int | None = None
    """Occurrences of the rarest of the 95 % most frequent tokens of the vocabulary."""


Transplant = Literal["mean", "focus", "random"]


class RowMap(JsonFile):
    """The old rows that each row of a new vocabulary is made of, in a vocabulary transplant."""

    FILE_NAME: ClassVar[str] = "row_map.json"

    method: Transplant
    """Method of the transplant: means of old rows, sums weighted by similarity, or no old rows."""
    old_tokenizer: str
    """Hash of the old rows' tokenizer."""
    old_vocabulary_size: int
    """Largest id of that tokenizer plus one. The model can have more rows."""
    rows: list[list[int]]
    """Old ids of each new id, ascending, repeated if the text has a token twice; empty: random."""
    control_tokens: dict[str, str]
    """New control token → the old control token whose row it takes."""
    weights: dict[str, list[float]] = {}
    """New id → weights (fp32) of its old rows, in their order. Rows of other ids have equal weights."""

    def is_composed(self, new_id: int) -> bool:
        """Return True for a row that is the mean or the weighted sum of old rows."""
        return len(self.rows[new_id]) > 1 or str(new_id) in self.weights

    @property
    def copied(self) -> int:
        return len(self.rows) - self.composed - self.random

    @property
    def composed(self) -> int:
        """Return the number of rows made of several old rows."""
        return sum(map(self.is_composed, range(len(self.rows))))

    @property
    def random(self) -> int:
        return sum(not row for row in self.rows)

    @property
    def tokens_per_composed_row(self) -> float:
        return (sum(map(len, self.rows)) - self.copied) / max(1, self.composed)
