"""A recipe of several languages: its values and the code of one of them → the values of that one's recipe.

`languages = ["et", "fi"]` stands in the place of `language`: the recipe is one for each of them, as if
`language` were its code. In every text `{language}` is the code. A source that names one of these languages
as its own is of that language's recipe alone; others are of all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kielo.recipe.cards import languages
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe, Source
from kielo.recipe.source_kinds import KINDS

# The languages of a source: its own, or else the recipe's. A recipe → codes of language cards.


def languages_of(recipe: Recipe, source: Source) -> tuple[str, ...]:
    """Return the codes of the languages that the source's text is in; () where its kind has none."""
    return source_languages(source, recipe.language)


def source_languages(source: Source, default: str) -> tuple[str, ...]:
    """Return the source's languages, where a recipe's language is `default`; () where its kind has none."""
    if not KINDS[source.kind].has_language:
        return ()
    return source.language or (default,)


KEY, PLACE = "languages", "{language}"
DESCRIPTION = (
    "in place of language: a run for each of these; {language} in any text is its code, and a source "
    "whose own language is one of these is of its run alone"
)


def codes_of(data: Mapping[str, Any], label: str) -> tuple[str, ...]:
    """Return the codes that a recipe's values list, () where they list none; `label` names the recipe.

    Raises KieloError for what is no list of different codes of language cards.
    """
    given = data.get(KEY)
    if given is None:
        return ()
    if isinstance(given, str):  # --set languages=et,fi
        given = [code.strip() for code in given.split(",")]
    if not isinstance(given, list) or not given or not all(isinstance(code, str) for code in given):
        raise KieloError(f'{label}: {KEY} = {given!r} does not fit. Fix: {KEY} = ["et", "fi"]')
    known = languages()
    if unknown := [code for code in given if code not in known]:
        raise KieloError(f"{label}: {KEY}: {', '.join(unknown)} without a card; `kielo languages` lists all")
    if twice := sorted({code for code in given if given.count(code) > 1}):
        raise KieloError(f"{label}: {KEY} lists {', '.join(twice)} more than once; give each one time")
    for key in ("name", "folder"):
        text = data.get(key)
        if len(given) > 1 and isinstance(text, str) and text and PLACE not in text:
            raise KieloError(
                f'{label}: {key} = {text!r} would be that of {len(given)} runs. Fix: {key} = "{text}_{PLACE}"'
            )
    return tuple(given)


def of_language(data: Mapping[str, Any], code: str, codes: Sequence[str]) -> dict[str, Any]:
    """Return the values of the recipe of `code`, one of `codes`; `data` stays as it is."""
    own = filled({key: value for key, value in data.items() if key != KEY} | {"language": code}, code)
    corpus = own.get("corpus")
    if isinstance(corpus, dict) and isinstance(corpus.get("sources"), list):
        mine = [one for one in corpus["sources"] if not _is_of_others(one, code, codes)]
        own["corpus"] = corpus | {"sources": mine}
    return own


def filled(value: Any, code: str) -> Any:
    """Return the value with the code in the place of `{language}` in all its texts."""
    if isinstance(value, str):
        return value.replace(PLACE, code)
    if isinstance(value, Mapping):
        return {filled(key, code): filled(entry, code) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [filled(entry, code) for entry in value]
    return value


def _is_of_others(source: Any, code: str, codes: Sequence[str]) -> bool:
    named = source.get("language") if isinstance(source, Mapping) else None
    named = [named] if isinstance(named, str) else named or []
    return isinstance(named, list) and code not in named and any(one in codes for one in named)
