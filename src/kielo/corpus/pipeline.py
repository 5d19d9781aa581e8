"""The steps of a corpus in the order in which they run, in two passes."""

from pathlib import Path

from kielo.corpus.document_files import MergeCleaned, WriteCleaned, WriteDocuments
from kielo.corpus.document_filters import DocumentLength, document_filters
from kielo.corpus.duplicates import DocumentDuplicates, LineDuplicates
from kielo.corpus.line_filters import line_filters
from kielo.corpus.normalise import Normalise
from kielo.corpus.raw_formats import RawSource
from kielo.corpus.read_sources import ReadSources
from kielo.corpus.step import CorpusStep
from kielo.recipe.cards import Language
from kielo.recipe.sections import Corpus


def first_pass(
    sources: tuple[RawSource, ...], corpus: Corpus, card: Language, cleaned: Path
) -> list[CorpusStep]:
    """Steps that need one document at a time; they run on all workers. corpus: a complete section."""
    return [
        ReadSources(sources, corpus.max_document_bytes),
        Normalise(),
        *line_filters(corpus, card),
        *document_filters(corpus, card),
        WriteCleaned(cleaned),
    ]


def second_pass(corpus: Corpus, cleaned: Path, documents: Path) -> list[CorpusStep]:
    """Steps that need the whole corpus. Length is last: a document may lose most lines as duplicates."""
    return [
        MergeCleaned(cleaned),
        *([DocumentDuplicates()] if corpus.deduplicate_documents else []),
        *([LineDuplicates()] if corpus.deduplicate_lines else []),
        DocumentLength(corpus.min_document_characters),
        WriteDocuments(documents),
    ]
