"""The steps of a corpus in the order in which they run, in two passes.

Cleaned text is normalised and goes through the filters of its languages, code, pairs and conversations
through their own. Text that others have cleaned passes as it is.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kielo.artifact.documents import SUFFIX, Document, DocumentWriter, read_documents
from kielo.corpus import damage, filters
from kielo.corpus.conversations import AlternatingTurns, WholeConversations
from kielo.corpus.corpus_parts import Part, PartLimits, part_records
from kielo.corpus.decontamination import decontamination
from kielo.corpus.duplicates import document_hash, line_hashes
from kielo.corpus.hash_buckets import HashWriter
from kielo.corpus.known_corpora import NOT_FINITE, score_filters
from kielo.corpus.mojibake import RepairEncoding
from kielo.corpus.near_copies import Bands, SignatureWriter
from kielo.corpus.own_step import OwnStep
from kielo.corpus.programming_languages import code_filters
from kielo.corpus.raw_formats import RawSource, name_in, unreadable
from kielo.corpus.raw_record import BadRecord, OtherRecord, Record
from kielo.corpus.raw_texts import parse
from kielo.corpus.step import (
    CorpusStep,
    CutWords,
    LanguageRule,
    SplitDocument,
    Tally,
    is_cleaned,
    language_rule,
    language_rules,
    split_document,
    split_verbatim,
)
from kielo.corpus.word_segmenter import cutter_of_words
from kielo.recipe.cards import language
from kielo.recipe.sections import Corpus, Recipe, Source

BAD = "bad"  # records: counted, and kept as examples
MAX_EXAMPLES, MAX_EXAMPLE_CHARACTERS = 5, 300  # bad records of each source that are shown
# Files of a part between the passes and after them. FAST: the level of zstd, because they are read once.
CLEANED, KEPT, FAST = f"cleaned{SUFFIX}", f"kept{SUFFIX}", 1
DOCUMENT_HASHES, LINE_HASHES, NUM_LINES, SIZES = "documents", "lines", "num_lines.npy", "sizes.npy"


@dataclass
class ReadPart(CorpusStep):
    """The reader of a part of a source. `number` is the part's, `limits` are by the parts before."""

    name = "read"
    raw: RawSource
    part: Part
    max_document_bytes: int
    number: int = 0
    limits: PartLimits = PartLimits()

    def run(self, documents: Iterable[SplitDocument] = ()) -> Iterator[SplitDocument]:
        return super().run(self.documents())

    def documents(self) -> Iterator[SplitDocument]:
        source = self.raw
        for number, record in enumerate(
            part_records(source, self.part, self.limits, self.max_document_bytes)
        ):
            place = (self.number, number)
            file = name_in(source.root, record.path)
            try:
                raw = parse(record, source, self.max_document_bytes)
            except BadRecord as problem:
                self.pass_over(source, place, record, problem)
                continue
            except OSError as problem:
                raise unreadable(record.path, problem) from None
            self.source = source.name
            for fact in raw.not_finite:
                self.count(NOT_FINITE, fact)
            metadata = {"file": file, "number": record.number} | raw.facts
            split = split_document if source.is_cleaned else split_verbatim
            document = split(raw.text, raw.id, source.name, place, metadata)
            if raw.sides is not None:
                document.set_sides(raw.sides)
            yield document

    def pass_over(
        self, source: RawSource, place: tuple[int, int], record: Record, problem: BadRecord
    ) -> None:
        self.source = source.name
        self.count("documents", problem.reason)
        if isinstance(problem, OtherRecord):
            return
        if record.number == 0:
            self.count("damaged_bytes", amount=record.path.stat().st_size)
        text = str(problem).replace(f"{Path(source.root)}/", "", 1)[:MAX_EXAMPLE_CHARACTERS]
        self.count_example(BAD, place, text, MAX_EXAMPLES)


@dataclass
class WriteCleaned(CorpusStep):
    """The end of the first pass of a part: its documents, and the hashes by which copies are found.

    lines_of: the sources whose lines are compared. near_of: the sources among which near copies are found.
    """

    name = "write cleaned"
    folder: Path
    buckets: int
    lines_of: Sequence[str] = ()
    has_documents: bool = True
    near_of: Sequence[str] = ()
    how: Bands | None = None
    keep: str = ""
    cut_words: CutWords | None = None

    def run(self, documents: Iterable[SplitDocument]) -> Iterator[SplitDocument]:
        num_lines = array("I")
        with ExitStack() as files:
            writer = files.enter_context(DocumentWriter(self.folder / CLEANED, FAST))
            of_documents = files.enter_context(HashWriter(self.folder, DOCUMENT_HASHES, self.buckets))
            of_lines = files.enter_context(HashWriter(self.folder, LINE_HASHES, self.buckets))
            signed = SignatureWriter(self.folder, self.how, self.keep, self.buckets) if self.how else None
            if signed:
                files.enter_context(signed)
            for document in super().run(documents):
                writer.add(_as_record(document))
                if signed:
                    document.cut_words = self.cut_words
                    signed.add(document, document.source in self.near_of)
                if self.has_documents:
                    of_documents.add([document_hash(document)])
                has_lines = document.source in self.lines_of
                num_lines.append(len(document.lines) if has_lines else 0)
                if has_lines:
                    of_lines.add(line_hashes(document))
                yield document
        np.save(self.folder / NUM_LINES, np.frombuffer(num_lines, np.uint32))


@dataclass
class ReadCleaned(CorpusStep):
    """The start of the second pass of a part. A document's place has its number among the cleaned ones."""

    name = "merge cleaned"
    file: Path
    part: int

    def run(self, documents: Iterable[SplitDocument] = ()) -> Iterator[SplitDocument]:
        for number, record in enumerate(read_documents(self.file)):
            place, facts = (self.part, number), record["metadata"]
            yield split_verbatim(record["text"], record["id"], record["source"], place, facts)


class SplitAgain(CorpusStep):
    """The border between the passes if they run as one pass."""

    name = "merge cleaned"

    def work(self, document: SplitDocument) -> bool:
        document.set_lines(document.join().split("\n"))
        return True


@dataclass
class WriteKept(CorpusStep):
    """The end of the second pass of a part: its documents as the corpus has them, and their sizes."""

    name = "write"
    folder: Path
    cut_words: CutWords | None = None

    def work(self, document: SplitDocument) -> bool:
        document.cut_words = self.cut_words
        self.count("words", amount=sum(map(len, document.words())))
        return True

    def run(self, documents: Iterable[SplitDocument]) -> Iterator[SplitDocument]:
        sizes = array("Q")
        with DocumentWriter(self.folder / KEPT, FAST) as writer:
            for document in super().run(documents):
                writer.add(_as_record(document))
                sizes.append(document.num_bytes)
                yield document
        np.save(self.folder / SIZES, np.frombuffer(sizes, np.uint64))


def _as_record(document: SplitDocument) -> Document:
    text, facts = document.join(), document.metadata
    return {"id": document.id, "text": text, "source": document.source, "metadata": facts}


def run_steps(steps: Sequence[CorpusStep]) -> list[Tally]:
    """Run the steps, each on what the step before leaves. Return each step's tally."""
    documents: Iterable[SplitDocument] = ()
    for step in steps:
        documents = step.run(documents)
    deque(documents, maxlen=0)
    return [Tally(step.name, step.detail, step.counts, step.examples) for step in steps]


def first_pass(recipe: Recipe, reader: CorpusStep) -> list[CorpusStep]:
    """Return the steps that need one document at a time, from the reader on."""
    corpus = recipe.corpus
    own = _names(corpus, is_cleaned)
    code = _names(corpus, lambda source: source.kind == "code" and source.clean)
    chats = _names(corpus, lambda source: source.kind == "instructions")
    cleaned_chats = _names(corpus, lambda source: source.kind == "instructions" and source.clean)
    others = _names(corpus, lambda source: not is_cleaned(source) and source.kind != "parallel")
    return [
        reader,
        *(step for source in corpus.sources for step in _only([source.name], *score_filters(source))),
        *_only(others, filters.NotEmpty()),
        *(_only(own, RepairEncoding()) if corpus.repair_encoding else []),
        *_steps_of_rules(corpus, recipe.language, damage.mends),
        *_only(own, filters.Normalise()),
        *_language_steps(corpus, recipe.language),
        *_only(own, *map(OwnStep, corpus.own_steps)),
        *_only(code, *code_filters(corpus.code)),
        *_pair_steps(corpus),
        *_only(chats, WholeConversations()),
        *_only(cleaned_chats, AlternatingTurns()),
        *decontamination(recipe),
    ]


def second_pass(
    corpus: Corpus,
    reader: CorpusStep,
    documents: Sequence[CorpusStep],
    lines: Sequence[CorpusStep],
    folder: Path,
) -> list[CorpusStep]:
    """Return the steps that need the whole corpus, from the reader on. Length is last: most lines may be
    duplicates. documents, lines: the filters of copies.
    """
    own = _names(corpus, is_cleaned)
    return [
        reader,
        *documents,
        *_only(own, *lines),
        *_only(own, filters.DocumentLength(corpus.min_document_characters)),
        WriteKept(folder, cutter_of_words(corpus.words)),
    ]


def _only(names: Sequence[str], *steps: CorpusStep) -> list[CorpusStep]:
    return [step.for_sources(names) for step in steps] if names else []


def _language_steps(corpus: Corpus, language: str) -> list[CorpusStep]:
    return _steps_of_rules(corpus, language, filters.line_filters, filters.document_filters, filters.masks)


def _steps_of_rules(
    corpus: Corpus, language: str, *makers: Callable[[Corpus, LanguageRule], Sequence[CorpusStep]]
) -> list[CorpusStep]:
    rules = language_rules(corpus, language)
    groups = {rule: [name for name in rules if rules[name] == rule] for rule in rules.values()}
    steps: list[CorpusStep] = []
    for make in makers:
        for rule, names in groups.items():
            detail = " or ".join(rule.languages) if len(groups) > 1 else ""
            steps += [step.for_sources(names, detail) for step in make(corpus, rule)]
    return steps


def _pair_steps(corpus: Corpus) -> list[CorpusStep]:
    pairs = [source for source in corpus.sources if source.kind == "parallel"]
    steps = _only([source.name for source in pairs if source.clean], filters.NormaliseSides())
    steps += _only([source.name for source in pairs], filters.WholePairs())
    for source in pairs:
        rules = [language_rule(corpus, [language(code)]) for code in source.language if source.clean]
        for side, rule in enumerate(rules):
            how = (corpus.language_identifier, rule.identifier_codes, rule.line_threshold, side)
            step = filters.SideLanguage(*how)
            steps.append(step.for_sources([source.name], f"{rule.languages[0]} of {source.name}"))
        names = [language(code).name for code in source.language]
        layout = filters.LayOutPairs(source.templates, source.reverse_share, names)
        steps.append(layout.for_sources([source.name], source.name))
    return steps


def _names(corpus: Corpus, wanted: Callable[[Source], bool]) -> Sequence[str]:
    return [source.name for source in corpus.sources if wanted(source)]
