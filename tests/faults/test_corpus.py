"""The corpus stage with bad text, odd files and lost workers: it never hangs, never drops text silently,
and its memory stays bounded.

Text of the trial's own workplace: 43 lines, of which one bad one is passed over by default and two are
refused.
"""

import gzip
import io
import json
import multiprocessing
import os
import select
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from kielo.artifact.documents import read_documents
from kielo.corpus import corpus_stage as corpus_run
from kielo.corpus.process_pool import results_in_order
from kielo.recipe.errors import KieloError
from tests.corpus.texts import estonian_document
from tests.faults.faulty_steps import faulty_work
from tests.faults.trial import belongings, kielo, refused, rest_marked_full, start, went_well, write_workplace

LINES = [estonian_document(number).replace("\n", " ") for number in range(40)]
GOOD_JSON = [json.dumps({"text": line}, ensure_ascii=False).encode() for line in LINES]
# A case that takes longer has hung.
HANG_SECONDS = 60
TEXT = "\n".join(LINES).encode() + b"\n"
JSONL = b"\n".join(GOOD_JSON) + b"\n"


def _run(here, workplace: Path, *sets: str, source: str = ""):
    sets = (f"corpus.sources={source}", *sets) if source else sets
    return here(
        workplace,
        "run",
        "tiny.toml",
        "--only",
        "corpus",
        *(part for value in sets for part in ("--set", value)),
    )


def _kept(workplace: Path) -> list[dict]:
    return list(read_documents(workplace / "run" / "corpus" / "documents"))


def _funnel(workplace: Path) -> dict:
    return json.loads((workplace / "run" / "corpus" / "funnel.json").read_text(encoding="utf-8"))


def _nothing_made(workplace: Path) -> None:
    assert not list((workplace / "run").glob("corpus*"))


def _parquet(column: list, name: str = "text", kind=None, **options) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({name: pyarrow.array(column, kind)}), file, **options)
    return file.getvalue()


# --- One bad record is passed over, counted and shown; two of 42 are refused ---

BAD_LINES = {
    "not UTF-8": ("a.txt", b"halb \xf5 rida", "invalid UTF-8 (byte 0xf5"),
    "too long": ("a.txt", b"a" * 30_000, "longer than corpus.max_document_bytes"),
    "JSON not UTF-8": ("a.jsonl", b'{"text": "\xf5"}', "invalid UTF-8"),
    "JSON too long": (
        "a.jsonl",
        b'{"text": "' + b"a" * 30_000 + b'"}',
        "longer than corpus.max_document_bytes",
    ),
    "5000 digits": ("a.jsonl", b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "not valid JSON"),
    "nested deeply": (
        "a.jsonl",
        b'{"text": ' + b"[" * 9000 + b"]" * 9000 + b"}",
        "no text in the field 'text'",
    ),
    "lone surrogate": ("a.jsonl", rb'{"text": "\ud800"}', "no text in the field 'text'"),
    "cut": ("a.jsonl", b'{"text": "a', "not valid JSON"),
    "list": ("a.jsonl", b'["a"]', "a JSON object is expected"),
    "number as text": ("a.jsonl", b'{"text": 7}', "the field 'text' is a number, not text"),
    "list as text": ("a.jsonl", b'{"text": ["a"]}', "the field 'text' is a list, not text"),
    "field missing": ("a.jsonl", b'{"tekst": "a"}', "its fields are tekst"),
    "many fields": (
        "a.jsonl",
        json.dumps({f"f{n}" * 9: n for n in range(300)}).encode(),
        "its fields are f0",
    ),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_one_bad_line_is_passed_over_and_two_are_refused(here, workplace, case):
    name, bad, told = BAD_LINES[case]
    good = TEXT.splitlines() if name == "a.txt" else GOOD_JSON
    path, limit = workplace / name, "corpus.max_document_bytes=20000"
    path.write_bytes(b"\n".join([*good[:20], bad, *good[20:]]))
    outcome = went_well(_run(here, workplace, limit, source=name))
    assert (
        "passed over a: 1 of 41 records" in outcome.err
        and f"{name}, line 21: " in outcome.err
        and told in outcome.err
    )
    assert len(_kept(workplace)) == 40
    funnel = _funnel(workplace)
    assert funnel["sources"][0]["bad_records"] == 1 and funnel["sources"][0]["documents_in"] == 41
    assert told in funnel["sources"][0]["bad_examples"][0] and str(workplace) not in json.dumps(funnel)
    assert funnel["steps"][0]["name"] == "read" and funnel["steps"][0]["documents"] == 1

    before = belongings(workplace / "run" / "corpus")
    path.write_bytes(b"\n".join([*good[:20], bad, *good[20:], bad]))
    refused(
        _run(here, workplace, limit, source=name),
        "records that cannot be read",
        "2 of 42",
        "corpus.max_bad_share",
        f"{name}, line 21",
        told,
    )
    assert belongings(workplace / "run" / "corpus") == before
    went_well(_run(here, workplace, limit, "corpus.max_bad_share=0.05", source=name))


def test_a_share_of_zero_allows_none_also_afterwards(here, workplace):
    """A finished corpus with a bad record is refused once none may be, though nothing else changed."""
    (workplace / "a.txt").write_bytes(b"\xf5\n" + TEXT)
    refused(
        _run(here, workplace, "corpus.max_bad_share=0", source="a.txt"),
        "bad_share = 0 allows 0",
        "a.txt, line 1",
    )
    went_well(_run(here, workplace, source="a.txt"))
    refused(
        _run(here, workplace, "corpus.max_bad_share=0", source="a.txt"),
        "bad_share = 0 allows 0",
        "a.txt, line 1",
    )


def test_a_bad_record_of_few_is_refused(here, workplace):
    (workplace / "a.txt").write_bytes(TEXT[: TEXT.index(b"\n") + 1] * 3 + b"\xf5\n")
    refused(_run(here, workplace, source="a.txt"), "1 of 4 records that cannot be read", "a.txt, line 4")
    _nothing_made(workplace)


# --- Pages ---

BAD_PAGES = {
    **{
        f"charset {name[:12]}": (f'<meta charset="{name}"><p>õ'.encode("latin-1"), "unknown charset")
        for name in ("undefined", "utf-7", "idna", "base64", "rot13", "punycode", "unicode_escape",
            "raw_unicode_escape",
                     "zlib", "x" * 3000, "..", "mbcs", "no-such")
    },
    "not in its charset": (b'<meta charset="utf-8"><p>\xf5', "invalid UTF-8"),
    "too long": (b"<p>" + b"a" * 30_000, "longer than corpus.max_document_bytes"),
}  # fmt: skip


def _write_pages(workplace: Path, **pages: bytes) -> None:
    (workplace / "pages").mkdir()
    for number, line in enumerate(LINES):
        (workplace / "pages" / f"good_{number:02d}.html").write_text(f"<p>{line}")
    for name, content in pages.items():
        (workplace / "pages" / f"{name}.html").write_bytes(content)


@pytest.mark.parametrize("case", BAD_PAGES)
def test_a_bad_page_is_passed_over(here, workplace, case):
    content, told = BAD_PAGES[case]
    _write_pages(workplace, bad=content)
    outcome = went_well(_run(here, workplace, "corpus.max_document_bytes=20000", source="pages"))
    assert "1 of 41 records" in outcome.err and "bad.html" in outcome.err and told in outcome.err
    assert len(_kept(workplace)) == 40


ODD_PAGES = {
    "UTF-16 with its mark": f"<p>{LINES[0]}".encode("utf-16"),
    "UTF-16 without": f"<p>{LINES[0]}".encode("utf-16-be"),
    "says UTF-16 and is UTF-8": f'<meta charset="utf-16"><p>{LINES[0]}'.encode(),
    "UTF-8 with a mark": b"\xef\xbb\xbf" + f"<p>{LINES[0]}".encode(),
    "nested deeply": b"<div>" * 50_000 + f"<p>{LINES[0]}".encode(),
    "unknown declaration": f"<![foo[bar]]><p>{LINES[0]}".encode(),
    "5000 digits": f"<p>{LINES[0]}<p>&#{'1' * 5000};".encode(),
    "a declaration of Word": f"<![if !vml]><p>{LINES[0]}".encode(),
}


@pytest.mark.parametrize("case", ODD_PAGES)
def test_an_odd_page_is_read(here, workplace, case):
    (workplace / "page.html").write_bytes(ODD_PAGES[case])
    went_well(_run(here, workplace, "corpus.min_document_characters=10", source="page.html"))
    assert [document["text"] for document in _kept(workplace)] == [LINES[0]]


# --- Odd lines that are no fault ---

ODD_LINES = {
    "mark of UTF-8": ("a.txt", b"\xef\xbb\xbf" + TEXT),
    "mark of UTF-8 before JSON": ("a.jsonl", b"\xef\xbb\xbf" + JSONL),
    "marks between joined files": ("a.jsonl", b"\xef\xbb\xbf" + JSONL + b"\xef\xbb\xbf" + JSONL),
    "zero bytes": ("a.txt", TEXT.replace(b" ", b"\x00 ")),
    "no last line end": ("a.txt", TEXT[:-1]),
    "carriage returns": ("a.txt", TEXT.replace(b"\n", b"\r\n")),
    "null as text": ("a.jsonl", b'{"text": null}\n' * 9 + JSONL),
    "null in a column": ("a.parquet", _parquet([None] * 9 + LINES)),
    "nested id": ("a.jsonl", JSONL.replace(b"{", b'{"id": ' + b"[" * 900 + b"]" * 900 + b", ")),
    "large strings": ("a.parquet", _parquet(LINES, kind=pyarrow.large_string())),
    "dictionary": ("a.parquet", _parquet(LINES, kind=pyarrow.dictionary(pyarrow.int32(), pyarrow.string()))),
    "gzip members": ("a.txt.gz", gzip.compress(TEXT[:1000]) + gzip.compress(TEXT[1000:])),
    "capital suffix": ("A.TXT", TEXT),
    "bytes in the column": ("a.parquet", _parquet([line.encode() for line in LINES])),
    **{
        f"{name} with mark {suffix}": ("a.txt" + suffix, compress(("\ufeff" + TEXT.decode()).encode(name)))
        for name in ("utf-16le", "utf-16be", "utf-32le", "utf-32be")
        for suffix, compress in (("", bytes), (".gz", gzip.compress))
    },
}


@pytest.mark.parametrize("case", ODD_LINES)
def test_odd_text_is_read_whole(here, workplace, case):
    name, content = ODD_LINES[case]
    (workplace / name).write_bytes(content)
    outcome = went_well(_run(here, workplace, source=name))
    assert [document["text"] for document in _kept(workplace)] == LINES and "passed over" not in outcome.err


# --- Whole files that cannot be read ---

BAD_FILES = {
    **{
        f"{name} without mark {suffix}": (
            "a.txt" + suffix, compress(TEXT.decode().encode(name)), f"iconv -f {name.upper()} -t UTF-8"
        )
        for name in ("utf-16le", "utf-16be", "utf-32le", "utf-32be")
        for suffix, compress in (("", bytes), (".gz", gzip.compress))
    },
    "cut gzip": ("a.txt.gz", gzip.compress(TEXT)[:-9], "cut short"),
    "cut zstd": ("a.jsonl.zst", zstandard.compress(JSONL)[:-9], "cut short"),
    "empty gzip": ("a.txt.gz", b"", "cut short"),
    "empty zstd": ("a.txt.zst", b"", "cut short"),
    "no gzip": ("a.txt.gz", TEXT, "damaged or not gzip"),
    "no zstd": ("a.txt.zst", TEXT, "damaged or not zstd"),
    "damaged gzip": ("a.txt.gz", gzip.compress(TEXT)[:-8] + bytes(8), "damaged or not gzip"),
    "no Parquet": ("a.parquet", TEXT, "damaged, cut short or not Parquet"),
    "cut Parquet": ("a.parquet", _parquet(LINES)[:-20], "damaged, cut short or not Parquet"),
    "no such column": ("a.parquet", _parquet(LINES, name="tekst"), "its columns are tekst"),
    "numbers in the column": ("a.parquet", _parquet([1, 2]), "is int64 and no text"),
    "empty text": ("a.txt", b"", "no document"),
    "empty lines": ("a.txt", b"\n \n\n", "no document"),
    "empty Parquet": ("a.parquet", _parquet([], kind=pyarrow.string()), "no document"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_cannot_be_read_is_refused(here, workplace, case):
    name, content, told = BAD_FILES[case]
    (workplace / name).write_bytes(content)
    refused(_run(here, workplace, source=name), told, name)
    _nothing_made(workplace)


def test_a_damaged_file_of_many_is_passed_over_with_what_came_before_the_damage(here, workplace):
    """The file is passed over as long as its bytes are within the allowed share; one of two files is not."""
    folder = workplace / "many"
    folder.mkdir()
    (folder / "bad.txt.gz").write_bytes(gzip.compress(TEXT)[:-9])
    (folder / "good.txt").write_bytes(TEXT)
    refused(_run(here, workplace, source="many"), "with damaged files of", "bad.txt.gz: cut short")
    outcome = went_well(_run(here, workplace, "corpus.max_bad_share=0.9", source="many"))
    assert "bad.txt.gz: cut short" in outcome.err
    assert {document["text"] for document in _kept(workplace)} == set(LINES)


def test_a_long_cell_is_passed_over(here, workplace):
    (workplace / "a.parquet").write_bytes(_parquet([*LINES, "a" * 30_000]))
    outcome = went_well(_run(here, workplace, "corpus.max_document_bytes=20000", source="a.parquet"))
    assert "row 41: longer than corpus.max_document_bytes" in outcome.err and len(_kept(workplace)) == 40


# --- What is no file, or not for long ---


@pytest.mark.parametrize("name", ["a.txt", "many/a.txt"])
@pytest.mark.parametrize("kind", ["pipe", "broken link"])
def test_what_is_no_file_is_refused(here, workplace, name, kind):
    """It is refused by itself and in a folder; a pipe that nobody writes to does not hang."""
    (workplace / "many").mkdir()
    (workplace / "many" / "good.txt").write_bytes(TEXT)
    if kind == "pipe":
        os.mkfifo(workplace / name)
    else:
        (workplace / name).symlink_to("nowhere")
    told = "neither a file nor a folder" if kind == "pipe" else "a link that leads nowhere"
    refused(_run(here, workplace, source=name.partition("/")[0]), told, "a.txt")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["many", "many/a.txt"])
def test_no_permission_is_refused(here, workplace, name):
    """A folder that may not be read is not an empty one."""
    (workplace / "many").mkdir()
    (workplace / "many" / "a.txt").write_bytes(TEXT)
    (workplace / name).chmod(0)
    refused(_run(here, workplace, source=".,"), "Permission denied", name)
    (workplace / name).chmod(stat.S_IRWXU)


def test_a_name_that_is_not_utf8_is_refused(here, workplace):
    (workplace / "many").mkdir()
    (workplace / "many" / os.fsdecode(b"h\xf5bu.txt")).write_bytes(TEXT)
    refused(_run(here, workplace, source="many"), "not UTF-8. Fix: rename the file", r"h\xf5bu.txt")


@pytest.mark.parametrize(
    "name", ["two\nlines.txt", "-o.txt", "õ ä.txt", "%s{}.txt", "a'\".txt", "x" * 200 + ".txt"]
)
def test_odd_names_are_read(here, workplace, name):
    (workplace / "many").mkdir()
    (workplace / "many" / name).write_bytes(TEXT)
    went_well(_run(here, workplace, source="many"))
    assert {document["metadata"]["file"] for document in _kept(workplace)} == {name}


def test_text_behind_links_is_read_once(here, workplace):
    """A link to a folder elsewhere is followed; links in a circle end."""
    (workplace / "elsewhere").mkdir()
    (workplace / "elsewhere" / "a.txt").write_bytes(TEXT)
    (workplace / "many").mkdir()
    (workplace / "many" / "there").symlink_to(workplace / "elsewhere")
    (workplace / "many" / "self").symlink_to(workplace / "many")
    (workplace / "many" / "there" / "back").symlink_to(workplace / "many")
    went_well(_run(here, workplace, source="many"))
    assert _funnel(workplace)["sources"][0]["documents_in"] == 40


@pytest.mark.parametrize("change", ["vanishes", "changes", "becomes a folder", "is emptied"])
@pytest.mark.parametrize("name", ["a.txt", "a.html", "a.parquet"])
def test_a_file_that_does_not_stay_is_refused(here, workplace, monkeypatch, name, change):
    """A file that changes between its hash and its reading is refused: a corpus must be of the text whose
    hash it has.
    """
    path = workplace / name
    path.write_bytes({"a.txt": TEXT, "a.html": b"<p>" + TEXT, "a.parquet": _parquet(LINES)}[name])
    fetch = corpus_run.fetch_sources

    def fetch_and_change(*arguments):
        sources = fetch(*arguments)
        content = path.read_bytes()
        path.unlink()
        if change == "becomes a folder":
            path.mkdir()
        elif change != "vanishes":
            path.write_bytes(b"" if change == "is emptied" else content.replace(b"metsast", b"rabast "))
        return sources

    monkeypatch.setattr(corpus_run, "fetch_sources", fetch_and_change)
    told = "any more. Fix: the same command" if change == "vanishes" else "changed while the corpus was read"
    refused(_run(here, workplace, source=name), told, name)
    _nothing_made(workplace)


# --- The recipe ---


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("debian_package", "-oAPT::Update::Pre-Invoke::=touch${IFS}x"),
        ("debian_package", "--help"),
        ("debian_package", "a b"),
        ("debian_package", "../x"),
        ("debian_package", "good\n-o"),
        ("huggingface_dataset", "../x"),
        ("huggingface_dataset", "-x/y"),
        ("huggingface_dataset", "a/b/c"),
        ("huggingface_dataset", "https://x.org/a"),
        ("name", "../x"),
    ],
)
def test_names_that_mean_more_than_a_name_are_refused(here, workplace, key, value):
    place = {} if key != "name" else {"path": "text.txt"}
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in ({key: value} | place).items())
    recipe = (workplace / "tiny.toml").read_text().replace('sources = "text.txt"', f"sources = [{{{table}}}]")
    (workplace / "tiny.toml").write_text(recipe)
    refused(_run(here, workplace), "does not fit. Fix", f"corpus.sources[0].{key}")


@pytest.mark.parametrize(
    "value", ["max_bad_share=2", "max_bad_share=-1", "max_bad_share=nan", "max_document_bytes=0", "workers=0"]
)
def test_limits_out_of_bounds_are_refused(here, workplace, value):
    refused(_run(here, workplace, f"corpus.{value}"), "does not fit. Fix", value.partition("=")[0])


def test_the_order_of_sources_decides_which_duplicate_stays(here, workplace):
    """Another order makes the corpus anew, and the same order does not."""
    lines = TEXT.splitlines(keepends=True)
    own = {"first": lines[0], "second": lines[1]}  # for a source that ends up empty is refused
    for name in own:
        (workplace / f"{name}.txt").write_bytes(own[name] + b"".join(lines[2:]))
    went_well(_run(here, workplace, source="first.txt,second.txt"))
    assert [document["source"] for document in _kept(workplace)].count("second") == 1
    assert "nothing to do" in went_well(_run(here, workplace, source="first.txt,second.txt")).told
    went_well(_run(here, workplace, source="second.txt,first.txt"))
    assert [document["source"] for document in _kept(workplace)].count("first") == 1


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="makes a package of Debian")
def test_a_package_with_links_gives_only_its_own_files(here, workplace, monkeypatch):
    """A link in a Debian package that leads to a page of the machine is not followed.
    apt-get is a stand-in.
    """
    tree, secret = workplace / "deb", workplace / "secret"
    secret.mkdir()
    (secret / "secret.html").write_text(f"<p>{LINES[39]}")
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(
        "Package: help\nVersion: 1\nArchitecture: all\nMaintainer: x\nDescription: x\n"
    )
    (tree / "usr").mkdir()
    for number, line in enumerate(LINES[:20]):
        (tree / "usr" / f"{number}.html").write_text(f"<p>{line}")
    (tree / "usr" / "link.html").symlink_to(secret / "secret.html")
    (tree / "usr" / "folder").symlink_to(secret)
    subprocess.run(
        ["dpkg-deb", "--build", tree, workplace / "help_1_all.deb"], check=True, capture_output=True
    )
    (workplace / "bin").mkdir()
    apt = workplace / "bin" / "apt-get"
    apt.write_text(
        '#!/bin/sh\n[ "$2" = update ] && exit\n'
        f'[ "$*" = "-qq download -- help" ] && cp "{workplace}/help_1_all.deb" .\n'
    )
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", f"{workplace / 'bin'}:{os.environ['PATH']}")
    recipe = (
        (workplace / "tiny.toml")
        .read_text()
        .replace('sources = "text.txt"', 'sources = [{debian_package = "help"}]')
    )
    (workplace / "tiny.toml").write_text(recipe)
    went_well(_run(here, workplace))
    assert len(_kept(workplace)) == 20 and not any(
        LINES[39] in document["text"] for document in _kept(workplace)
    )


# --- Workers ---


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("our message", KieloError, r"text\.txt, line 3: no"),
        pytest.param("full disk", OSError, r"No space left on device: '/full'", marks=pytest.mark.full),
        pytest.param(
            "unsendable", RuntimeError, r"(?s)worker \d of 2.*Unsendable: 1 2", marks=pytest.mark.full
        ),
        ("out of memory", KieloError, r"worker \d of 2: out of memory. Fix: fewer corpus\.workers"),
        ("killed", KieloError, r"worker \d of 2 was killed by SIGKILL.*corpus\.workers"),
        pytest.param("crashed", KieloError, r"worker \d of 2 was ended by SIGSEGV", marks=pytest.mark.full),
        ("exit", KieloError, r"worker \d of 2 ended without an answer \(exit code 3\)"),
    ],
)
def test_one_worker_ends_all(fault, kind, message):
    """The other worker would wait for ever."""
    with pytest.raises(kind, match=message):
        list(results_in_order(partial(faulty_work, fault), [0, 1], 2, "corpus"))
    assert not multiprocessing.active_children()


def test_a_bug_in_a_worker_keeps_its_traceback():
    """The exception is the worker's own; a note says where in the worker it came from."""
    with pytest.raises(ZeroDivisionError, match="of our own") as caught:
        list(results_in_order(partial(faulty_work, "bug"), [0, 1], 2, "corpus"))
    (note,) = caught.value.__notes__
    assert note.startswith("In corpus worker ") and "faulty_steps.py" in note


@pytest.mark.parametrize("attempt", rest_marked_full(range(3), [0]))
def test_bad_input_with_two_workers_is_refused(workplace, attempt):
    """A pool that is not watched hung 3 times of 60 here, and said nothing."""
    (workplace / "text.txt").write_bytes(b"hea\nhalb \xf5\n" * 20)
    refused(
        kielo(workplace, "run", "tiny.toml", "--only", "corpus", "--set", "corpus.workers=2"),
        "20 of 40 records that cannot be read",
        "text.txt, line 2",
    )
    _nothing_made(workplace)


def _processes(marker: str) -> list[int]:
    """Live processes that were started with the marker in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_alive = (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if is_alive and marker.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # gone meanwhile, or not ours to read
            continue
    return found


def _workers(marker: str) -> list[int]:
    return [pid for pid in _processes(marker) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture(scope="module")
def large_text(tmp_path_factory) -> Path:
    text = tmp_path_factory.mktemp("large") / "text.txt"
    text.write_text("\n".join(estonian_document(n).replace("\n", " ") for n in range(100_000)))
    return text


@pytest.fixture
def at_work(tmp_path, large_text) -> Iterator[tuple[subprocess.Popen, str, Path]]:
    """`kielo run` with two workers in the middle of a large text, a marker of its processes,
    and its workplace.
    """
    workplace = write_workplace(tmp_path / "workplace")
    shutil.copy(large_text, workplace / "text.txt")
    marker = f"KIELO_TRIAL={tmp_path}"
    process = start(
        workplace,
        "run",
        "tiny.toml",
        "--only",
        "corpus",
        "--set",
        "corpus.workers=2",
        KIELO_TRIAL=str(tmp_path),
    )
    try:
        while len(list((workplace / "run" / ".corpus.tasks").glob("*/clean/.*"))) < 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)  # nothing tells of a file that another process makes
        yield process, marker, workplace
    finally:
        for pid in {process.pid, *_processes(marker)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def _all_end(process: subprocess.Popen, marker: str) -> str:
    """Wait until every process with the marker is gone; returns what was said on stderr."""
    _, err = process.communicate(timeout=HANG_SECONDS)
    for pid in _processes(marker):
        with suppress(ProcessLookupError), open(os.pidfd_open(pid)) as ending:
            select.select([ending], [], [], HANG_SECONDS)
    assert not _processes(marker)
    return err


SIGNALS = [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP]


@pytest.mark.parametrize("sent", rest_marked_full(SIGNALS, [signal.SIGTERM, signal.SIGKILL]))
def test_no_worker_outlives_kielo(at_work, sent):
    process, marker, workplace = at_work
    process.send_signal(sent)
    _all_end(process, marker)
    assert process.returncode != 0 and not (workplace / "run" / "corpus").exists()
    (workplace / "text.txt").write_bytes(TEXT)
    went_well(kielo(workplace, "run", "tiny.toml", "--only", "corpus"))


@pytest.mark.parametrize(
    "to_all",
    [
        pytest.param(False, id="to kielo", marks=pytest.mark.full),
        pytest.param(True, id="to all, as a terminal does"),
    ],
)
def test_an_interrupt_ends_all(at_work, to_all):
    process, marker, workplace = at_work
    for pid in _processes(marker) if to_all else [process.pid]:
        with suppress(ProcessLookupError):  # kielo, which got it first, has ended this one
            os.kill(pid, signal.SIGINT)
    err = _all_end(process, marker)
    assert process.returncode == 130 and "kielo: interrupted" in err and "Traceback" not in err
    _nothing_made(workplace)


@pytest.mark.parametrize("sent", rest_marked_full([signal.SIGKILL, signal.SIGTERM], [signal.SIGKILL]))
def test_a_worker_that_is_killed_is_told(at_work, sent):
    process, marker, workplace = at_work
    os.kill(_workers(marker)[0], sent)
    err = _all_end(process, marker)
    assert (
        process.returncode == 1
        and f"of 2 was {'killed by SIGKILL' if sent == signal.SIGKILL else 'ended by SIGTERM'}" in err
    )
    assert "Traceback" not in err
    _nothing_made(workplace)
