"""Documents on disk, for tests that read them."""

from collections.abc import Iterable
from pathlib import Path

from kielo.artifact.documents import Document, DocumentWriter


def write_documents(path: Path | str, documents: Iterable[Document]) -> int:
    """Write the documents to a .jsonl.zst file and return their number. An exception leaves nothing."""
    count = 0
    with DocumentWriter(path) as writer:
        for document in documents:
            writer.add(document)
            count += 1
    return count
