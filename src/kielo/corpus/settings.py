"""Settings of a corpus: all that decides its outcome, from the recipe's section and the languages' cards."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kielo.recipe.cards import Language, language
from kielo.recipe.errors import KieloError
from kielo.recipe.languages_of_sources import source_languages
from kielo.recipe.sections import Corpus, Source
from kielo.recipe.source_kinds import KINDS

SHAREGPT_FIELD = "conversations"
# Keys of the section that decide what is refused and how fast it goes, not which documents come out.
_WITHOUT_OUTCOME = {"sources", "max_bad_share", "workers"}


@dataclass(frozen=True)
class LanguageRule:
    """The languages that a text may be in, as the identifier's codes, scripts and letters say.

    Thresholds are of the summed probability of all the codes.
    """

    languages: tuple[str, ...]
    identifier_codes: tuple[str, ...]
    scripts: tuple[str, ...]
    letters: str
    line_threshold: float
    document_threshold: float


def language_rule(corpus: Corpus, cards: Sequence[Language]) -> LanguageRule:
    """Returns the rule of texts in any of the cards' languages.

    The cards' thresholds, the lowest of them, are used where the recipe leaves them open: the identifier must
    not be surer of two languages together than of the harder one. Raises KieloError when the identifier does
    not know a language.
    """
    identifier = corpus.language_identifier
    for card in cards:
        if not card.identifier_codes.get(identifier):
            known = [name for name, codes in card.identifier_codes.items() if codes]
            raise KieloError(
                f"corpus.language_identifier: {identifier} does not know {card.name}; "
                f"{' or '.join(known) or 'no identifier here'} does"
            )
    line, document = corpus.line_language_threshold, corpus.document_language_threshold
    lowest_line = min(card.line_language_threshold.get(identifier, 0.5) for card in cards)
    lowest_document = min(card.document_language_threshold.get(identifier, 0.5) for card in cards)
    return LanguageRule(
        tuple(card.code for card in cards),
        tuple(dict.fromkeys(code for card in cards for code in card.identifier_codes[identifier])),
        tuple(dict.fromkeys(script for card in cards for script in card.unicode_scripts)),
        # A language whose letters are not listed has all those of its scripts.
        "".join(dict.fromkeys("".join(card.letters for card in cards))),
        lowest_line if line is None else line,
        lowest_document if document is None else document,
    )


def text_fields(source: Source) -> tuple[str, ...]:
    """Returns the names of the fields or columns that hold the source's text: one, or two of a pair.

    Of conversations, the first that a file has holds them.
    """
    if source.kind == "parallel":
        return source.pair_fields or source.language
    if source.kind == "instructions" and not source.text_field:
        return (KINDS[source.kind].text_field, SHAREGPT_FIELD)  # whichever a file has
    return (source.text_field or KINDS[source.kind].text_field,)


def is_cleaned(source: Source) -> bool:
    """Returns True for a source of running text that the filters of lines and documents see."""
    return source.kind == "text" and source.clean


def side_rules(corpus: Corpus, source: Source) -> tuple[LanguageRule, LanguageRule]:
    """Returns the rules of the two sides of a source of parallel text."""
    first, second = (language_rule(corpus, [language(code)]) for code in source.language)
    return first, second


def language_rules(corpus: Corpus, default: str) -> dict[str, LanguageRule]:
    """Returns source name → rule, of the cleaned sources. `default`: the recipe's language."""
    return {
        source.name: language_rule(corpus, [language(code) for code in source_languages(source, default)])
        for source in corpus.sources
        if is_cleaned(source)
    }


def effective_settings(corpus: Corpus, card: Language) -> dict[str, Any]:
    """Returns all that decides the outcome, for the manifest. `card`: of the recipe's language.

    Raises KieloError as `language_rule` does.
    """
    rule, rules = language_rule(corpus, [card]), language_rules(corpus, card.code)
    return corpus.model_dump(exclude=_WITHOUT_OUTCOME) | {
        # of two duplicates, the earlier source's stays
        "sources": [source.name for source in corpus.sources],
        "text_fields": [text_fields(source) for source in corpus.sources],
        "max_documents": [source.max_documents for source in corpus.sources],
        "layouts": {
            source.name: [source.pair_fields, source.templates, source.reverse_share]
            for source in corpus.sources
            if source.kind == "parallel"
        },
        # Manifests of before this key stay current.
        **({"encodings": encodings} if any(encodings := [one.encoding for one in corpus.sources]) else {}),
        "documents": [source.documents for source in corpus.sources],
        "kinds": [source.kind for source in corpus.sources],
        "clean": [source.clean for source in corpus.sources],
        "source_languages": [source_languages(source, card.code) for source in corpus.sources],
        "language_rules": {name: asdict(rules[name]) for name in rules},
        "language": card.code,
        "scripts": list(card.unicode_scripts),
        "letters": card.letters,
        "identifier_codes": list(card.identifier_codes[corpus.language_identifier]),
        "line_language_threshold": rule.line_threshold,
        "document_language_threshold": rule.document_threshold,
    }
