"""The steps of a corpus in the order in which they run, in two passes."""

from pathlib import Path
from typing import Any

from kielo.corpus.document_files import MergeCleaned, WriteCleaned, WriteDocuments
from kielo.corpus.document_filters import DocumentLength, document_filters
from kielo.corpus.duplicates import DocumentDuplicates, LineDuplicates
from kielo.corpus.line_filters import line_filters
from kielo.corpus.normalise import Normalise
from kielo.corpus.read import RawSource, ReadSources
from kielo.corpus.step import CorpusStep


def first_pass(sources: tuple[RawSource, ...], settings: dict[str, Any], cleaned: Path) -> list[CorpusStep]:
    """Steps that need one document at a time; they run on all workers."""
    return [
        ReadSources(sources, settings["max_document_bytes"]),
        Normalise(),
        *line_filters(settings),
        *document_filters(settings),
        WriteCleaned(cleaned),
    ]


def second_pass(settings: dict[str, Any], cleaned: Path, documents: Path) -> list[CorpusStep]:
    """Steps that need the whole corpus. Length is last: a document may lose most lines as duplicates."""
    return [
        MergeCleaned(cleaned),
        *([DocumentDuplicates()] if settings["deduplicate_documents"] else []),
        *([LineDuplicates()] if settings["deduplicate_lines"] else []),
        DocumentLength(settings["min_document_characters"]),
        WriteDocuments(documents),
    ]
