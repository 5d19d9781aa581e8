"""A recipe of several languages: its values and the code of one of them → the values of that language's
recipe.

`languages = ["et", "fi"]` replaces `language`: there is a recipe for each code, as if `language` were that
code. `{language}` in any text is the code. A source whose own language is in the list belongs to that
language's recipe alone. Other sources belong to all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kielo.recipe.cards import is_own_card, language_code, languages
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe, Source
from kielo.recipe.source_kinds import KINDS
from kielo.recipe.toml_text import TomlTable


def languages_of(recipe: Recipe, source: Source) -> tuple[str, ...]:
    """Return the codes of the languages of the source's text, or () if its kind has none."""
    return source_languages(source, recipe.language)


def source_languages(source: Source, default: str) -> tuple[str, ...]:
    """Return the source's languages, or () if its kind has none. `default` is the recipe's."""
    if not KINDS[source.kind].has_language:
        return ()
    return source.language or (default,)


KEY, PLACE = "languages", "{language}"
DESCRIPTION = (
    "Codes of languages, in place of language: a run for each. {language} in any text is the run's code. A "
    "source whose own language is in the list belongs to that run alone."
)


def codes_of(data: Mapping[str, Any], label: str) -> tuple[str, ...]:
    """Return the codes that a recipe's values list, () if they list none. `label` names the recipe.

    Raises KieloError unless they are a list of different codes of language cards.
    """
    given = data.get(KEY)
    if given is None:
        return ()
    if isinstance(given, str):  # --set languages=et,fi
        given = [code.strip() for code in given.split(",")]
    if not isinstance(given, list) or not given or not all(isinstance(code, str) for code in given):
        raise KieloError(f'{label}: {KEY} = {given!r} does not fit. Fix: {KEY} = ["et", "fi"]')
    known = languages()
    if unknown := [code for code in given if code not in known and not is_own_card(code)]:
        raise KieloError(f"{label}: {KEY}: {', '.join(unknown)} without a card; `kielo languages` lists all")
    if twice := sorted({code for code in given if given.count(code) > 1}):
        raise KieloError(f"{label}: {KEY} lists {', '.join(twice)} more than once. Fix: each code once")
    for key in ("name", "folder"):
        text = data.get(key)
        if len(given) > 1 and isinstance(text, str) and text and PLACE not in text:
            raise KieloError(
                f'{label}: {key} = {text!r} would name {len(given)} runs. Fix: {key} = "{text}_{PLACE}"'
            )
    return tuple(given)


def of_language(data: Mapping[str, Any], code: str, codes: Sequence[str]) -> TomlTable:
    own = {key: value for key, value in data.items() if key != KEY} | {"language": code}
    own = filled(own, PLACE, language_code(code))
    corpus = own.get("corpus")
    if isinstance(corpus, dict) and isinstance(corpus.get("sources"), list):
        mine = [source for source in corpus["sources"] if not _is_of_others(source, code, codes)]
        own["corpus"] = corpus | {"sources": mine}
    return own


def filled(value: Any, place: str, text: str) -> Any:
    """Return the value with `text` for each `place` in its texts and keys."""
    if isinstance(value, str):
        return value.replace(place, text)
    if isinstance(value, Mapping):
        return {filled(key, place, text): filled(entry, place, text) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [filled(entry, place, text) for entry in value]
    return value


def _is_of_others(source: Any, code: str, codes: Sequence[str]) -> bool:
    named = source.get("language") if isinstance(source, Mapping) else None
    named = [named] if isinstance(named, str) else named or []
    return isinstance(named, list) and code not in named and any(other in codes for other in named)
