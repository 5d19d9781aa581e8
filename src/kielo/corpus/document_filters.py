"""Filters of whole documents: each is a class below and an entry in `document_filters`.

A filter gives None to keep the document, or the reason to drop it; the funnel counts documents, lines and
bytes by filter and reason. Filters that need the whole corpus are in `duplicates.py`.
"""

from kielo.corpus.language_identification import LanguageFilter
from kielo.corpus.normalise import count_c1
from kielo.corpus.settings import LanguageRule
from kielo.corpus.split_document import SplitDocument
from kielo.corpus.step import DocumentFilter
from kielo.recipe.sections import Corpus


def document_filters(corpus: Corpus, rule: LanguageRule) -> list[DocumentFilter]:
    """Returns the filters of documents for text of one rule; they run after those of lines."""
    return [DocumentLanguage(corpus.language_identifier, rule.identifier_codes, rule.document_threshold)]


class DocumentLanguage(LanguageFilter, DocumentFilter):
    """Drops documents that are probably of another language."""

    name = "document language"

    def judge(self, document: SplitDocument) -> str | None:
        return self.verdict("\n".join(document.lines), document.num_bytes)


class NotEmpty(DocumentFilter):
    """Drops documents without a character that is not white space; nothing is changed in the others."""

    name = "content"

    def judge(self, document: SplitDocument) -> str | None:
        count_c1(self, "".join(document.lines), "c1_kept")
        return None if any(line.strip() for line in document.lines) else "empty"


class DocumentLength(DocumentFilter):
    """Drops documents with too few characters; it runs last, after the filters of duplicates."""

    name = "document length"

    def __init__(self, min_characters: int):
        super().__init__()
        self.min_characters = min_characters

    def judge(self, document: SplitDocument) -> str | None:
        # Characters of the joined text: the lines and the line ends between them.
        num_characters = sum(map(len, document.lines)) + len(document.lines) - 1
        return f"under {self.min_characters} characters" if num_characters < self.min_characters else None
