"""Normal form of text: Unicode NFC, no control characters, single spaces, no empty lines.

Lines in -> the same lines rewritten. NFC and not NFKC, which would rewrite what people typed on purpose (²,
½, …).
"""

import unicodedata

import regex

from kielo.corpus.split_document import SplitDocument
from kielo.corpus.step import CorpusStep

# Controls but for the tab, and invisible characters that only ever split words: soft hyphen, zero-width
# space, word joiner, byte-order mark. Joiners (U+200C, U+200D) stay: Persian and the scripts of India need
# them.
UNWANTED = regex.compile(r"[\p{Cc}--\t]|[\u00ad\u200b\u2060\ufeff]|\p{Cs}|\p{Cn}", regex.V1)


def normalise_line(line: str) -> str:
    """Returns the line in NFC, without control characters, with single spaces and none at the ends."""
    if not line.isascii():
        line = unicodedata.normalize("NFC", line)
    return " ".join(UNWANTED.sub("", line).split())


class Normalise(CorpusStep):
    name = "normalise"

    def work(self, document: SplitDocument) -> bool:
        before = document.num_bytes
        lines = [normalise_line(line) for line in document.lines]
        document.set_lines([line for line in lines if line])
        self.count("bytes", "white space and control characters", before - document.num_bytes)
        if not document.lines:
            self.count("documents", "empty")
        return bool(document.lines)
