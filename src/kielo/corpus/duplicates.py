"""Exact duplicates over the whole corpus, of documents and of lines: the first of the corpus stays.

Equal are texts with the same 64-bit xxh3. The probability that two of 10⁹ different lines collide is 3 %.
Hashes are written when a part is cleaned, buckets of them are compared on their own (`hash_buckets.py`), and
these filters take the verdicts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from kielo.artifact.documents import TURNS
from kielo.corpus.step import DocumentFilter, LineFilter, SplitDocument

SEEN = "seen before"


def document_hash(document: SplitDocument) -> int:
    text = document.join()
    if turns := document.metadata.get(TURNS):  # the same words in other roles are another conversation
        text += f"\0{turns}"
    return xxhash.xxh3_64_intdigest(text.encode())


def line_hashes(document: SplitDocument) -> list[int]:
    return [xxhash.xxh3_64_intdigest(line.encode()) for line in document.lines]


@dataclass
class DocumentDuplicates(DocumentFilter):
    """A filter by the flags of a part's documents, by their number in the part: True for a duplicate."""

    name = "document duplicates"
    flags: np.ndarray

    def judge(self, document: SplitDocument) -> str | None:
        return SEEN if self.flags[document.place[1]] else None


@dataclass
class LineDuplicates(LineFilter):
    """A filter by the flags of a part's lines: True for a duplicate. begins: each document's first line."""

    name = "line duplicates"
    flags: np.ndarray
    begins: np.ndarray

    def judge(self, document: SplitDocument) -> Sequence[str | None]:
        begin = int(self.begins[document.place[1]])
        flags = self.flags[begin : begin + len(document.lines)].tolist()
        return [SEEN if flag else None for flag in flags]
