"""The languages of a source: its own, or else the recipe's. A recipe → codes of language cards."""

from kielo.recipe.sections import Recipe, Source
from kielo.recipe.source_kinds import KINDS


def languages_of(recipe: Recipe, source: Source) -> tuple[str, ...]:
    """Returns the codes of the languages that the source's text is in; () where its kind has none."""
    return source_languages(source, recipe.language)


def source_languages(source: Source, default: str) -> tuple[str, ...]:
    """Returns the source's languages, where a recipe's language is `default`; () where its kind has none."""
    if not KINDS[source.kind].has_language:
        return ()
    return source.language or (default,)
