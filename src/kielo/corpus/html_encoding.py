"""The encoding of an HTML page: bytes → text, by mark, label and the bytes themselves.

Labels mean what browsers take them for (WHATWG, Encoding Standard, section 4.2 "Names and labels"), not what
Python does: a page that is called Latin-1 is in windows-1252.
"""

import codecs
import re
from pathlib import Path

from kielo.artifact.text_files import SHOWING_BYTES, marked_encoding, other_encoding
from kielo.corpus.raw_record import BadRecord

_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?([A-Za-z0-9_.:-]+)", re.IGNORECASE)
# Python has them as encodings of text, but no page is written in them.
_NO_CHARSETS = frozenset({"utf-7", "idna", "punycode", "unicode-escape", "raw-unicode-escape", "undefined"})
# Python's name → the encoding that the standard gives its labels.
_AS_BROWSERS_DO = {
    "iso8859-1": "cp1252", "ascii": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874",
    "tis-620": "cp874", "gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949",
    "big5": "big5hkscs",
}  # fmt: skip
# Python's name → labels of the standard that Python does not know, or knows as another encoding.
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
    """Decodes a page by its byte-order mark, else as `given`, else as what its bytes and its label say.

    Text that is UTF-8 is that, whatever a stale label says. Raises BadRecord, which names the line, for bytes
    that its encoding does not have, and for a label that is none.
    """
    shown = other_encoding(content[:SHOWING_BYTES])
    encoding = marked_encoding(content) or given or shown or _of_label(path, content)
    try:
        return _decode(content, encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as problem:
        line = content.count(b"\n", 0, problem.start) + 1
        raise BadRecord(
            "not in its charset",
            f"{path}, line {line}: invalid {encoding.upper()} (byte 0x{content[problem.start]:02x}); "
            "convert the file, or name its encoding in the source's `encoding`",
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
            "not in its charset", f"{path}: unknown charset {label!r}; convert the file to UTF-8"
        ) from None
    # A charset that was found byte by byte cannot be UTF-16.
    name = "utf-8" if name.startswith(("utf-16", "utf-32")) else _AS_BROWSERS_DO.get(name, name)
    return "utf-8" if name != "utf-8" and _is_utf8(content, name) else name


def _is_utf8(content: bytes, labelled: str) -> bool:
    """Returns True for text with UTF-8's sequences and no other bytes.

    Two bytes of UTF-8 may be a letter of the other encodings of East Asia; three are hardly ever.
    """
    if content.isascii() or labelled in _LETTERS_OF_TWO_BYTES and not _THREE_BYTES.search(content):
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _decode(content: bytes, encoding: str) -> str:
    try:
        return content.decode(encoding)
    except UnicodeDecodeError:
        # Five bytes of windows-1252 and some of its neighbours are controls in the standard, holes in Python.
        if not encoding.startswith("cp12"):
            raise
        return "".join(_letter(byte, encoding) for byte in content)


def _letter(byte: int, encoding: str) -> str:
    try:
        return bytes([byte]).decode(encoding)
    except UnicodeDecodeError:
        return chr(byte)
