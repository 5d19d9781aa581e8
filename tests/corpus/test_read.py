"""Every format gives the same documents, and bad input is named by file and line."""

import gzip
import io
import json
import re

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from kielo.corpus.corpus_parts import Part, PartLimits
from kielo.corpus.fetch import fetch_sources
from kielo.corpus.html_text import page_text
from kielo.corpus.pipeline import ReadPart
from kielo.recipe.sections import Corpus, Recipe, Source
from tests.corpus.counted import counted, tally
from tests.corpus.texts import ESTONIAN


def _reader(source, tmp_path):
    recipe = Recipe(name="t", language="et", corpus=Corpus(sources=[source]))
    (raw,) = fetch_sources(recipe, tmp_path / "raw", print)
    return ReadPart(raw, Part(0, raw.files), 1_000_000, limits=PartLimits(max_records=raw.max_documents))


def _read(source, tmp_path):
    return list(_reader(source, tmp_path).run())


def _parquet(columns):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def _write_all_formats(folder):
    jsonl = "".join(json.dumps({"body": line}, ensure_ascii=False) + "\n" for line in ESTONIAN).encode()
    (folder / "a.txt").write_text("\n".join(ESTONIAN) + "\n\n", encoding="utf-8")
    (folder / "a.txt.gz").write_bytes(gzip.compress("\r\n".join(ESTONIAN).encode()))
    (folder / "a.jsonl").write_bytes(jsonl)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(jsonl))
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(jsonl))
    pyarrow.parquet.write_table(pyarrow.table({"n": range(8), "body": ESTONIAN}), folder / "a.parquet")
    (folder / "pages").mkdir()
    for number, line in enumerate(ESTONIAN):
        page = f"<html><head><title>t</title></head><body><p>{line}</p></body></html>"
        (folder / "pages" / f"{number}.html").write_text(page, encoding="utf-8")


def test_every_format_gives_the_same_documents_to_any_number_of_workers(tmp_path):
    """Text, JSON lines, Parquet, pages: the same lines; workers share them without loss, gap or overlap."""
    _write_all_formats(tmp_path)
    names = (
        "a.txt",
        "a.txt.gz",
        "a.jsonl",
        "a.jsonl.gz",
        "a.jsonl.zst",
        "a.parquet",
        "pages",
        "pages/*.html",
    )
    for name in names:
        source = Source(name="a", path=str(tmp_path / name), text_field="body")
        documents = _read(source, tmp_path)
        assert [document.lines for document in documents] == [[line] for line in ESTONIAN], name
        assert len({document.id for document in documents}) == len(ESTONIAN)
        few = _read(source.model_copy(update={"max_documents": 2}), tmp_path)
        assert few == documents[:2], name


def test_article_of_a_page(tmp_path):
    """The marked article alone, a line a block, without code, scripts, buttons; inline tags cut no words."""
    page = """<html><head><style>p {}</style><script>var a = "<p>x</p>";</script></head><body><nav>Menu</nav>
      <h1>Outside</h1><div id="DisplayArea"><h2>Pealkiri</h2><p>Esimene <b>lõi</b>k
      siin &amp; seal.<br>Teine</p><div>Sees<pre>code</pre></div><ul><li>üks<li>kaks</ul>
      <button>Copy</button></div>
      <p>After</p></body></html>"""
    assert page_text(page).split("\n") == [
        "Pealkiri",
        "Esimene lõik siin & seal.",
        "Teine",
        "Sees",
        "üks",
        "kaks",
    ]
    assert page_text("<body><p>Ainult<p>keha") == "Ainult\nkeha"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.txt", b"hea\n\nhalb \xf5\n", r"bad\.txt, line 3: invalid UTF-8 \(byte 0xf5"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": "\xf5"}\n', r"bad\.jsonl, line 2: invalid UTF-8"),
        (
            "bad.jsonl",
            b'{"text": "a"}\n{"tekst": "b"}\n',
            r"bad\.jsonl, line 2: no text in the field 'text'.*tekst",
        ),
        ("bad.jsonl", b'{"text": "a"\n', r"bad\.jsonl, line 1: not valid JSON"),
        ("bad.jsonl.zst", zstandard.compress(b'{"text": "a"}\n' * 9)[:-3], r"bad\.jsonl\.zst: cut short"),
        ("bad.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 9, mtime=0)[:-3], r"bad\.jsonl\.gz: cut short"),
        ("bad.parquet", b"PAR1 and no more", r"bad\.parquet: damaged"),
        (
            "bad.parquet",
            _parquet({"content": ["a"]}),
            r"bad\.parquet: no column 'text' .its columns are content",
        ),
        ("bad.html", b"<body>\n<p>\xf5</body>", r"bad\.html, line 2: invalid UTF-8"),
    ],
)
def test_bad_input_is_passed_over_and_named(tmp_path, name, content, message):
    """It is counted, with file, and line where there is one; what is good in the same file is read."""
    (tmp_path / name).write_bytes(content)
    reader = _reader(Source(name="a", path=str(tmp_path / name)), tmp_path)
    documents = list(reader.run())
    (example,) = tally(reader).first_examples("a", "bad", 5)
    assert re.match(message, example), example
    counts = counted(reader, "a")
    assert counts["bad/"] == 1 and counts.get("documents_left/", 0) == len(documents)
