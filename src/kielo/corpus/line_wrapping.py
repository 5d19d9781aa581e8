"""Notices .txt files whose lines were wrapped at a width: there a line is no document. A source → advice."""

from pathlib import Path

from kielo.artifact.text_files import read_lines
from kielo.corpus.raw_formats import RawSource, file_format

LINES = 2000
WIDTHS = range(40, 121)
MAX_LINE_BYTES = 1 << 20


def wrapping_advice(source: RawSource) -> str | None:
    """Returns what to set for a source of .txt files that look wrapped, by the first of them; None if not.

    Wrapped text is full to about the same width: nine of ten lines that another follows are longer than half
    of the width that hardly any exceeds. Empty lines between them tell paragraphs apart.
    """
    files = [Path(source.root) / file for file in source.files]
    path = next((path for path in files if file_format(path, source.kind) == "txt"), None)
    if path is None or source.documents != "lines":
        return None
    lengths, empty = [], 0
    for number, line in read_lines(path, MAX_LINE_BYTES, source.encoding):
        if number > LINES or line is None:
            break
        text = line.decode("utf-8", "replace").rstrip()
        lengths.append(len(text))
        empty += not text
    filled = sorted(a for a, b in zip(lengths, lengths[1:]) if a and b)
    if len(filled) < 20:
        return None
    width = filled[len(filled) * 98 // 100]
    full = sum(length > width / 2 for length in filled)
    if width not in WIDTHS or max(filled) > 2 * width or full < 0.9 * len(filled) or not empty:
        return None
    return (
        f"{path} looks wrapped at {width} characters, so that each of its lines is taken for a document; "
        f'documents = "paragraphs" or "files" in the source joins them: '
        f"""--set 'corpus.sources=[{{path="{path}", documents="paragraphs"}}]'"""
    )
