"""The kinds of text that a source can be, and the layouts of parallel text.

A name → its facts; what is done with it is in `corpus/`.
"""

import re
from dataclasses import dataclass

# Layouts of parallel text: a template with named places → text. Other braces stay as they are.


DEFAULT_TEMPLATE = "{source_language}: {source}\n{target_language}: {target}"
PLACES = ("source", "target", "source_language", "target_language")
_PLACE = re.compile(r"\{(" + "|".join(PLACES) + r")\}")


def template_problem(template: str) -> str | None:
    """Return what is wrong with a template, or None."""
    found = _PLACE.findall(template)
    if missing := [name for name in ("source", "target") if name not in found]:
        return f"has no {{{missing[0]}}}, so a side of each pair would be lost"
    return None


def fill(template: str, values: dict[str, str]) -> str:
    """Put the values in their places, once: places that a value spells stay text."""
    return _PLACE.sub(lambda place: values[place[1]], template)


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
