"""Filters of exact duplicates, documents and lines, over the whole corpus: the first one stays.

These steps remember what they have seen, so they run in the one process of the second pass, which reads the
documents in the order of the corpus: the outcome is the same for any number of workers. They remember 64-bit
xxh3 hashes, about 100 bytes of memory for each different line; two of 10⁹ different lines collide with a
probability of 3 %.
"""

import xxhash

from kielo.artifact.conversation import TURNS
from kielo.corpus.split_document import SplitDocument
from kielo.corpus.step import DocumentFilter, LineFilter

SEEN = "seen before"


class DocumentDuplicates(DocumentFilter):
    name = "document duplicates"

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def judge(self, document: SplitDocument) -> str | None:
        text = "\n".join(document.lines)
        if turns := document.metadata.get(TURNS):  # the same words in other roles are another conversation
            text += f"\0{turns}"
        return None if _is_new(xxhash.xxh3_64_intdigest(text.encode()), self.seen) else SEEN


class LineDuplicates(LineFilter):
    name = "line duplicates"

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def judge(self, document: SplitDocument) -> list[str | None]:
        return [
            None if _is_new(xxhash.xxh3_64_intdigest(line.encode()), self.seen) else SEEN
            for line in document.lines
        ]


def _is_new(digest: int, seen: set[int]) -> bool:
    if digest in seen:
        return False
    seen.add(digest)
    return True
