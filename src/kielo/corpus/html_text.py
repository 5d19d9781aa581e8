"""HTML pages as plain text: the encoding of their bytes, and the lines of their prose."""

import codecs
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from selectolax.lexbor import LexborHTMLParser

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
# Labels of the standard's "replacement" that Python does not know. Chinese in ISO 2022 has only bytes below
# 128, and an escape (0x1b) before them.
_UNREADABLE = frozenset({"replacement", "iso-2022-cn", "iso-2022-cn-ext"})
_LETTERS_OF_TWO_BYTES = frozenset({"gb18030", "cp932", "cp949", "big5hkscs", "euc_jp", "iso2022_jp"})
_THREE_BYTES = re.compile(rb"[\xe0-\xef][\x80-\xbf]{2}")


def decode_page(path: Path | str, content: bytes, given: str | None = None, label: str = "") -> str:
    """Decode a page by its mark, else as `given`, else by its bytes and its label. Raises BadRecord.

    label: the charset that the server told. A known charset comes before the page's own label.
    """
    shown = other_encoding(content[:SHOWING_BYTES])
    encoding = marked_encoding(content) or given or shown or _of_label(path, content, label)
    try:
        return _decode(content, encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as problem:
        line = content.count(b"\n", 0, problem.start) + 1
        raise BadRecord(
            "not in its charset",
            f"{path}, line {line}: invalid {encoding.upper()} (byte 0x{content[problem.start]:02x}). "
            "Fix: convert the file, or name its encoding in the source's `encoding`",
        ) from None


def _of_label(path: Path | str, content: bytes, told: str) -> str:
    found = _CHARSET.search(content[:SHOWING_BYTES])
    label = found.group(1).decode().lower() if found else "utf-8"
    with suppress(LookupError, ValueError):  # ValueError: U+0000 in it
        is_known = told in _UNREADABLE or codecs.lookup(_LABELS.get(told, told)).name not in _NO_CHARSETS
        label = told if told and is_known else label
    try:
        name = codecs.lookup(_LABELS.get(label, label)).name
        if name in _NO_CHARSETS:
            raise LookupError
        "".encode(name)  # base64 and others are no encodings of text
    except LookupError:
        is_plain = content.isascii() and b"\x1b" not in content and label not in _UNREADABLE
        if is_plain or _is_utf8(content, label):
            return "utf-8"
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


_ARTICLE_ID = "DisplayArea"  # of LibreOffice's help
_ARTICLE = f"div#{_ARTICLE_ID}"
# Elements without prose. The text of the second kind is no markup.
_SKIPPED = frozenset({"nav", "pre", "svg", "template"})
_VERBATIM = frozenset({"script", "style", "noscript", "iframe", "noembed", "noframes"})
_BLOCKS = """
    address article aside blockquote body br caption dd details div dl dt fieldset figcaption figure footer
    form h1 h2 h3 h4 h5 h6 header hr legend li main ol option p section summary table tbody td tfoot th thead
    title tr ul
"""


def _any_of(tags: Iterable[str]) -> str:
    """Return a pattern of the tags that looks at their first letter once."""
    initials = sorted({tag[0] for tag in tags})
    rest = ("|".join(tag[1:] for tag in sorted(tags, reverse=True) if tag[0] == one) for one in initials)
    return "|".join(f"{one}(?:{tails})" for one, tails in zip(initials, rest, strict=True))


# In lexbor's serialisation, where each element is closed, and `<` and `>` in values and text are escaped.
_NOT_PROSE = re.compile(rf"<(?:!--|(/?)({_any_of(_SKIPPED | _VERBATIM)})(?=[ >]))")
_BREAK = rf"</?(?:{_any_of(_BLOCKS.split())})(?=[ >])[^>]*>"
_BREAKS, _TAG = re.compile(rf"{_BREAK}(?:\s*{_BREAK})*"), re.compile("<[^>]*>")
# Prose within a sentence. A block of nothing else is a listing, or the name of a button.
_HAS_ASIDE = re.compile("<(?:code|button)[ >]")
_ASIDE = re.compile(r"<(?:code|button)(?=[ >])[^>]*>.*?(?:</(?:code|button)>|\Z)", re.DOTALL)


def page_text(html: str) -> str:
    """Return the page's prose, of its article alone if marked, a line for each block element.

    Lexbor parses the page as browsers do. But an element without prose whose end is missing would take the
    rest of the page with it, so its tag is removed first.
    """
    prose, seen = _prose(html)
    unclosed = {tag for tag, number in seen.items() if html.count(f"</{tag}") < number}
    if html.count("<title") > html.count("</title"):
        unclosed.add("title")
    if unclosed and (mended := _without_unclosed(html, unclosed)) != html:
        prose, _ = _prose(mended)
    return prose


def _prose(html: str) -> tuple[str, dict[str, int]]:
    """Return the lines of a page, and the number of elements without prose by tag."""
    tree, seen = LexborHTMLParser(html), dict[str, int]()
    roots = tree.css(f"{_ARTICLE}:not({_ARTICLE} *)") if _ARTICLE_ID in html else []
    roots = roots or ([tree.body] if tree.body is not None else [])
    parts = [_lines(_without_skipped(root.html or "", seen)) for root in roots]
    return "\n".join(filter(None, parts)), seen


def _without_skipped(html: str, seen: dict[str, int]) -> str:
    """Remove the elements without prose, and count them in `seen`."""
    kept, place, begin, depth = list[str](), 0, 0, 0
    while found := _NOT_PROSE.search(html, place):
        slash, tag = found.groups()
        if not depth and not slash:
            kept.append(html[begin : found.start()])
        if tag in _SKIPPED:
            depth += -1 if slash else 1
            end = ">"
        else:
            end = "-->" if tag is None else f"</{tag}>"
        if tag is not None and not slash:
            seen[tag] = seen.get(tag, 0) + 1
        place = html.find(end, found.end())
        place = len(html) if place < 0 else place + len(end)
        if not depth:
            begin = place
    kept.append(html[begin:])
    return "".join(kept)


def _lines(html: str) -> str:
    blocks = _BREAKS.split(html.replace("&nbsp;", " "))
    if _HAS_ASIDE.search(html):
        blocks = [block for block in blocks if not _is_aside(block)]
    # No page has U+0000: HTML reads it as another character.
    text = " ".join(_TAG.sub("", "\0".join(blocks)).split())
    lines = "\n".join(filter(None, map(str.strip, text.split("\0"))))
    return lines.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def _is_aside(block: str) -> bool:
    return bool(_HAS_ASIDE.search(block)) and not _TAG.sub("", _ASIDE.sub("", block)).strip()


def _without_unclosed(html: str, tags: Iterable[str]) -> str:
    """Return the page without the tags of these elements that have no end."""
    removed: list[tuple[int, int]] = []
    for tag in tags:
        opened: list[tuple[int, int]] = []
        text = "[^<]*" if tag in ("title", "script", "style") else ""  # which is no prose either
        for found in re.finditer(rf"<(/?){tag}\b[^>]*?(/?)>{text}", html, re.IGNORECASE):
            if found[1]:
                del opened[-1:]
            elif not found[2]:
                opened.append(found.span())
            elif tag != "svg":  # browsers close only foreign elements so
                removed.append(found.span())
        removed += opened
    for begin, end in sorted(removed, reverse=True):
        html = html[:begin] + html[end:]
    return html
