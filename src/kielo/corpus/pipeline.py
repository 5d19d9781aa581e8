"""The steps of a corpus in the order in which they run, in two passes.

Which documents a step sees follows from the kind of their source: cleaned text is normalised and goes through
the filters of its languages, code, pairs and conversations through their own; text that others have cleaned
passes as it is.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from kielo.corpus.code_filters import code_filters
from kielo.corpus.conversations import AlternatingTurns, WholeConversations
from kielo.corpus.document_files import MergeCleaned, WriteCleaned, WriteDocuments
from kielo.corpus.document_filters import DocumentLength, NotEmpty, document_filters
from kielo.corpus.duplicates import DocumentDuplicates, LineDuplicates
from kielo.corpus.line_filters import line_filters
from kielo.corpus.normalise import Normalise
from kielo.corpus.pairs import LayOutPairs, NormaliseSides, SideLanguage, WholePairs
from kielo.corpus.raw_formats import RawSource
from kielo.corpus.read_sources import ReadSources
from kielo.corpus.settings import is_cleaned, language_rules, side_rules
from kielo.corpus.step import CorpusStep
from kielo.recipe.cards import language
from kielo.recipe.sections import Corpus, Recipe, Source


def first_pass(sources: tuple[RawSource, ...], recipe: Recipe, cleaned: Path) -> list[CorpusStep]:
    """Steps that need one document at a time; they run on all workers."""
    corpus = recipe.corpus
    own, others = _names(corpus, is_cleaned), _names(corpus, _is_taken_whole)
    return [
        ReadSources(sources, corpus.max_document_bytes),
        *([NotEmpty().for_sources(others)] if others else []),
        *([Normalise().for_sources(own)] if own else []),
        *_language_steps(corpus, recipe.language),
        *_code_steps(corpus),
        *_pair_steps(recipe),
        *_conversation_steps(corpus),
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


def _pair_steps(recipe: Recipe) -> list[CorpusStep]:
    """Returns the steps of parallel text: cleaning once, languages and layout of each source."""
    corpus, steps = recipe.corpus, []
    pairs = [source for source in corpus.sources if source.kind == "parallel"]
    cleaned = [source.name for source in pairs if source.clean]
    steps += [NormaliseSides().for_sources(cleaned)] if cleaned else []
    steps += [WholePairs().for_sources(source.name for source in pairs)] if pairs else []
    for source in pairs:
        for side, rule in enumerate(side_rules(corpus, source) if source.clean else ()):
            step = SideLanguage(corpus.language_identifier, rule, side)
            steps.append(step.for_sources([source.name], f"{rule.languages[0]} of {source.name}"))
        names = [language(code).name for code in source.language]
        layout = LayOutPairs(source.templates, source.reverse_share, names)
        steps.append(layout.for_sources([source.name], source.name))
    return steps


def _conversation_steps(corpus: Corpus) -> list[CorpusStep]:
    every = _names(corpus, lambda source: source.kind == "instructions")
    own = _names(corpus, lambda source: source.kind == "instructions" and source.clean)
    steps: list[CorpusStep] = [WholeConversations().for_sources(every)] if every else []
    return [*steps, AlternatingTurns().for_sources(own)] if own else steps


def _is_taken_whole(source: Source) -> bool:
    return not is_cleaned(source) and source.kind != "parallel"


def _names(corpus: Corpus, wanted: Callable[[Source], bool]) -> Sequence[str]:
    return [source.name for source in corpus.sources if wanted(source)]
