"""`train/nearest_tokens.json`: the old tokens that some tokens of a transplanted vocabulary begin near to."""

from typing import ClassVar

from kielo.artifact.stage_json import JsonFile, JsonObject


class NearToken(JsonObject):
    """An old token, and how near it is."""

    token: str
    """The token as people read it: its text with ▁ for a space, or its bytes, as \\xC3."""
    cosine: float
    """Cosine between its row and the new token's."""


class NewToken(JsonObject):
    """A token whose first row was made of several old ones."""

    token: str
    """The token, as people read it."""
    made_of: str
    """The old tokens of its row, with their weights where those are not equal."""
    nearest: list[NearToken]
    """The old tokens whose rows of the embedding are nearest to its own, the nearest first."""

    def nearest_in_words(self) -> str:
        """Returns them with their cosines: `maja 0.83, house 0.71`."""
        return ", ".join(f"{near.token} {near.cosine:.2f}" for near in self.nearest)


class NearestTokens(JsonFile):
    """The old tokens that some tokens of a transplanted vocabulary begin near to."""

    FILE_NAME: ClassVar[str] = "nearest_tokens.json"

    tokens: list[NewToken]
    """Tokens that are evenly spread over those with composed rows."""
