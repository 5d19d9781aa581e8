"""Reader of the sources: the first step of a corpus.

A source's files -> split documents. Worker r of n takes documents r, r+n, … of each source, so one big file
keeps all workers busy, and `place` is a document's position in the corpus. A record that cannot be read is
passed over and counted; `run` refuses the corpus when there are too many of them.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from datatrove.data import DocumentsPipeline

from kielo.corpus.raw_formats import RawSource, records, unreadable
from kielo.corpus.raw_record import BadRecord, Record
from kielo.corpus.raw_texts import parse
from kielo.corpus.split_document import SplitDocument, split_document, split_verbatim
from kielo.corpus.step import CorpusStep

# Bad records of each source that are shown.
MAX_EXAMPLES = 5
MAX_EXAMPLE_CHARACTERS = 300


class ReadSources(CorpusStep):
    """Reads this worker's share of every source, and counts bad records."""

    name = "read"

    def __init__(self, sources: tuple[RawSource, ...], max_document_bytes: int):
        super().__init__()
        self.sources = sources
        self.max_document_bytes = max_document_bytes
        self.num_examples: Counter[str] = Counter()

    def work(self, document: SplitDocument) -> bool:
        self.count("source_documents", document.source)
        self.count("source_bytes", document.source, document.num_bytes)
        return True

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        return super().run(self.documents(rank, world_size), rank, world_size)

    def documents(self, rank: int, world_size: int) -> Iterator[SplitDocument]:
        for source_number, source in enumerate(self.sources):
            for number, record in enumerate(records(source, self.max_document_bytes)):
                if number == source.max_documents:
                    break
                if number % world_size != rank:
                    continue
                file = record.path.relative_to(source.root).as_posix()
                try:
                    raw = parse(record, source, self.max_document_bytes)
                except BadRecord as problem:
                    self.pass_over(source, number, record, problem)
                    continue
                except OSError as problem:
                    raise unreadable(record.path, problem) from None
                metadata = {"file": file, "number": record.number} | raw.facts
                split = split_document if source.is_cleaned else split_verbatim
                document = split(raw.text, raw.id, source.name, (source_number, number), metadata)
                if raw.sides is not None:
                    document.set_sides(raw.sides)
                yield document

    def pass_over(self, source: RawSource, number: int, record: Record, problem: BadRecord) -> None:
        """Count a bad record, and keep the first ones as examples (see `bad_examples`)."""
        self.source = source.name
        self.count("source_documents", source.name)
        self.count("source_bad", source.name)
        self.count("documents", problem.reason)
        if record.number == 0:
            self.count("source_damaged_bytes", source.name, record.path.stat().st_size)
        if self.num_examples[source.name] < MAX_EXAMPLES:
            self.num_examples[source.name] += 1
            text = str(problem).replace(f"{Path(source.root)}/", "", 1)[:MAX_EXAMPLE_CHARACTERS]
            # Examples are labels, since counts are what every executor of datatrove brings home.
            self.count("bad_example", json.dumps([source.name, number, text]))


def bad_examples(labels: dict[str, int]) -> dict[str, list[str]]:
    """Returns source name -> its first bad records in the order of the corpus, from `ReadSources`' counts."""
    found = sorted(
        json.loads(label.partition("/")[2]) for label in labels if label.startswith("bad_example/")
    )
    return {
        name: [text for source, _, text in found if source == name][:MAX_EXAMPLES] for name, _, _ in found
    }
