"""The kinds of text that a source can be, and the layouts of parallel text."""

import re
from dataclasses import dataclass

# A layout is a template with these places. Other braces stay as they are.
DEFAULT_TEMPLATE = "{source_language}: {source}\n{target_language}: {target}"
PLACES = ("source", "target", "source_language", "target_language")
_PLACE = re.compile(r"\{(" + "|".join(PLACES) + r")\}")


def template_problem(template: str) -> str | None:
    found = _PLACE.findall(template)
    if missing := [name for name in ("source", "target") if name not in found]:
        return f"has no {{{missing[0]}}}, so a side of each pair would be lost"
    return None


def fill(template: str, values: dict[str, str]) -> str:
    """Return the template with the values in their places. A place that a value spells stays text."""
    return _PLACE.sub(lambda place: values[place[1]], template)


@dataclass(frozen=True)
class SourceKind:
    """A kind of source. `text_field`: the field that holds the text if the recipe names none."""

    about: str
    has_language: bool
    text_field: str


KINDS = {
    "text": SourceKind("running text", True, "text"),
    "code": SourceKind("program files, byte for byte", False, "content"),
    "parallel": SourceKind("pairs of a text and its translation", True, ""),
    "instructions": SourceKind("conversations, laid out by the tokenizer's chat template", True, "messages"),
}
