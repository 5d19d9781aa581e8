"""`evaluate/masked_scores.json`: how well an encoder predicts hidden tokens, beside two baselines."""

from typing import ClassVar

from pydantic import Field

from kielo.artifact.stage_json import JsonFile, JsonObject

BASELINES = ("unigram", "bigram")


class Accuracy(JsonObject):
    """Shares of the hidden tokens that were predicted; more is better."""

    model: float
    """The model's."""
    unigram: float
    """That of the most frequent token of the training text."""
    bigram: float
    """That of the token which most often follows the one before in the training text."""

    def baselines(self) -> dict[str, float]:
        """Returns baseline → its share."""
        return {name: getattr(self, name) for name in BASELINES}


class MaskedScores(JsonFile):
    """The scores of one encoder on hidden tokens of the held-out text of a run."""

    FILE_NAME: ClassVar[str] = "masked_scores.json"

    model: str
    """Name of the checkpoint's folder."""
    accuracy: Accuracy
    loss: float
    """The model's mean loss in nats per hidden token."""
    hidden_tokens: int = Field(ge=1)
    """Tokens that were hidden."""
    sequences: int = Field(ge=1)
    """Sequences of held-out text."""
    sequence_length: int
    """Tokens of a sequence."""
    masking: str
    """The unit that is hidden: subword, whole_word or span."""
    masking_rate: float
    """Share of the tokens that are hidden."""
    seed: int
    """The seed that chose them."""
