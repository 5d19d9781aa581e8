"""HTML pages as plain text: the encoding of their bytes, and the lines of their prose."""

import codecs
import re
from html.parser import HTMLParser
from pathlib import Path

from kielo.artifact.text_files import SHOWING_BYTES, marked_encoding, other_encoding
from kielo.corpus.raw_record import BadRecord

_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?([A-Za-z0-9_.:-]+)", re.IGNORECASE)
# Python's encodings of text in which no page is written.
_NO_CHARSETS = frozenset({"utf-7", "idna", "punycode", "unicode-escape", "raw-unicode-escape", "undefined"})
# Python's name → the encoding of browsers (WHATWG, Encoding Standard, section 4.2 "Names and labels"): a page
# that is called Latin-1 is in windows-1252.
_AS_BROWSERS_DO = {
    "iso8859-1": "cp1252",
    "ascii": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "big5": "big5hkscs",
}
# Python's name → the standard's labels that Python does not know, or knows as another encoding.
_BY_NAME = {
    "utf-8": "utf8 unicode-1-1-utf-8 unicode11utf8 unicode20utf8 x-unicode20utf8 unicode unicodefffe "
    "unicodefeff csunicode iso-10646-ucs-2 ucs-2",
    "iso8859-6": "csiso88596e csiso88596i iso-8859-6-e iso-8859-6-i",
    "iso8859-7": "sun_eu_greek",
    "iso8859-8": "csiso88598e csiso88598i iso-8859-8-e iso-8859-8-i visual logical",
    "iso8859-15": "csisolatin9",
    "koi8-r": "koi koi8",
    "koi8-u": "koi8-ru",
    "mac-roman": "csmacintosh mac x-mac-roman",
    "mac-cyrillic": "x-mac-cyrillic x-mac-ukrainian",
    "cp874": "dos-874 windows-874 iso885911",
    "cp932": "x-sjis windows-31j",
    "cp949": "ks_c_5601-1987 ks_c_5601-1989 ksc_5601 windows-949 cseuckr csksc56011987 iso-ir-149",
    "gb18030": "x-gbk csgb2312 gb_2312 gb_2312-80",
    "big5hkscs": "cn-big5 x-x-big5",
    "euc_jp": "cseucpkdfmtjapanese x-euc-jp",
    **{f"iso8859-{number}": f"iso8859{number}" for number in (1, 2, 3, 4, 5, 9, 10, 13, 14)},
    **{f"cp125{number}": f"x-cp125{number}" for number in range(9)},
}
_LABELS = {label: name for name, labels in _BY_NAME.items() for label in labels.split()}
_LABELS |= {"x-user-defined": "cp1252"} | {
    f"iso8859{number}": f"iso8859-{number}" for number in (6, 7, 8, 15)
}
_LETTERS_OF_TWO_BYTES = frozenset({"gb18030", "cp932", "cp949", "big5hkscs", "euc_jp", "iso2022_jp"})
_THREE_BYTES = re.compile(rb"[\xe0-\xef][\x80-\xbf]{2}")


def decode_page(path: Path, content: bytes, given: str | None = None) -> str:
    """Decode a page by its mark, else as `given`, else by its bytes and its label. Raises BadRecord."""
    shown = other_encoding(content[:SHOWING_BYTES])
    encoding = marked_encoding(content) or given or shown or _of_label(path, content)
    try:
        return _decode(content, encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as problem:
        line = content.count(b"\n", 0, problem.start) + 1
        raise BadRecord(
            "not in its charset",
            f"{path}, line {line}: invalid {encoding.upper()} (byte 0x{content[problem.start]:02x}). "
            "Fix: convert the file, or name its encoding in the source's `encoding`",
        ) from None


def _of_label(path: Path, content: bytes) -> str:
    found = _CHARSET.search(content[:SHOWING_BYTES])
    label = found.group(1).decode().lower() if found else "utf-8"
    try:
        name = codecs.lookup(_LABELS.get(label, label)).name
        if name in _NO_CHARSETS:
            raise LookupError
        "".encode(name)  # base64 and others are no encodings of text
    except LookupError:
        raise BadRecord(
            "not in its charset", f"{path}: unknown charset {label!r}. Fix: convert the file to UTF-8"
        ) from None
    # The label was found byte by byte, so the page cannot be UTF-16.
    name = "utf-8" if name.startswith(("utf-16", "utf-32")) else _AS_BROWSERS_DO.get(name, name)
    return "utf-8" if name != "utf-8" and _is_utf8(content, name) else name


def _is_utf8(content: bytes, labelled: str) -> bool:
    """Return True for text with UTF-8's sequences and no other bytes above 127."""
    # Two bytes of UTF-8 may be a letter of the other encodings of East Asia. Three hardly ever are.
    if content.isascii() or labelled in _LETTERS_OF_TWO_BYTES and not _THREE_BYTES.search(content):
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _decode(content: bytes, encoding: str) -> str:
    if not encoding.startswith("cp12"):
        return content.decode(encoding)
    # Five bytes of windows-1252 and some of its neighbours are controls in the standard, holes in Python.
    return content.decode(encoding, "surrogateescape").translate({0xDC00 + byte: byte for byte in range(256)})


ARTICLE_ID = "DisplayArea"  # of LibreOffice's help
SKIPPED = frozenset({"script", "style", "pre", "nav", "template", "noscript", "svg", "head"})
# Prose within a sentence. A block of nothing else is a listing, or the name of a button.
ASIDE = frozenset({"code", "button"})
_BLOCKS = """
    address article aside blockquote body br caption dd details div dl dt fieldset figcaption figure footer
    form h1 h2 h3 h4 h5 h6 header hr legend li main ol option p section summary table tbody td tfoot th thead
    title tr ul
"""
BLOCKS = frozenset(_BLOCKS.split())


def page_text(html: str) -> str:
    """Return the page's prose, of its article alone if marked, a line for each block element."""
    page = _Page(html)
    # An open element would take the rest of the page with it. Scripts and styles have no text anyway.
    open_ = {place for tag, place in page.open_skipped if tag not in ("script", "style")}
    if open_:
        page = _Page(html, frozenset(open_))
    return "\n".join(page.article if page.has_article else page.body)


class _Page(HTMLParser):
    """A page. taken: lines and columns of elements that are not skipped."""

    def __init__(self, html: str, taken: frozenset[tuple[int, int]] = frozenset()) -> None:
        super().__init__(convert_charrefs=True)
        self.body: list[str] = []
        self.article: list[str] = []
        self.has_article = False
        self.open_skipped: list[tuple[str, tuple[int, int]]] = []
        self._taken = taken
        self._open_aside: list[str] = []
        self._has_prose = False
        self._article_divs = 0
        self._parts: list[str] = []
        self.feed(html)
        self.close()
        self.end_line()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":
            self.open_skipped.clear()  # an open element of the head must not swallow the page
        if tag in SKIPPED and self.getpos() not in self._taken:
            self.open_skipped.append((tag, self.getpos()))
        if tag in ASIDE:
            self._open_aside.append(tag)
        if tag in BLOCKS:
            self.end_line()
        if tag == "div" and (self._article_divs or dict(attrs).get("id") == ARTICLE_ID):
            self._article_divs += 1
            self.has_article = True

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in BLOCKS:
            self.end_line()

    def handle_endtag(self, tag: str) -> None:
        tags = [name for name, _ in self.open_skipped]
        if tag in tags:
            del self.open_skipped[tags.index(tag) :]  # and the open elements inside it
        if tag in self._open_aside:
            del self._open_aside[self._open_aside.index(tag) :]
        if tag in BLOCKS:
            self.end_line()
        if tag == "div" and self._article_divs:
            self._article_divs -= 1

    def handle_data(self, data: str) -> None:
        if not self.open_skipped:
            self._parts.append(data)
            self._has_prose = self._has_prose or not self._open_aside and not data.isspace()

    def end_line(self) -> None:
        line = " ".join("".join(self._parts).split()) if self._has_prose else ""
        self._parts.clear()
        self._open_aside.clear()  # an element without an end ends with its block
        self._has_prose = False
        if line:
            (self.article if self._article_divs else self.body).append(line)
