"""Odd but real folders of text: formats, covers and what lies beside the data."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from kielo.corpus.fetch import local_files
from kielo.recipe.sections import Source
from tests.border.source_variants import Kind, check

TEXTS = [f"Jutt number {number}, mille pikkus on siin ükskõik." for number in range(30)]
ROWS = [{"text": text, "n": number} for number, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
COVERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".zst": zstandard.compress, ".zstd": zstandard.compress, ".xz": lzma.compress,
    ".bz2": bz2.compress,
}  # fmt: skip


def put(**files: str | bytes) -> Callable[[Path], None]:
    """name__suffix → content; two underscores are a dot."""

    def write(folder: Path) -> None:
        for name, content in files.items():
            path = folder / name.replace("__", ".")
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def texts(*wanted: str) -> Callable[[Path], list[str]]:
    return lambda folder: list(wanted or TEXTS)


def every_format(folder: Path) -> None:
    """Thirty documents, five in each of six files."""
    parts = [LINES.splitlines(keepends=True)[first : first + 5] for first in range(0, 30, 5)]
    (folder / "a.jsonl").write_text("".join(parts[0]))
    (folder / "b.json.gz").write_bytes(
        gzip.compress(json.dumps([json.loads(one) for one in parts[1]]).encode())
    )
    (folder / "c.jsonl.zstd").write_bytes(zstandard.compress("".join(parts[2]).encode()))
    (folder / "d.ndjson").write_text("".join(parts[3]))
    (folder / "e.txt.xz").write_bytes(lzma.compress("\n".join(TEXTS[20:25]).encode()))
    rows = [json.loads(one) for one in parts[5]]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "f.parquet")


LONG = [{"text": f"{number} " + "sõna " * 4000} for number in range(60)]
BESIDE = {
    "README__md": "x", "LICENSE": "x", "README__txt": "x", "a__jsonl__md5": "x", "_x": "x", "run__sh": "x",
}  # fmt: skip
KINDS: dict[str, Kind] = {
    "every format at once": Kind(every_format, texts()),
    **{
        f".jsonl{suffix}": Kind(put(**{f"a__jsonl__{suffix[1:]}": cover(LINES.encode())}), texts())
        for suffix, cover in COVERS.items()
    },
    **{
        f".txt{suffix}": Kind(put(**{f"a__txt__{suffix[1:]}": cover("\n".join(TEXTS).encode())}), texts())
        for suffix, cover in COVERS.items()
    },
    "an array in one line": Kind(put(a__json=json.dumps(ROWS)), texts()),
    "an array on many lines": Kind(put(a__json=json.dumps(ROWS, indent=4, ensure_ascii=False)), texts()),
    "an array larger than a block": Kind(
        put(a__json=json.dumps(LONG, ensure_ascii=False)), texts(*(one["text"] for one in LONG))
    ),
    "objects one after the other": Kind(
        put(a__json="\n".join(json.dumps(row, indent=1) for row in ROWS)), texts()
    ),
    "JSON lines that are called .json": Kind(put(a__json=LINES), texts()),
    "an array with a mark": Kind(put(a__json="\ufeff" + json.dumps(ROWS)), texts()),
    "an array that is cut short": Kind(
        put(a__json=json.dumps(ROWS)[:-40]), None, ("a.json, after element 29", "cut short")
    ),
    "what lies beside data": Kind(put(a__jsonl=LINES, **BESIDE), texts(),
        said=("1 files read, 6 not read (LICENSE, README.md, README.txt, _x, a.jsonl.md5, and 1 more)",),
    ),
    **{
        f"a file .{suffix.replace('__', '.')} beside": Kind(
            put(a__jsonl=LINES, **{f"b__{suffix}": "x"}), None,
            ("1 files that look like data would not be read", f"b.{suffix.replace('__', '.')}", "leave_out"),
        )
        for suffix in ("csv", "pdf", "arrow", "tsv__gz", "jsonl__lz4", "zip", "docx")
    },
    "a file that the recipe leaves out": Kind(
        put(a__jsonl=LINES, b__csv="x", c__jsonl="no JSON"), texts(), keys={"leave_out": ["*.csv", "c.*"]},
        said=("1 files read, 2 not read (b.csv, c.jsonl)",),
    ),
    **{
        f"a cut .{name}": Kind(
            put(**{f"a__jsonl__{name}": COVERS[f".{name}"](LINES.encode())[:-20]}), None,
            (f"a.jsonl.{name}: cut short",),
        )
        for name in ("xz", "bz2", "gz", "zst")
    },
    "what is no .bz2": Kind(put(a__jsonl__bz2=LINES), None, ("a.jsonl.bz2: damaged or not bzip2",)),
    "what is no .xz": Kind(put(a__jsonl__xz=LINES), None, ("a.jsonl.xz: damaged or not xz",)),
    "an empty file beside": Kind(put(a__jsonl=LINES, b__jsonl=b""), texts()),
}  # fmt: skip
ARTICLES = [
    "Moskva (vene keeles Москва) on Venemaa pealinn ja suurim linn, kus elab palju inimesi.",
    "Nurga suurust tähistatakse sageli kreeka tähega α ja mõõdetakse kraadides või radiaanides.",
]
RUSSIAN = "Это предложение написано по-русски и должно быть выброшено из эстонского текста."
OF_ALL = {"line_language_threshold": 0, "document_language_threshold": 0, "min_document_characters": 0}
SCRIPTS = Kind(
    put(a__txt="\n".join([*ARTICLES, RUSSIAN])), texts(*ARTICLES), keys={"clean": True}, corpus=OF_ALL,
    reasons={"letters of another script (Cyrillic)": 1},
    said=("1 lines with letters of another script dropped, e.g. Это", "2 lines with letters of another"),
)  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_each_file_is_read_or_named(name: str, tmp_path: Path) -> None:
    check(KINDS[name], tmp_path)


def test_a_name_in_another_script_is_no_reason_to_drop_a_line(tmp_path: Path) -> None:
    check(SCRIPTS, tmp_path)


def test_files_are_listed_before_anything_is_cleaned(tmp_path: Path) -> None:
    put(a__jsonl=LINES, b__csv="x", **BESIDE)(tmp_path)
    root, read, unread = local_files(Source(name="a", path=str(tmp_path), leave_out=["*.csv"]))
    assert (root, read) == (tmp_path, ["a.jsonl"])
    assert sorted(unread) == sorted(["b.csv", *(name.replace("__", ".") for name in BESIDE)])
