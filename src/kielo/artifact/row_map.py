"""`tokenizer/row_map.json`: which rows of a model's old vocabulary each row of a new one is made of."""

from typing import ClassVar, Literal

from kielo.artifact.stage_json import JsonFile

Transplant = Literal["mean", "random"]


class RowMap(JsonFile):
    """The old rows whose mean each row of a new vocabulary is, in a vocabulary transplant."""

    FILE_NAME: ClassVar[str] = "row_map.json"

    method: Transplant
    """The method that was asked for: means of old tokens, or no row taken over."""
    old_tokenizer: str
    """Hash of the tokenizer that the old rows belong to."""
    old_vocabulary_size: int
    """Its largest id plus one; the model may have more rows."""
    rows: list[list[int]]
    """The old ids of each new id, ascending, repeated where the text has a token twice; none: random."""
    control_tokens: dict[str, str]
    """New control token to the old one whose row it takes."""

    @property
    def copied(self) -> int:
        """Rows that are one old row."""
        return sum(len(row) == 1 for row in self.rows)

    @property
    def composed(self) -> int:
        """Rows that are the mean of several old rows."""
        return sum(len(row) > 1 for row in self.rows)

    @property
    def random(self) -> int:
        """Rows that are made of no old row."""
        return sum(not row for row in self.rows)

    @property
    def tokens_per_composed_row(self) -> float:
        """Mean number of old tokens of a composed row; 0 without any."""
        return sum(len(row) for row in self.rows if len(row) > 1) / max(1, self.composed)
