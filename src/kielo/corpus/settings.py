"""The settings of a corpus: all that decides its outcome, from the recipe's section and the language's card."""

from typing import Any

from kielo.recipe.cards import Language
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus

# Keys of the section that decide what is refused and how fast it goes, not which documents come out.
_WITHOUT_OUTCOME = {"sources", "max_bad_share", "workers"}


def effective_settings(corpus: Corpus, card: Language) -> dict[str, Any]:
    """Completes the recipe's section with the language card's values where the recipe leaves them open.

    Raises KieloError when the identifier does not know the language.
    """
    identifier = corpus.language_identifier
    codes = card.identifier_codes.get(identifier)
    if not codes:
        known = [name for name, known_codes in card.identifier_codes.items() if known_codes]
        raise KieloError(
            f"corpus.language_identifier: {identifier} does not know {card.name}; "
            f"{' or '.join(known) or 'no identifier here'} does"
        )
    settings = corpus.model_dump(exclude=_WITHOUT_OUTCOME)
    for key in ("line_language_threshold", "document_language_threshold"):
        if settings[key] is None:
            settings[key] = getattr(card, key).get(identifier, 0.5)
    return settings | {
        # of two duplicates, the earlier source's stays
        "sources": [source.name for source in corpus.sources],
        "text_fields": [source.text_field for source in corpus.sources],
        "max_documents": [source.max_documents for source in corpus.sources],
        "language": card.code,
        "scripts": list(card.unicode_scripts),
        "letters": card.letters,
        "identifier_codes": list(codes),
    }
