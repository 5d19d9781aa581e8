"""Settings of a corpus: all that decides its outcome, from the recipe's section and the language's card."""

from typing import Any

from kielo.recipe.cards import Language
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus

# Keys of the section that decide what is refused and how fast it goes, not which documents come out.
_WITHOUT_OUTCOME = {"sources", "max_bad_share", "workers"}


def complete(corpus: Corpus, card: Language) -> Corpus:
    """Returns the section with the language card's thresholds where the recipe leaves them open.

    Raises KieloError when the identifier does not know the language.
    """
    identifier = corpus.language_identifier
    if not card.identifier_codes.get(identifier):
        known = [name for name, codes in card.identifier_codes.items() if codes]
        raise KieloError(
            f"corpus.language_identifier: {identifier} does not know {card.name}; "
            f"{' or '.join(known) or 'no identifier here'} does"
        )

    def threshold(chosen: float | None, defaults: dict[str, float]) -> float:
        return defaults.get(identifier, 0.5) if chosen is None else chosen

    return corpus.model_copy(
        update={
            "line_language_threshold": threshold(
                corpus.line_language_threshold, card.line_language_threshold
            ),
            "document_language_threshold": threshold(
                corpus.document_language_threshold, card.document_language_threshold
            ),
        }
    )


def effective_settings(corpus: Corpus, card: Language) -> dict[str, Any]:
    """Returns all that decides the outcome, for the manifest. Raises KieloError as `complete` does."""
    return complete(corpus, card).model_dump(exclude=_WITHOUT_OUTCOME) | {
        # of two duplicates, the earlier source's stays
        "sources": [source.name for source in corpus.sources],
        "text_fields": [source.text_field for source in corpus.sources],
        "max_documents": [source.max_documents for source in corpus.sources],
        "language": card.code,
        "scripts": list(card.unicode_scripts),
        "letters": card.letters,
        "identifier_codes": list(card.identifier_codes[corpus.language_identifier]),
    }
