"""The kinds of text that a source can be. A name → its facts; what is done with it is in `corpus/`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SourceKind:
    """A kind of source.

    `has_language`: whether a natural language is looked for in it. `text_field`: the field that holds the
    text where the recipe names none.
    """

    description: str
    has_language: bool
    text_field: str


KINDS = {
    "text": SourceKind("running text", True, "text"),
    "code": SourceKind("program files, byte for byte", False, "content"),
    "parallel": SourceKind("pairs of a text and its translation", True, ""),
    "instructions": SourceKind("conversations, laid out by the tokenizer's chat template", True, "messages"),
}
