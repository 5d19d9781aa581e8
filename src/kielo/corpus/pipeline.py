"""The steps of a corpus in the order in which they run, in two passes.

Which documents a step sees follows from the kind of their source: cleaned text is normalised and goes through
the filters of its languages, code, pairs and conversations through their own; text that others have cleaned
passes as it is.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from kielo.artifact.documents import SUFFIX, Document, DocumentWriter, read_documents
from kielo.corpus.conversations import AlternatingTurns, WholeConversations
from kielo.corpus.filters import (
    DocumentDuplicates,
    DocumentLength,
    LineDuplicates,
    NotEmpty,
    document_filters,
    line_filters,
)
from kielo.corpus.normalise import Normalise
from kielo.corpus.pairs import LayOutPairs, NormaliseSides, SideLanguage, WholePairs
from kielo.corpus.programming_languages import code_filters
from kielo.corpus.raw_formats import RawSource, records, unreadable
from kielo.corpus.raw_record import BadRecord, Record
from kielo.corpus.raw_texts import parse
from kielo.corpus.step import (
    CorpusStep,
    SplitDocument,
    Tally,
    is_cleaned,
    language_rules,
    side_rules,
    split_document,
    split_verbatim,
)
from kielo.corpus.worker_processes import results_in_order
from kielo.recipe.cards import language
from kielo.recipe.sections import Corpus, Recipe, Source

# Reader of the sources: the first step of a corpus.
#
# A source's files -> split documents. Worker r of n takes documents r, r+n, … of each source, so one big
# file keeps all workers busy, and `place` is a document's position in the corpus. A record that cannot be
# read is passed over and counted; `run` refuses the corpus when there are too many of them.


BAD = "bad"  # records: what is counted, and kept as examples
# Bad records of each source that are shown.
MAX_EXAMPLES = 5
MAX_EXAMPLE_CHARACTERS = 300


class ReadSources(CorpusStep):
    """Read the share of every source that worker `rank` of `workers` has, and counts bad records."""

    name = "read"

    def __init__(
        self, sources: tuple[RawSource, ...], max_document_bytes: int, workers: int = 1, rank: int = 0
    ):
        super().__init__()
        self.sources = sources
        self.max_document_bytes = max_document_bytes
        self.workers, self.rank = workers, rank

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
        """Count a bad record, and keep the first ones as examples."""
        self.source = source.name
        self.count("documents", problem.reason)
        if record.number == 0:
            self.count("damaged_bytes", amount=record.path.stat().st_size)
        text = str(problem).replace(f"{Path(source.root)}/", "", 1)[:MAX_EXAMPLE_CHARACTERS]
        self.count_example(BAD, place, text, MAX_EXAMPLES)


# Files of documents: those between the two passes, one a worker, and the corpus in its final files.
#
# Split documents -> cleaned/RANK.jsonl.zst -> merged in the order of the corpus ->
# documents/NUMBER.jsonl.zst.


# Text bytes of one file of the corpus: small enough to hand to many readers, large enough to be few.
BYTES_PER_FILE = 512 << 20


class WriteCleaned(CorpusStep):
    """End the first pass: writes each worker's documents to a file of its own."""

    name = "write cleaned"

    def __init__(self, folder: Path, rank: int = 0):
        super().__init__()
        self.path = folder / f"{rank:05d}{SUFFIX}"

    def run(self, documents: Iterable[SplitDocument]) -> Iterator[SplitDocument]:
        with DocumentWriter(self.path) as writer:
            for document in super().run(documents):
                writer.add({**_as_record(document), "place": document.place})
                yield document


class MergeCleaned(CorpusStep):
    """Begin the second pass: reads all workers' documents in the order of the corpus."""

    name = "merge cleaned"

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder

    def run(self, documents: Iterable[SplitDocument] = ()) -> Iterator[SplitDocument]:
        files = [read_documents(path) for path in sorted(self.folder.glob("*" + SUFFIX))]
        for record in heapq.merge(*files, key=lambda record: tuple(record["place"])):
            source, number = record["place"]
            place, facts = (source, number), record["metadata"]
            yield split_verbatim(record["text"], record["id"], record["source"], place, facts)


class WriteDocuments(CorpusStep):
    """End the second pass: writes the corpus in files of about BYTES_PER_FILE, and count its words."""

    name = "write"

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder

    def work(self, document: SplitDocument) -> bool:
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
    return {
        "id": document.id,
        "text": document.join(),
        "source": document.source,
        "metadata": document.metadata,
    }


# The two passes, and their run.


def run_on_workers(make_steps: Callable[[int], list[CorpusStep]], workers: int) -> list[Tally]:
    """Run the steps that `make_steps` gives for each rank in a worker of its own; return each step's tally.

    With one worker everything happens in this process. The first exception of a worker ends the others and is
    raised here. Raises KieloError for a worker that was killed or ran out of memory.
    """
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
    own, others = _names(corpus, is_cleaned), _names(corpus, _is_taken_whole)
    return [
        ReadSources(sources, corpus.max_document_bytes, workers, rank),
        *([NotEmpty().for_sources(others)] if others else []),
        *([Normalise().for_sources(own)] if own else []),
        *_language_steps(corpus, recipe.language),
        *_code_steps(corpus),
        *_pair_steps(recipe),
        *_conversation_steps(corpus),
        WriteCleaned(cleaned, rank),
    ]


def second_pass(corpus: Corpus, cleaned: Path, documents: Path) -> list[CorpusStep]:
    """Return the steps that need the whole corpus.

    Length is last: a document may lose most lines as duplicates.
    """
    own = _names(corpus, is_cleaned)
    return [
        MergeCleaned(cleaned),
        *([DocumentDuplicates()] if corpus.deduplicate_documents else []),
        *([LineDuplicates().for_sources(own)] if corpus.deduplicate_lines and own else []),
        *([DocumentLength(corpus.min_document_characters).for_sources(own)] if own else []),
        WriteDocuments(documents),
    ]


def _language_steps(corpus: Corpus, language: str) -> list[CorpusStep]:
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
    corpus = recipe.corpus
    steps: list[CorpusStep] = []
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
