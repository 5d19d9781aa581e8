"""Layouts of parallel text: a template with named places → text. Other braces stay as they are."""

import re

DEFAULT_TEMPLATE = "{source_language}: {source}\n{target_language}: {target}"
PLACES = ("source", "target", "source_language", "target_language")
_PLACE = re.compile(r"\{(" + "|".join(PLACES) + r")\}")


def template_problem(template: str) -> str | None:
    """Returns what is wrong with a template, or None."""
    found = _PLACE.findall(template)
    if missing := [name for name in ("source", "target") if name not in found]:
        return f"has no {{{missing[0]}}}, so a side of each pair would be lost"
    return None


def fill(template: str, values: dict[str, str]) -> str:
    """Puts the values in their places, once: places that a value spells stay text."""
    return _PLACE.sub(lambda place: values[place[1]], template)
