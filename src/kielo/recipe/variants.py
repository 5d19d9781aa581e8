"""A recipe of several variants, such as sizes of a model: [variants.NAME] has the values of a variant that
differ from the recipe's.

`--set variant=NAME` chooses a variant. A shipped recipe's variant also has a name of its own, RECIPE_NAME.
`{variant}` in any text is the variant's name.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kielo.recipe.errors import KieloError

_NAMES = ("name", "folder")  # keys of which each variant needs its own value
KEY, CHOICE, PLACE = "variants", "variant", "{variant}"
DESCRIPTION = (
    "Variant → its values, which replace the recipe's: a run for each. --set variant=NAME chooses a variant. "
    "{variant} in any text is the variant's name."
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def variants_of(data: Mapping[str, Any], label: str) -> tuple[str, ...]:
    """Return the names of a recipe's variants, () if it has none. `label` names the recipe.

    Raises KieloError unless each is a table and has a run of its own.
    """
    given = data.get(KEY)
    if given is None:
        return ()
    tables = given.values() if isinstance(given, Mapping) else ()
    if not tables or not all(isinstance(own, Mapping) for own in tables):
        raise KieloError(f"{label}: {KEY} holds no tables. Fix: [{KEY}.NAME] with the values of each variant")
    if "languages" in data:
        raise KieloError(f"{label}: has both languages and {KEY}. Fix: one of them")
    for name, own in given.items():
        if not _NAME.fullmatch(name):
            raise KieloError(f"{label}: {KEY}.{name}: not a name. Fix: letters, digits, _, . and -")
        for key in _NAMES:
            text = own.get(key, data.get(key))
            if len(given) > 1 and key not in own and isinstance(text, str) and text and PLACE not in text:
                raise KieloError(
                    f'{label}: {key} = {text!r} would name {len(given)} runs. Fix: {key} = "{text}_{PLACE}"'
                )
        if refused := [key for key in ("languages", "extends", KEY) if key in own]:
            raise KieloError(f"{label}: {KEY}.{name} cannot have {refused[0]}. Fix: leave it out")
    _refuse_duplicates(data, given, label)
    return tuple(given)


def _refuse_duplicates(data: Mapping[str, Any], given: Mapping[str, Any], label: str) -> None:
    """Refuse two variants whose runs have the same name or the same folder."""
    taken: dict[tuple[str, str], str] = {}
    for variant, own in given.items():
        name, folder = (str(own.get(key, data.get(key)) or "").replace(PLACE, variant) for key in _NAMES)
        for key, text in zip(_NAMES, (name, folder or (name and f"runs/{name}")), strict=True):
            other = taken.setdefault((key, os.path.normpath(text)), variant) if text else variant
            if other != variant:
                raise KieloError(
                    f"{label}: {KEY}.{other} and {KEY}.{variant} both have {key} = {text!r}. Fix: a {key} "
                    "for each"
                )


def chosen_variant(sets: Sequence[str]) -> str | None:
    """Return the variant that the last `variant=NAME` of --set chooses, or None."""
    chosen = [text.partition("=")[2].strip().strip("\"'") for text in sets if is_choice(text)]
    return chosen[-1] if chosen else None


def is_choice(text: str) -> bool:
    """Return True for a `variant=NAME` of --set."""
    return text.partition("=")[0].strip() == CHOICE
