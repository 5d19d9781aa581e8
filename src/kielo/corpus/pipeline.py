"""The steps of a corpus in the order in which they run, in two passes.

Cleaned text is normalised and goes through the filters of its languages, code, pairs and conversations
through their own. Text that others have cleaned passes as it is.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kielo.artifact.documents import SUFFIX, Document, DocumentWriter, read_documents
from kielo.corpus import damage, filters
from kielo.corpus.conversations import AlternatingTurns, WholeConversations
from kielo.corpus.decontamination import decontamination
from kielo.corpus.mojibake import RepairEncoding
from kielo.corpus.own_step import OwnStep
from kielo.corpus.programming_languages import code_filters
from kielo.corpus.raw_formats import RawSource, records, unreadable
from kielo.corpus.raw_record import BadRecord, Record
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
from kielo.corpus.worker_processes import results_in_order
from kielo.recipe.cards import language
from kielo.recipe.sections import Corpus, Recipe, Source

BAD = "bad"  # records: counted, and kept as examples
MAX_EXAMPLES, MAX_EXAMPLE_CHARACTERS = 5, 300  # bad records of each source that are shown
# Text bytes of one file of the corpus: small enough for many readers, large enough for few files.
BYTES_PER_FILE = 512 << 20


@dataclass
class ReadSources(CorpusStep):
    """The reader of the sources. Worker r of n takes documents r, r + n, …, so a big file keeps all busy."""

    name = "read"
    sources: tuple[RawSource, ...]
    max_document_bytes: int
    workers: int = 1
    rank: int = 0

    def run(self, documents: Iterable[SplitDocument] = ()) -> Iterator[SplitDocument]:
        return super().run(self.documents())

    def documents(self) -> Iterator[SplitDocument]:
        for source_number, source in enumerate(self.sources):
            for number, record in enumerate(records(source, self.max_document_bytes)):
                if number == source.max_documents:
                    break
                if number % self.workers != self.rank:
                    continue
                file = record.path.relative_to(source.root).as_posix()
                try:
                    raw = parse(record, source, self.max_document_bytes)
                except BadRecord as problem:
                    self.pass_over(source, (source_number, number), record, problem)
                    continue
                except OSError as problem:
                    raise unreadable(record.path, problem) from None
                metadata = {"file": file, "number": record.number} | raw.facts
                split = split_document if source.is_cleaned else split_verbatim
                document = split(raw.text, raw.id, source.name, (source_number, number), metadata)
                if raw.sides is not None:
                    document.set_sides(raw.sides)
                yield document

    def pass_over(
        self, source: RawSource, place: tuple[int, int], record: Record, problem: BadRecord
    ) -> None:
        self.source = source.name
        self.count("documents", problem.reason)
        if record.number == 0:
            self.count("damaged_bytes", amount=record.path.stat().st_size)
        text = str(problem).replace(f"{Path(source.root)}/", "", 1)[:MAX_EXAMPLE_CHARACTERS]
        self.count_example(BAD, place, text, MAX_EXAMPLES)


@dataclass
class WriteCleaned(CorpusStep):
    name = "write cleaned"
    folder: Path
    rank: int = 0

    def run(self, documents: Iterable[SplitDocument]) -> Iterator[SplitDocument]:
        with DocumentWriter(self.folder / f"{self.rank:05d}{SUFFIX}") as writer:
            for document in super().run(documents):
                writer.add({**_as_record(document), "place": document.place})
                yield document


@dataclass
class MergeCleaned(CorpusStep):
    """The start of the second pass, which reads all workers' documents in the order of the corpus."""

    name = "merge cleaned"
    folder: Path

    def run(self, documents: Iterable[SplitDocument] = ()) -> Iterator[SplitDocument]:
        files = [read_documents(path) for path in sorted(self.folder.glob("*" + SUFFIX))]
        for record in heapq.merge(*files, key=lambda record: tuple(record["place"])):
            source, number = record["place"]
            place, facts = (source, number), record["metadata"]
            yield split_verbatim(record["text"], record["id"], record["source"], place, facts)


@dataclass
class WriteDocuments(CorpusStep):
    """The end of the second pass, which writes files of about BYTES_PER_FILE and counts words."""

    name = "write"
    folder: Path
    cut_words: CutWords | None = None

    def work(self, document: SplitDocument) -> bool:
        document.cut_words = self.cut_words
        self.count("words", amount=sum(map(len, document.words())))
        return True

    def run(self, documents: Iterable[SplitDocument]) -> Iterator[SplitDocument]:
        writer, num_files, bytes_in_file = None, 0, 0
        try:
            for document in super().run(documents):
                if writer is None or bytes_in_file >= BYTES_PER_FILE:
                    if writer is not None:
                        writer.close()
                    writer = DocumentWriter(self.folder / f"{num_files:05d}{SUFFIX}")
                    num_files, bytes_in_file = num_files + 1, 0
                writer.add(_as_record(document))
                bytes_in_file += document.num_bytes
                yield document
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise
        if writer is not None:
            writer.close()


def _as_record(document: SplitDocument) -> Document:
    text, facts = document.join(), document.metadata
    return {"id": document.id, "text": text, "source": document.source, "metadata": facts}


def run_on_workers(make_steps: Callable[[int], list[CorpusStep]], workers: int) -> list[Tally]:
    """Run the steps of each rank in its own worker (a single rank: here). Return each step's tally."""
    make = partial(partial, _run_steps, make_steps)
    tallies_of_workers = results_in_order(make, range(workers), workers, "corpus")
    totals = next(tallies_of_workers)
    for tallies in tallies_of_workers:
        for total, tally in zip(totals, tallies, strict=True):
            total.add(tally)
    return totals


def _run_steps(make_steps: Callable[[int], list[CorpusStep]], rank: int) -> list[Tally]:
    steps = make_steps(rank)
    documents: Iterable[SplitDocument] = ()
    for step in steps:
        documents = step.run(documents)
    deque(documents, maxlen=0)
    return [Tally(step.name, step.detail, step.counts, step.examples) for step in steps]


def first_pass(
    sources: tuple[RawSource, ...], recipe: Recipe, cleaned: Path, workers: int = 1, rank: int = 0
) -> list[CorpusStep]:
    """Return the steps that need one document at a time, for worker `rank` of `workers`."""
    corpus = recipe.corpus
    own = _names(corpus, is_cleaned)
    code = _names(corpus, lambda source: source.kind == "code" and source.clean)
    chats = _names(corpus, lambda source: source.kind == "instructions")
    cleaned_chats = _names(corpus, lambda source: source.kind == "instructions" and source.clean)
    others = _names(corpus, lambda source: not is_cleaned(source) and source.kind != "parallel")
    return [
        ReadSources(sources, corpus.max_document_bytes, workers, rank),
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
        WriteCleaned(cleaned, rank),
    ]


def second_pass(corpus: Corpus, cleaned: Path, documents: Path) -> list[CorpusStep]:
    """Return the steps that need the whole corpus. Length is last: most lines may be duplicates."""
    own = _names(corpus, is_cleaned)
    return [
        MergeCleaned(cleaned),
        *([filters.DocumentDuplicates()] if corpus.deduplicate_documents else []),
        *_only(own if corpus.deduplicate_lines else (), filters.LineDuplicates()),
        *_only(own, filters.DocumentLength(corpus.min_document_characters)),
        WriteDocuments(documents, cutter_of_words(corpus.words)),
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
