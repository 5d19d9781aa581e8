"""The steps of a corpus in the order in which they run, in two passes.

Which documents a step sees follows from the kind of their source: cleaned text is normalised and goes through
the filters of its languages, code through its own; text that others have cleaned passes as it is.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from kielo.corpus.code_filters import code_filters
from kielo.corpus.document_files import MergeCleaned, WriteCleaned, WriteDocuments
from kielo.corpus.document_filters import DocumentLength, NotEmpty, document_filters
from kielo.corpus.duplicates import DocumentDuplicates, LineDuplicates
from kielo.corpus.line_filters import line_filters
from kielo.corpus.normalise import Normalise
from kielo.corpus.raw_formats import RawSource
from kielo.corpus.read_sources import ReadSources
from kielo.corpus.settings import is_cleaned, language_rules
from kielo.corpus.step import CorpusStep
from kielo.recipe.sections import Corpus, Source


def first_pass(
    sources: tuple[RawSource, ...], corpus: Corpus, language: str, cleaned: Path
) -> list[CorpusStep]:
    """Steps that need one document at a time; they run on all workers. `language`: the recipe's."""
    own, others = _names(corpus, is_cleaned), _names(corpus, lambda source: not is_cleaned(source))
    return [
        ReadSources(sources, corpus.max_document_bytes),
        *([NotEmpty().for_sources(others)] if others else []),
        *([Normalise().for_sources(own)] if own else []),
        *_language_steps(corpus, language),
        *_code_steps(corpus),
        WriteCleaned(cleaned),
    ]


def second_pass(corpus: Corpus, cleaned: Path, documents: Path) -> list[CorpusStep]:
    """Steps that need the whole corpus. Length is last: a document may lose most lines as duplicates."""
    own = _names(corpus, is_cleaned)
    return [
        MergeCleaned(cleaned),
        *([DocumentDuplicates()] if corpus.deduplicate_documents else []),
        *([LineDuplicates().for_sources(own)] if corpus.deduplicate_lines and own else []),
        *([DocumentLength(corpus.min_document_characters).for_sources(own)] if own else []),
        WriteDocuments(documents),
    ]


def _language_steps(corpus: Corpus, language: str) -> list[CorpusStep]:
    """Returns the filters of lines, then those of documents, once for each set of languages."""
    rules = language_rules(corpus, language)
    groups = {rule: [name for name in rules if rules[name] == rule] for rule in rules.values()}
    steps: list[CorpusStep] = []
    for make in (line_filters, document_filters):
        for rule, names in groups.items():
            detail = " or ".join(rule.languages) if len(groups) > 1 else ""
            steps += [step.for_sources(names, detail) for step in make(corpus, rule)]
    return steps


def _code_steps(corpus: Corpus) -> list[CorpusStep]:
    names = _names(corpus, lambda source: source.kind == "code" and source.clean)
    return [step.for_sources(names) for step in code_filters(corpus.code)] if names else []


def _names(corpus: Corpus, wanted: Callable[[Source], bool]) -> Sequence[str]:
    return [source.name for source in corpus.sources if wanted(source)]
