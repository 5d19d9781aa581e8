"""The held-out set of a document: (document, recipe) -> the set's name.

A source of one language has one set, with the source's name. Of running text in several languages each has a
set, SOURCE@LANGUAGE: the identifier of the corpus stage decides, between the source's languages only, by the
beginning of each held-out document. Pairs of sentences are in both languages and stay together.
"""

from collections.abc import Mapping
from typing import Any

from kielo.recipe.cards import language
from kielo.recipe.languages_of_sources import languages_of
from kielo.recipe.sections import Recipe, Source

SEPARATOR = "@"  # no name of a source has it


class HeldoutLanguages:
    """The sets of a recipe's sources."""

    def __init__(self, recipe: Recipe):
        self._identifier = recipe.corpus.language_identifier
        self._languages = {source.name: languages_of(recipe, source) for source in recipe.corpus.sources}
        self._codes = {
            source.name: self._codes_of(source, self._languages[source.name])
            for source in recipe.corpus.sources
        }

    @property
    def has_several_sets(self) -> bool:
        return len(self._codes) > 1 or any(self._codes.values())

    def set_of(self, document: Mapping[str, Any]) -> str:
        """Returns the name of the document's set."""
        source, codes = document["source"], self._codes.get(document["source"])
        if not codes:
            return source
        from kielo.corpus.language_identification import MAX_CHARACTERS, load_identifier

        found = load_identifier(self._identifier).probabilities(document["text"][:MAX_CHARACTERS])
        most = max(codes, key=lambda code: sum(found.get(known, 0.0) for known in codes[code]))
        return f"{source}{SEPARATOR}{most}"

    def languages_of_set(self, name: str) -> tuple[str, ...]:
        """Returns the languages of a set; () where they are not known."""
        source, _, code = name.partition(SEPARATOR)
        return (code,) if code else self._languages.get(source, ())

    def _codes_of(self, source: Source, languages: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """Returns language → what the identifier calls it, where it can tell a source's languages apart."""
        if source.kind != "text" or len(languages) < 2:
            return {}
        codes = {code: language(code).identifier_codes.get(self._identifier, ()) for code in languages}
        return codes if all(codes.values()) else {}
