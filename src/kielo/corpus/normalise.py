"""The normal form of text: Unicode NFC, no control characters, single spaces, no empty lines.

NFC and not NFKC, which would rewrite what people typed on purpose (², ½, …). The controls U+0080 to U+009F
are letters and signs of windows-1252 that were taken for Latin-1. They become these letters, as in browsers
(WHATWG, HTML, section 13.2.5.80).
"""

import unicodedata

import regex

from kielo.corpus.step import CorpusStep, SplitDocument

C1 = regex.compile("[\u0080-\u009f]")
# Byte → its character in windows-1252. Its five holes are dropped as controls.
_OF_WINDOWS_1252 = {
    byte: character for byte in range(0x80, 0xA0) if (character := bytes([byte]).decode("cp1252", "ignore"))
}
# Controls but for the tab, and invisible characters that only split words: soft hyphen, zero-width space,
# word joiner, byte-order mark. Joiners (U+200C, U+200D) stay: Persian and the scripts of India need them.
UNWANTED = regex.compile(r"[\p{Cc}--\t]|[\u00ad\u200b\u2060\ufeff]|\p{Cs}|\p{Cn}", regex.V1)


def normalise_line(line: str) -> str:
    """Return the line in NFC, without control characters, with single spaces and none at the ends."""
    if line.isascii():
        return " ".join(UNWANTED.sub("", line).split())
    line = UNWANTED.sub("", line.translate(_OF_WINDOWS_1252) if C1.search(line) else line)
    # Last, because a dropped character may have stood between a letter and its mark.
    return unicodedata.normalize("NFC", " ".join(line.split()))


def count_c1(step: CorpusStep, text: str, what: str = "c1") -> None:
    """Count controls of a document: "c1" that `normalise_line` writes as letters, "c1_kept" that stay."""
    if not text.isascii() and (found := len(C1.findall(text))):
        step.count(f"{what}_characters", amount=found)
        step.count(f"{what}_documents")


class Normalise(CorpusStep):
    name = "normalise"

    def work(self, document: SplitDocument) -> bool:
        before = document.num_bytes
        count_c1(self, "".join(document.lines))
        lines = [normalise_line(line) for line in document.lines]
        document.set_lines([line for line in lines if line])
        self.count("bytes", "white space and control characters", before - document.num_bytes)
        if not document.lines:
            self.count("documents", "empty")
        return bool(document.lines)
