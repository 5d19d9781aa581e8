"""Odd but real bytes of text: encodings, labels, line ends, and what stands beside a text in its record."""

import io
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import webencodings.labels
import zstandard

from kielo.corpus.html_text import decode_page
from kielo.corpus.raw_record import BadRecord
from tests.border.source_variants import Kind, check

ESTONIAN = [
    f"Õhtul {number} läks šaakal kõndima, pilet maksis 5 € – „tasuta” ei saanud." for number in range(6)
]
RUSSIAN = "".join(f"Однажды жил король номер {number}, у него было три дочери.\n" for number in range(40))
OTHERS = {
    "Cyrillic": RUSSIAN,
    "Devanagari": "एक समय की बात है एक राजा था जिसकी तीन बेटियाँ थीं।\n" * 40,
    "Thai": "กาลครั้งหนึ่งมีพระราชาองค์หนึ่งมีธิดาสามองค์\n" * 40,
    "Hebrew": "היה פעם מלך שהיו לו שלוש בנות.\n" * 40,
    "Japanese": "むかしむかし、あるところに王様がいました。娘が三人いました。\n" * 40,
}


def put(name: str, content: bytes | str) -> Callable[[Path], None]:
    content = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(content)


def lines(encoding: str = "utf-8", name: str = "a.txt") -> Callable[[Path], list[str]]:
    """Reads as Python does: text in an encoding, with universal line ends."""
    return lambda folder: [
        line for line in (folder / name).read_text(encoding=encoding).split("\n") if line.strip()
    ]


def paragraphs(encoding: str = "utf-8") -> Callable[[Path], list[str]]:
    def read(folder: Path) -> list[str]:
        found, one = [], []
        for line in [*(folder / "a.txt").read_text(encoding=encoding).split("\n"), ""]:
            if line.strip():
                one.append(line)
            elif one:
                found, one = [*found, "\n".join(one)], []
        return found

    return read


def page(label: str, encoding: str, body: str = "") -> tuple[Callable, Callable]:
    """A page with a label, in bytes of an encoding; what a browser shows."""
    body = body or " ".join(ESTONIAN[:2])
    content = f'<html><head><meta charset="{label}"></head><body><p>{body}</p></body></html>'.encode(encoding)
    return put("a.html", content), lambda folder: [body]


def fields(*texts: str) -> Callable[[Path], list[str]]:
    return lambda folder: list(texts)


def long_window(folder: Path) -> None:
    content = "".join(json.dumps({"text": line}) + "\n" for line in ESTONIAN).encode()
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    with open(folder / "a.jsonl.zst", "wb") as file, compressor.stream_writer(file) as stream:
        stream.write(content)


def ten_files(folder: Path) -> None:
    for number in range(9):
        (folder / f"{number}.txt").write_text("\n".join(ESTONIAN))
    (folder / "9.txt").write_bytes(RUSSIAN.encode("utf-16-le"))


TEXT = "\n".join(ESTONIAN) + "\n"
NARROW = TEXT.replace("€ ", "").replace("„", '"').replace("”", '"').replace("–", "-")
RECORD = json.dumps({"text": ESTONIAN[0]}, ensure_ascii=False)[:-1]
CLEAN, BALTIC = {"clean": True}, {"encoding": "windows-1257"}
OF_ALL = {
    "max_foreign_character_share": 1,
    "min_line_characters": 0, "min_document_characters": 0, "line_language_threshold": 0,
    "document_language_threshold": 0, "deduplicate_lines": False,
}  # fmt: skip
HTML = {"keys": CLEAN, "corpus": OF_ALL}
KINDS: dict[str, Kind] = {
    **{
        f"a page of {encoding} that says {label}": Kind(*page(label, encoding, body), **HTML)
        for label, encoding, body in (
            ("iso-8859-1", "cp1252", ""), ("latin1", "cp1252", ""), ("us-ascii", "cp1252", ""),
            ("windows-1257", "utf-8", ""), ("iso-8859-1", "utf-8", ""), ("utf-16", "utf-8", ""),
            ("gb2312", "gb18030", "从前有一个国王，他有三个女儿。𠮷"),
            ("shift_jis", "cp932", "むかし①王様がいました"),
            ("iso-8859-9", "cp1254", "“İstanbul” – bir kent"),
            ("euc-kr", "cp949", "옛날 옛적에 뷁 왕이 있었습니다"),
        )
    },
    "a page that says utf-8 and is not": Kind(
        put("a.html", '<meta charset="utf-8"><p>Õhtu</p>'.encode("latin-1")), None,
        refusal=("invalid UTF-8", "encoding"), **HTML,
    ),
    "letters of windows-1252 that were taken for Latin-1": Kind(
        put("a.txt", TEXT.encode("cp1252").decode("latin-1")), lambda folder: ESTONIAN, **HTML,
        said=("30 controls U+0080 to U+009F in 6 documents",),
    ),
    "the same letters in text that nobody cleans": Kind(
        put("a.txt", TEXT.encode("cp1252").decode("latin-1")), lines(),
        said=("30 controls U+0080 to U+009F in 6 documents stay",),
    ),
    "the same letters in code": Kind(
        put("a.py", TEXT.encode("cp1252").decode("latin-1")),
        lambda folder: [(folder / "a.py").read_text(encoding="utf-8")],
        keys={"kind": "code", "clean": True}, said=("30 controls U+0080 to U+009F in 1 documents stay",),
    ),
    "line ends of old Macs": Kind(put("a.txt", TEXT.replace("\n", "\r")), lines()),
    "line ends of all kinds": Kind(put("a.txt", "Üks.\rKaks.\r\nKolm.\n\rNeli.\n"), lines()),
    "paragraphs of old Macs": Kind(
        put("a.txt", "Üks\rkaks\r\rkolm\rneli\r"), paragraphs(), keys={"documents": "paragraphs"}
    ),
    **{
        f"paragraphs with a line of {name} between": Kind(
            put("a.txt", f"Üks\nkaks\n{blank}\nkolm\n"), fields("Üks\nkaks", "kolm"),
            keys={"documents": "paragraphs"},
        )
        for name, blank in (("NBSP", "\u00a0"), ("ideographic space", " \u3000"), ("ZWSP", "\u200b"))
    },
    **{
        f"{encoding} with a mark": Kind(put("a.txt", "\ufeff".encode(encoding) + TEXT.encode(encoding)),
                                        fields(*ESTONIAN))
        for encoding in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-8")
    },
    **{
        f"UTF-16 without a mark, {script}": Kind(
            put("a.txt", text.encode("utf-16-be")), None,
            ("UTF-16BE text without a byte-order mark", "utf-16be"),
        )
        for script, text in OTHERS.items()
    },
    "UTF-16 without a mark, named": Kind(
        put("a.txt", RUSSIAN.encode("utf-16-le")), lines("utf-16-le"), keys={"encoding": "utf-16le"}
    ),
    "one of ten files in UTF-16": Kind(ten_files, None, ("9.txt: UTF-16LE text without a byte-order mark",)),
    "windows-1257": Kind(put("a.txt", NARROW.encode("cp1257")), lines("cp1257"), keys=BALTIC),
    "windows-1257 in JSON lines": Kind(
        put("a.jsonl", "".join(json.dumps({"text": line}, ensure_ascii=False) + "\n"
                               for line in NARROW.splitlines()).encode("cp1257")),
        fields(*NARROW.splitlines()), keys=BALTIC,
    ),
    "bytes that the named encoding lacks": Kind(
        put("a.txt", b"abc \x81\x8d\n"), None, ("invalid WINDOWS-1257 (byte 0x81",), keys=BALTIC,
    ),
    **{
        f"{name} beside a text": Kind(put("a.jsonl", f'{RECORD}, "x": {value}}}\n'), fields(ESTONIAN[0]))
        for name, value in (
            ("NaN", "NaN"), ("1e999", "1e999"), ("half of a pair of surrogates", '"\\ud800"'),
            ("five thousand brackets", "[" * 5000 + "]" * 5000),
            ("brackets and a quote", "[" * 5000 + r'"a\"]]"' + "]" * 5000),
        )
    },
    "a text with half of a pair of surrogates": Kind(
        put("a.jsonl", '{"text": "\\ud800 a"}\n' + RECORD + "}\n"), fields(ESTONIAN[0]),
        corpus={"max_bad_share": 0.6}, reasons={"no text in the field": 1},
    ),
    "zstd --long=31": Kind(long_window, fields(*ESTONIAN)),
    "a mark after what is taken away": Kind(
        put("a.txt", "Ta tu\u00adle\u00ad\u0301 koju ja la\u200b\u0308ks magama.\n"),
        fields(unicodedata.normalize("NFC", "Ta tule\u0301 koju ja la\u0308ks magama.")), **HTML,
    ),
    **{
        f"a page with a <{tag}> that has no end": Kind(
            put("a.html", f"<body><p>Esimene lõik.</p><{tag}>x<p>Teine lõik.</p><p>Kolmas lõik.</p></body>"),
            lambda folder, tag=tag: ["Esimene lõik.\n" + "x\n" * (tag in ("nav", "pre"))
                                     + "Teine lõik.\nKolmas lõik."], **HTML,
        )
        for tag in ("code", "button", "nav", "pre")
    },
    "a page that is cut off in a script": Kind(
        put("a.html", "<body><script>var a;</script><p>Lõik.</p><nav>Avaleht</nav><script>var b = '"),
        fields("Lõik."), **HTML,
    ),
    "one of two <nav> has no end": Kind(
        put("a.html", "<body><nav>Avaleht</nav><p>Esimene.</p><nav>x<p>Teine.</p></body>"),
        fields("Esimene.\nx\nTeine."), **HTML,
    ),
    "a mark of UTF-8, and another encoding named": Kind(
        put("a.txt", "\ufeff" + TEXT), fields(*ESTONIAN), keys=BALTIC
    ),
    "code of old Macs": Kind(
        put("a.py", "x = 1  # " + "\r".join(f"y{number} = {number} + x" for number in range(200))),
        lambda folder: [(folder / "a.py").read_bytes().decode()], keys={"kind": "code", "clean": True},
    ),
    "code in UTF-16 without a mark": Kind(
        put("a.py", ("x = 1\n" * 99).encode("utf-16-le")), None, ("UTF-16LE text without a byte-order mark",),
        keys={"kind": "code"},
    ),
    "words in <code> and <button> of a sentence": Kind(
        put("a.html", "<body><p>Vajuta <button>Salvesta</button> või kirjuta <code>ls</code> käsureale.</p>"
                      "<p><code>rm -r x</code></p><p><button>Sulge</button></p></body>"),
        fields("Vajuta Salvesta või kirjuta ls käsureale."), **HTML,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_each_document_is_there_or_counted_or_refused(name: str, tmp_path: Path) -> None:
    check(KINDS[name], tmp_path)


def test_the_reader_here_has_universal_line_ends() -> None:
    assert io.TextIOWrapper(io.BytesIO(b"a\rb\r\nc\n"), encoding="utf-8").read() == "a\nb\nc\n"


# The standard's labels; "replacement" is for pages that browsers do not show.
LABELS = [label for label, name in webencodings.labels.LABELS.items() if name != "replacement"]
LETTERS = {"gbk": "国", "gb18030": "国", "big5": "國", "euc-jp": "国", "iso-2022-jp": "国", "shift_jis": "国",
           "euc-kr": "국"}  # fmt: skip


def test_labels_mean_what_the_standard_says() -> None:
    """Each byte of one-byte encodings, and a letter of the others, as webencodings reads it."""
    assert len(LABELS) > 200
    for label in LABELS:
        head = f'<meta charset="{label}"><p>'.encode()
        known = webencodings.lookup("windows-1252" if label == "x-user-defined" else label)
        if known.name.startswith("utf-"):  # a label that was found byte by byte is not UTF-16
            assert decode_page(Path("a"), head + "Õhtu".encode()).endswith("Õhtu"), label
            continue
        letter = LETTERS.get(known.name, "")
        page = head + known.codec_info.encode(letter)[0]
        assert decode_page(Path("a"), page).endswith(f"<p>{letter}"), label
        for byte in range(0x80, 0x100):
            content = head + bytes([byte]) + b" x"
            try:
                expected = known.codec_info.decode(content)[0]
            except UnicodeDecodeError:
                continue
            assert decode_page(Path("a"), content) == expected, (label, hex(byte))


# RFC 1843's example, and words as RFC 1557 and RFC 1922 have them.
SEVEN_BITS = {
    "hz-gb-2312": (b"~{<:Ky2;S{#,NpJ)l6HK!#~}", "己所不欲，勿施於人。"),
    "iso-2022-kr": (b"\x1b$)C\x0eGQ19\x0f", "한국"),
    "csiso2022kr": (b"\x1b$)C\x0eGQ19\x0f", "한국"),
    "iso-2022-cn": (b"\x1b$)A\x0e=;;;\x0f", None),
    "iso-2022-cn-ext": (b"\x1b$)A\x0e=;;;\x0f", None),
    "x-iso-2022-cn-gb": (b"\x1b$)A\x0e=;;;\x0f", None),
    "replacement": (b"abc", None),
}


def test_a_page_in_seven_bits_is_decoded_or_bad() -> None:
    """The labels are the standard's of "replacement", and Java's of a page with escapes."""
    assert set(webencodings.labels.LABELS) - set(LABELS) < SEVEN_BITS.keys()
    for label, (body, text) in SEVEN_BITS.items():
        head = f'<meta charset="{label}"><p>'.encode()
        for page, told in ((head + body, ""), (b"<p>" + body, "" if label.startswith("x-") else label)):
            if text is not None:
                assert decode_page(Path("a"), page, label=told).endswith(f"<p>{text}"), label
            elif told or page.startswith(b"<meta"):
                with pytest.raises(BadRecord, match=f"unknown charset '{label}'"):
                    decode_page(Path("a"), page, label=told)


@pytest.mark.parametrize("told", ["utf-8\0", "\0", "klingon", "\udcff"])
def test_a_page_of_a_server_that_tells_no_charset_is_read_by_its_own_label(told: str) -> None:
    page = '<meta charset="windows-1257"><p>Õhtu'.encode("cp1257")
    assert decode_page(Path("a"), page, label=told).endswith("<p>Õhtu")
