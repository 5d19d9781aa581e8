"""Records of translation memories, tables and tab-separated values that are odd but real."""

import base64
import csv
import json
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.border.source_variants import Kind, check

PAIRS = {
    "kind": "parallel",
    "language": ["en", "et"],
    "templates": ["{source} = {target}"],
    "reverse_share": 0.0,
}
UNEQUAL, RAGGED = "a pair without one of its sides", "another number of columns than other rows"
ENGLISH, ESTONIAN = "The house is small", "Maja on väike ja šokk on suur"
TMX14 = "http://www.lisa.org/tmx14"


def tmx(
    units: str, encoding: str = "utf-8", declared: str | None = None, begin: str = "", prefix: str = ""
) -> Callable[[Path], Any]:
    """Writes a translation memory; `prefix` with its namespace stands before each name."""
    t = prefix + ":" if prefix else ""
    namespace = f' xmlns:{prefix}="{TMX14}"' if prefix else begin and f' xmlns="{TMX14}"' * ("<" not in begin)
    text = (
        f'<?xml version="1.0" encoding="{declared or encoding}"?>\n{begin if "<" in begin else ""}'
        f'<{t}tmx version="1.4"{namespace}><{t}header srclang="en" segtype="sentence"/>\n<{t}body>\n'
        f"{units}\n</{t}body></{t}tmx>\n"
    )
    return lambda folder: (folder / "m.tmx").write_bytes(text.encode(encoding))


def unit(english: str, *estonian: str, prefix: str = "", key: str = "xml:lang") -> str:
    t = prefix + ":" if prefix else ""
    variants = [("en", english), *(("et", text) for text in estonian)]
    return (
        f"<{t}tu><{t}note>not text</{t}note>"
        + "".join(f'<{t}tuv {key}="{code}"><{t}seg>{text}</{t}seg></{t}tuv>' for code, text in variants)
        + f"</{t}tu>\n"
    )


def whole_tmx(folder: Path) -> list[str]:
    """Reads the whole file: each segment is its text without the codes of TMX 1.4b, pairs by their places."""
    root = xml.etree.ElementTree.parse(folder / "m.tmx").getroot()
    for element in root.iter():
        element.tag = element.tag.split("}")[-1]

    def text(element: Any) -> str:
        inner = "" if element.tag in ("bpt", "ept", "ph", "it", "ut", "sub") else element.text or ""
        if element.tag == "ph" and element.get("type") == "lb":
            inner = " "
        elif element.tag not in ("bpt", "ept", "ph", "it", "ut", "sub"):
            inner += "".join(text(child) + (child.tail or "") for child in element)
        return inner

    found = []
    for one in root.iter("tu"):
        sides: dict[str, list[str]] = {"en": [], "et": []}
        for variant in one.iter("tuv"):
            code = variant.get("{http://www.w3.org/XML/1998/namespace}lang") or variant.get("lang")
            sides[code].append(text(variant.find("seg")))
        found += [f"{sides['en'][0]} = {estonian}" for estonian in sides["et"]]
    return found


CODES = unit(
    'Press <bpt i="1" type="bold">&lt;b&gt;</bpt>OK<ept i="1">&lt;/b&gt;</ept> now<ph type="fnote">'
    "{\\footnote <sub>see the manual</sub>}</ph>",
    "Vajuta <bpt i='1'>&lt;b&gt;</bpt>OK<ept i='1'>&lt;/b&gt;</ept> "
    "<hi type='bold'>kohe <ph>x</ph>praegu</hi>",
) + unit("<it pos='begin'>&lt;i&gt;</it>One<ut>{\\b</ut>", "Üks<ph type='lb'>&lt;br/&gt;</ph>rida")
PLAIN_UNITS = "".join(unit(f"{ENGLISH} {n}", f"{ESTONIAN} {n}") for n in range(5))
DTD = (
    '<!DOCTYPE tmx SYSTEM "tmx14.dtd" [<!ENTITY firm "Firma &#38;#38; Co"><!ELEMENT tmx ANY>]>\n'
    "<!-- a comment -->\n"
    "<?a program?>\n"
)


def table(**columns: Any) -> Callable[[Path], Any]:
    return lambda folder: pyarrow.parquet.write_table(pyarrow.table(columns), folder / "t.parquet")


def declared_as(kind: Any, values: list[Any], column: str = "text") -> Callable[[Path], Any]:
    """Writes a table whose metadata names another type than Parquet's, as polars does."""

    def write(folder: Path) -> None:
        schema = pyarrow.schema([(column, kind)])
        made = pyarrow.table({column: pyarrow.array(values)})
        with pyarrow.parquet.ParquetWriter(folder / "t.parquet", made.schema, store_schema=False) as writer:
            writer.write_table(made)
            content = base64.b64encode(schema.serialize().to_pybytes()).decode()
            writer.add_key_value_metadata({"ARROW:schema": content})

    return write


def rows_of(name: str) -> Callable[[Path], list[str]]:
    """Reads a column, or a field in it, row by row with pyarrow."""

    def read(folder: Path) -> list[str]:
        found = []
        for row in pyarrow.parquet.read_table(folder / "t.parquet").to_pylist():
            value: Any = row
            for part in [name] if name in row else name.split("."):
                value = value[part]
            found.append(value.decode() if isinstance(value, bytes) else value)
        return found

    return read


def lines(name: str, *written: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text("".join(line + "\n" for line in written), "utf-8")


def with_csv(rows: list[list[str]], **options: Any) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        with open(folder / "p.tsv", "w", encoding="utf-8", newline="") as file:
            csv.writer(file, csv.excel_tab, lineterminator="\n", **options).writerows(rows)

    return write


def by_csv(folder: Path) -> list[str]:
    with open(folder / "p.tsv", encoding="utf-8", newline="") as file:
        return [" = ".join(row[:2]) for row in csv.reader(file, csv.excel_tab)]


def by_tabs(*left_out: int) -> Callable[[Path], list[str]]:
    """Reads each line by its tabs, without the lines of these numbers."""

    def read(folder: Path) -> list[str]:
        found = (folder / "p.tsv").read_text("utf-8").split("\n")[:-1]
        return [" = ".join(line.split("\t")[:2]) for n, line in enumerate(found, 1) if n not in left_out]

    return read


ROWS = [[f"Sentence {n}", f"Lause {n}", "ok"] for n in range(30)]
QUOTED = [
    *ROWS[:20],
    ["With a\ttab", "Taaniga", "x"],
    ["Two\nlines", "Kaks\nrida", "x"],
    ['Say "hi"', 'Ütle "tere"', "x"],
    ["Last", "Viimane\nrida", ""],
]
PLAIN = [
    '"Hello," he said.\t"Tere," ütles ta.',
    '"It begins\tSee algab',
    'and ends."\tja lõpeb."',
    'a 5" pipe\t5" toru',
    '"Whole."\t"Terve."',
    *(f"Sentence {n}\tLause {n}" for n in range(40)),
]
CHATS = [
    [{"role": "user", "content": f"Küsimus {n}"}, {"role": "assistant", "content": "jah " * 99}]
    for n in range(40)
]
TURN = pyarrow.struct([("role", pyarrow.string_view()), ("content", pyarrow.string_view())])


def contents(folder: Path) -> list[str]:
    found = pyarrow.parquet.read_table(folder / "t.parquet").to_pylist()
    return ["\n".join(turn["content"] for turn in row["messages"]) for row in found]


KINDS = {
    "inline codes": Kind(tmx(CODES), whole_tmx, keys=PAIRS),
    "default namespace": Kind(tmx(PLAIN_UNITS, begin="default"), whole_tmx, keys=PAIRS),
    "prefixed namespace": Kind(
        tmx(unit("A <t:ph>x</t:ph>b", "C d", prefix="t"), prefix="t"), whole_tmx, keys=PAIRS
    ),
    "DTD, entities, comments": Kind(
        tmx(unit("&firm; &#8212; &amp;", "A<!-- x -->b<![CDATA[<c>]]>"), begin=DTD), whole_tmx, keys=PAIRS
    ),
    "UTF-16 with a mark": Kind(tmx(PLAIN_UNITS, "utf-16"), whole_tmx, keys=PAIRS),
    "windows-1252": Kind(tmx(PLAIN_UNITS, "windows-1252"), whole_tmx, keys=PAIRS),
    "windows-1252 called Latin-1": Kind(
        tmx(unit("Five €", "šokk – “hea”"), "cp1252", "iso-8859-1"),
        lambda folder: ["Five € = šokk – “hea”"],
        keys=PAIRS,
    ),
    "UTF-16 without a mark": Kind(
        tmx(PLAIN_UNITS, "utf-16-le", "utf-16"),
        lambda folder: [f"{ENGLISH} {n} = {ESTONIAN} {n}" for n in range(5)],
        keys=PAIRS,
    ),
    "UTF-8 called UTF-16 (converted)": Kind(
        tmx(PLAIN_UNITS, "utf-8", "utf-16"),
        lambda folder: [f"{ENGLISH} {n} = {ESTONIAN} {n}" for n in range(5)],
        keys=PAIRS,
    ),
    "Shift JIS": Kind(
        tmx(unit("House", "家です"), "shift_jis"), lambda folder: ["House = 家です"], keys=PAIRS
    ),
    "bytes that are not in the encoding": Kind(
        lambda folder: tmx(unit("House", "väike"), "cp1252", "utf-8")(folder),
        None,
        ("m.tmx", "invalid utf-8 (byte 0xe4)", "correct the encoding"),
        PAIRS,
    ),
    "unknown encoding": Kind(
        tmx(PLAIN_UNITS, "utf-8", "klingon"), None, ("unknown encoding 'klingon'",), PAIRS
    ),
    "several texts in a language": Kind(
        tmx(unit("House", "Maja", "Hoone", "Elamu") + PLAIN_UNITS), whole_tmx, keys=PAIRS
    ),
    "lang without xml:": Kind(tmx(unit("House", "Maja", key="lang")), whole_tmx, keys=PAIRS),
    "all units in one line": Kind(
        tmx("".join(unit(f"House {n}", f"Maja {n}").strip() for n in range(3000))),
        whole_tmx,
        keys=PAIRS,
        corpus={"max_document_bytes": 10_000},
    ),
    "string_view": Kind(
        table(text=pyarrow.array(["üks", "kaks " * 99], pyarrow.string_view())), rows_of("text")
    ),
    "string_view that only the metadata names": Kind(
        declared_as(pyarrow.string_view(), ["üks", "kaks"]), rows_of("text")
    ),
    "binary_view": Kind(
        table(text=pyarrow.array([b"\xc3\xbcks", b"kaks"], pyarrow.binary_view())), rows_of("text")
    ),
    "bytes": Kind(table(text=[b"\xc3\xbcks", b"kaks"]), rows_of("text")),
    "bytes that are not UTF-8": Kind(
        table(text=[b"\xfcks", *(b"%d" % n for n in range(200))]),
        lambda folder: [str(n) for n in range(200)],
        reasons={"not UTF-8": 1},
    ),
    "large bytes": Kind(table(text=pyarrow.array([b"a", b"b"], pyarrow.large_binary())), rows_of("text")),
    "dictionary": Kind(table(text=pyarrow.array(["a", "b"]).dictionary_encode()), rows_of("text")),
    "text called JSON": Kind(table(text=pyarrow.array(['"a"', '"b"'], pyarrow.json_())), rows_of("text")),
    "null cells": Kind(table(text=["a", None, "b"]), lambda folder: ["a", "b"], reasons={"empty": 1}),
    "no rows": Kind(
        lambda folder: (
            table(text=pyarrow.array([], pyarrow.string()))(folder),
            lines("a.txt", "üks")(folder),
        ),
        lambda folder: ["üks"],
    ),
    "two columns of one name": Kind(
        lambda folder: pyarrow.parquet.write_table(
            pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["text", "text"]),
            folder / "t.parquet",
        ),
        None,
        ("t.parquet: 2 columns have the name 'text'",),
    ),
    "another column twice": Kind(
        lambda folder: pyarrow.parquet.write_table(
            pyarrow.Table.from_arrays([pyarrow.array([one]) for one in "abc"], ["text", "x", "x"]),
            folder / "t.parquet",
        ),
        lambda folder: ["a"],
    ),
    "a missing column": Kind(table(body=["a"]), None, ("no column 'text'", "body", "text_field")),
    "an empty file": Kind(lambda folder: (folder / "t.parquet").touch(), None, ("t.parquet", "not Parquet")),
    "a field of a struct": Kind(
        table(page=[{"text": "üks"}, {"text": "kaks"}]),
        rows_of("page.text"),
        keys={"text_field": "page.text"},
    ),
    "a field of a struct that is null": Kind(
        table(page=[{"text": "üks"}, None, {"text": None}]),
        lambda folder: ["üks"],
        keys={"text_field": "page.text"},
        reasons={"empty": 2},
    ),
    "a missing field of a struct": Kind(
        table(page=[{"text": "üks"}]), None, ("no column 'page.body'", "page"), {"text_field": "page.body"}
    ),
    "a column with a dot, beside a struct": Kind(
        table(page=[{"text": "no"}], **{"page.text": ["yes"]}),
        lambda folder: ["yes"],
        keys={"text_field": "page.text"},
    ),
    "a nested field of JSON": Kind(
        lines("t.jsonl", *(json.dumps({"page": {"parts": {"text": f"n {n}"}}}) for n in range(3))),
        lambda folder: [
            json.loads(line)["page"]["parts"]["text"]
            for line in (folder / "t.jsonl").read_text().splitlines()
        ],
        keys={"text_field": "page.parts.text"},
    ),
    "a JSON field with a dot, beside an object": Kind(
        lines("t.jsonl", '{"a": {"b": "no"}, "a.b": "yes"}'),
        lambda folder: ["yes"],
        keys={"text_field": "a.b"},
    ),
    "a nested field of code": Kind(
        lines("t.jsonl", '{"file": {"content": "x = 1\\n", "path": "a.py"}}'),
        lambda folder: ["x = 1\n"],
        keys={"kind": "code", "text_field": "file.content"},
    ),
    "pairs in columns with dots": Kind(
        table(**{"t.en": ["a", "b"], "t.et": ["c", "d"]}),
        lambda folder: ["a = c", "b = d"],
        keys=PAIRS | {"pair_fields": ["t.en", "t.et"]},
    ),
    "conversations as views, many in a batch": Kind(
        declared_as(pyarrow.list_(TURN), CHATS, "messages"),
        contents,
        keys={"kind": "instructions"},
        corpus={"max_document_bytes": 1000},
    ),
    "conversations as list_view": Kind(
        table(
            messages=pyarrow.array(
                CHATS,
                pyarrow.list_view(
                    pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
                ),
            )
        ),
        contents,
        keys={"kind": "instructions"},
    ),
    "conversations in a struct": Kind(
        table(data=[{"messages": chat} for chat in CHATS]),
        lambda folder: [
            "\n".join(turn["content"] for turn in row["data"]["messages"])
            for row in pyarrow.parquet.read_table(folder / "t.parquet").to_pylist()
        ],
        keys={"kind": "instructions", "text_field": "data.messages"},
    ),
    "quotes of CSV": Kind(with_csv(QUOTED), by_csv, keys=PAIRS),
    "quotes of CSV around everything": Kind(with_csv(ROWS, quoting=csv.QUOTE_ALL), by_csv, keys=PAIRS),
    "quotes of CSV within quotes alone": Kind(
        with_csv([*ROWS, ['"Hi," he said', 'Ta ütles: "tere"', "x"]]), by_csv, keys=PAIRS
    ),
    "plain quotes": Kind(lines("p.tsv", *PLAIN), by_tabs(), keys=PAIRS),
    "plain quotes and a tab within a sentence": Kind(
        lines("p.tsv", *PLAIN, "a\tb\tc"),
        by_tabs(46),
        keys=PAIRS,
        reasons={RAGGED: 1},
        corpus={"max_bad_share": 0.1},
    ),
    "quotes of both kinds": Kind(
        lines(
            "p.tsv",
            *PLAIN,
            '"With a\ttab"\tTaaniga',
            '"Two',
            'lines"\tKaks rida',
            "x\ty",
            'Kaks\t"Two',
            'lines"',
        ),
        by_tabs(46, 47, 48, 50, 51),
        keys=PAIRS,
        corpus={"max_bad_share": 0.2},
        reasons={RAGGED: 5},
    ),
    "a third of the rows shifted": Kind(
        lines("p.tsv", *PLAIN, *['"a\tb"\tc'] * 30),
        None,
        ("p.tsv, line 46: 3 columns beside rows of 2",),
        PAIRS,
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_each_record_is_read_or_counted(name, tmp_path):
    check(KINDS[name], tmp_path)
