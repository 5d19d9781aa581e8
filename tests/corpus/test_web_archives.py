"""Web archives: pages with address and date, every other record counted, and archives that are cut short."""

import gzip
import io
import sys

import pytest

from kielo.artifact.documents import read_documents
from kielo.artifact.stage_counts import Funnel
from kielo.artifact.stage_json import read_json
from kielo.corpus.corpus_stage import run_corpus
from kielo.corpus.web_archives import archive_records
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus, Recipe
from tests.corpus.texts import estonian_document

WARCWriter = pytest.importorskip("warcio.warcwriter").WARCWriter
pytest.importorskip("trafilatura")
DATE = "2022-01-19T04:16:00Z"


def record(kind: str, type: str, block: bytes, url: str = "") -> bytes:
    target = f"WARC-Target-URI: {url}\r\n" if url else ""
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\n{target}WARC-Date: {DATE}\r\nContent-Type: {type}\r\n"
    return f"{head}Content-Length: {len(block)}\r\n\r\n".encode() + block + b"\r\n\r\n"


def answer(url: str, body: bytes, type: str = "text/html", status: str = "200 OK", more: str = "") -> bytes:
    block = f"HTTP/1.1 {status}\r\nContent-Type: {type}\r\n{more}\r\n".encode() + body
    return record("response", "application/http; msgtype=response", block, url)


def page(number: int) -> str:
    paragraphs = "".join(f"<p>{line}</p>" for line in estonian_document(number).split("\n"))
    return f"<html><body><nav><a href='/'>Avaleht</a></nav><article>{paragraphs}</article></body></html>"


def chunked(body: bytes) -> bytes:
    packed = gzip.compress(body)
    return f"{len(packed):x}\r\n".encode() + packed + b"\r\n0\r\n\r\n"


CHUNKED = "Transfer-Encoding: chunked\r\nContent-Encoding: gzip\r\n"
RECORDS = [
    record("warcinfo", "application/warc-fields", b"software: test\r\n"),
    record("request", "application/http; msgtype=request", b"GET / HTTP/1.1\r\n\r\n", "https://a.ee/1"),
    answer("https://a.ee/1", page(1).encode()),
    answer("https://a.ee/2", page(2).encode("windows-1257"), 'text/html; charset="windows-1257"'),
    answer("https://a.ee/3", chunked(page(3).encode()), more=CHUNKED),
    answer("https://a.ee/4", estonian_document(4).encode(), "text/plain; charset=utf-8"),
    answer("https://a.ee/5", b"not found", status="404 Not Found"),
    answer("https://a.ee/6", b"\x89PNG", "image/png"),
    answer("https://a.ee/7", page(7).encode() * 100),
    answer("https://a.ee/8", b"\x00", more="Content-Encoding: br\r\n"),
    record("metadata", "application/warc-fields", b"fetchTimeMs: 4\r\n", "https://a.ee/1"),
    record("conversion", "text/plain", estonian_document(9).encode(), "https://a.ee/9"),
]  # fmt: skip


def run(tmp_path, name: str, content: bytes, **corpus):
    (tmp_path / name).write_bytes(content)
    source = {"name": "a", "path": str(tmp_path / name), "clean": False}
    section = Corpus(**{"workers": 1, "sources": [source], "max_document_bytes": 20_000} | corpus)
    recipe = Recipe(name="t", language="et", corpus=section)
    run_corpus(recipe, tmp_path / "corpus", tmp_path / "raw", progress=False)
    funnel = read_json(tmp_path / "corpus", Funnel)
    return list(read_documents(tmp_path / "corpus" / "documents")), funnel


def test_pages_become_documents_and_other_records_are_counted(tmp_path):
    documents, funnel = run(tmp_path, "a.warc.gz", b"".join(map(gzip.compress, RECORDS)), max_bad_share=0.5)
    assert [document["metadata"] for document in documents] == [
        {"file": "a.warc.gz", "number": number, "url": f"https://a.ee/{page}", "date": DATE}
        for number, page in ((3, 1), (4, 2), (5, 3), (6, 4), (12, 9))
    ]
    for document, number in zip(documents, (1, 2, 3, 4, 9)):
        assert document["text"] == estonian_document(number), number
    reasons = {row.reason: row.documents for row in funnel.steps if row.name == "read"}
    assert sum(reasons.values()) == 7 and reasons["over max_document_bytes"] == 1
    (source,) = funnel.sources
    assert (source.documents_in, source.bad_records) == (6, 1)


@pytest.mark.parametrize("is_packed", [True, False])
def test_an_archive_that_is_cut_short_is_named(tmp_path, is_packed):
    """In the middle of its last page, compressed or not: the pages before it do not pass as all of them."""
    whole = b"".join(map(gzip.compress, RECORDS[:4])) if is_packed else b"".join(RECORDS[:4])
    name = "a.warc.gz" if is_packed else "a.warc"
    with pytest.raises(KieloError, match=rf"(?s){name}.*: cut short"):
        run(tmp_path, name, whole[:-80])


def test_a_plain_archive_that_is_cut_anywhere_is_named(tmp_path):
    """In a header or a body, at each 13th byte of its last record's header, and where it ends."""
    whole, first = b"".join(RECORDS[2:4]), len(RECORDS[2])
    path, head = tmp_path / "a.warc", whole.index(b"\r\n\r\n", first) + 4
    for size in (*range(first + 1, head - 30, 13), *range(head - 4, head + 1), head + 99, len(whole) - 5):
        path.write_bytes(whole[:size])
        with pytest.raises(
            KieloError, match=r"a\.warc, record 2: cut short|after record 1: .* no web archive"
        ):
            list(archive_records(path, 20_000))
    for size in range(len(whole) - 4, len(whole) + 1):  # without a part of the line ends behind it
        path.write_bytes(whole[:size])
        assert [record.problem for record in archive_records(path, 20_000)] == [None, None]


def test_archives_of_other_writers_are_whole(tmp_path):
    """warcio's own, also compressed under a plain name; without \\r; an archive of the older ARC format."""
    path = tmp_path / "a.warc"
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=False)
        writer.write_record(writer.create_warc_record("https://a.ee/1", "resource", io.BytesIO(b"Tere"), 4))
    assert len(list(archive_records(path, 20_000))) == 1
    plain = path.read_bytes()
    path.write_bytes(gzip.compress(plain) * 3)
    assert len(list(archive_records(path, 20_000))) == 3
    path.write_bytes(plain.replace(b"\r\n", b"\n") + b"\n\n")
    assert len(list(archive_records(path, 20_000))) == 1
    block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>Tere"
    body = b"1 0 Test\nURL IP-address Archive-date Content-type Archive-length\n"
    head = b"filedesc://a.arc 0.0.0.0 20200101000000 text/plain %d\n" % len(body)
    answer = b"https://a.ee/1 0.0.0.0 20200101000000 text/html %d\n" % len(block)
    path.write_bytes(head + body + b"\n" + answer + block + b"\n")
    assert len(list(archive_records(path, 20_000))) == 2


def test_files_that_are_no_archives(tmp_path):
    for content in (b"<html>no archive</html>\n" * 9, b""):
        with pytest.raises(KieloError, match=r"(?s)a.warc, (after )?record 0.*(no web archive|cut short)"):
            run(tmp_path, "a.warc", content)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    with pytest.raises(KieloError, match=r"a: web archives need trafilatura and .* pip install 'kielo.warc"):
        run(tmp_path, "a.warc", b"".join(RECORDS))
