"""Files of documents: those between the two passes, one a worker, and the corpus in its final files.

Split documents -> cleaned/RANK.jsonl.zst -> merged in the order of the corpus -> documents/NUMBER.jsonl.zst.
"""

import heapq
from pathlib import Path

from datatrove.data import DocumentsPipeline

from kielo.artifact.documents import SUFFIX, DocumentWriter, read_documents
from kielo.corpus.split_document import SplitDocument, split_verbatim
from kielo.corpus.step import CorpusStep

# Text bytes of one file of the corpus: small enough to hand to many readers, large enough to be few.
BYTES_PER_FILE = 512 << 20


class WriteCleaned(CorpusStep):
    """Ends the first pass: writes each worker's documents to a file of its own."""

    name = "write cleaned"

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = str(folder)

    def work(self, document: SplitDocument) -> bool:
        return True

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        with DocumentWriter(Path(self.folder) / f"{rank:05d}{SUFFIX}") as writer:
            for document in super().run(data, rank, world_size):
                writer.add(_as_record(document) | {"place": document.place})
                yield document


class MergeCleaned(CorpusStep):
    """Begins the second pass: reads all workers' documents in the order of the corpus."""

    name = "merge cleaned"

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = str(folder)

    def work(self, document: SplitDocument) -> bool:
        return True

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        files = [read_documents(path) for path in sorted(Path(self.folder).glob("*" + SUFFIX))]
        for record in heapq.merge(*files, key=lambda record: record["place"]):
            place = tuple(record["place"])
            yield split_verbatim(record["text"], record["id"], record["source"], place, record["metadata"])


class WriteDocuments(CorpusStep):
    """Ends the second pass: writes the corpus in files of about BYTES_PER_FILE, and counts each source."""

    name = "write"

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = str(folder)

    def work(self, document: SplitDocument) -> bool:
        self.count("source_documents", document.source)
        self.count("source_bytes", document.source, document.num_bytes)
        self.count("words", "", sum(map(len, document.words())))
        return True

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        writer, num_files, bytes_in_file = None, 0, 0
        try:
            for document in super().run(data, rank, world_size):
                if writer is None or bytes_in_file >= BYTES_PER_FILE:
                    if writer is not None:
                        writer.close()
                    writer = DocumentWriter(Path(self.folder) / f"{num_files:05d}{SUFFIX}")
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


def _as_record(document: SplitDocument) -> dict:
    return {
        "id": document.id,
        "text": document.join(),
        "source": document.source,
        "metadata": document.metadata,
    }
