"""Sources at addresses: fetched once, in pieces that resume, verified, and refused by name."""

import base64
import hashlib
import io
import shutil
import sys
from itertools import count

import pyarrow.parquet
import pytest

from kielo.artifact import remote_files
from kielo.artifact.manifest import finished_manifest
from kielo.artifact.stage_counts import RawCounts
from kielo.artifact.stage_json import counts_of
from kielo.corpus.corpus_stage import run_corpus
from kielo.corpus.fetch import fetch_sources, fetch_text
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus, Recipe, Source
from tests.corpus.web_server import Page, WebServer
from tests.object_storage import bucket

pytest.importorskip("aiohttp")
TEXT = b"".join(b"line %d of a text\n" % number for number in range(2000))


@pytest.fixture
def web(monkeypatch):
    monkeypatch.setattr(remote_files, "FIRST_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(remote_files, "PIECE_BYTES", 8000)
    server = WebServer()
    yield server
    server.close()


def fetched(tmp_path, address, **keys):
    recipe = Recipe(name="t", language="et", corpus=Corpus(sources=[{"name": "a", "path": address} | keys]))
    lines = []
    (one,) = fetch_sources(recipe, tmp_path / "raw", lines.append)
    return one, lines


def test_a_file_of_the_web_is_fetched_once_in_pieces(tmp_path, web):
    web.pages["/x/et.txt"] = Page(TEXT)
    one, lines = fetched(tmp_path, f"{web.address}/x/et.txt")
    assert one.files == ("et.txt",) and (tmp_path / "raw" / "a" / "et.txt").read_bytes() == TEXT
    manifest = finished_manifest(tmp_path / "raw" / "a")
    counts = counts_of(tmp_path / "raw" / "a", manifest, RawCounts)
    assert counts.versions == {"et.txt": '"v1"'} and counts.origin == one.origin == f"{web.address}/x/et.txt"
    assert [given for *_, given in web.asked if given][0] == "bytes=0-7999"
    assert any("file 1 of 1, et.txt, 0.0 MB" in line for line in lines)
    before = len(web.asked)
    again, lines = fetched(tmp_path, f"{web.address}/x/et.txt")
    assert (again.fingerprint, len(web.asked)) == (one.fingerprint, before) and "fetched before" in lines[0]
    assert fetched(tmp_path, f"{web.address}/x/et.txt", leave_out=["*.csv"])[1] != lines  # other keys


def test_a_damaged_table_is_refused_as_one_of_this_disk(tmp_path, web):
    """By the stage, which names it. Its rows are counted while it is fetched."""
    (tmp_path / "d.parquet").write_bytes(b"<html>sign in</html>" * 10)
    web.pages["/x/d.parquet"] = Page(b"<html>sign in</html>" * 10)
    told = []
    for place in (f"{web.address}/x/d.parquet", str(tmp_path / "d.parquet")):
        recipe = Recipe(
            name="t", language="et", corpus=Corpus(sources=[{"name": "a", "path": place}], workers=1)
        )
        with pytest.raises(KieloError, match=r"d\.parquet") as caught:
            run_corpus(recipe, tmp_path / "corpus", tmp_path / "raw", progress=False)
        told.append(str(caught.value).replace(str(tmp_path / "raw" / "a"), str(tmp_path)))
    assert told[0].replace(web.address + "/x", str(tmp_path)) == told[1]


def test_a_fault_of_the_disk_is_no_damaged_table(tmp_path, web, monkeypatch):
    def broken(path):
        raise OSError(5, "Input/output error")

    web.pages["/x/d.parquet"] = Page(b"PAR1")
    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", broken)
    with pytest.raises(KieloError, match="raw stage was not written: Input/output error"):
        fetched(tmp_path, f"{web.address}/x/d.parquet")


@pytest.mark.parametrize("has_ranges", [True, False])
def test_an_address_that_breaks_off_goes_on(tmp_path, web, has_ranges):
    """With ranges from the last byte, without from the beginning. A server's faults are tried again."""
    web.pages["/et.txt"] = Page(TEXT, has_ranges=has_ranges, breaks=[5000, 5000], statuses=[200, 503, 500])
    one, lines = fetched(tmp_path, f"{web.address}/et.txt")
    assert (tmp_path / "raw" / "a" / "et.txt").read_bytes() == TEXT
    told = [line for line in lines if "tried again" in line]
    assert len(told) >= 2 and "/et.txt: the server answered 50" in told[0]
    assert not list((tmp_path / "raw").glob(".a.*"))


def test_an_interrupted_fetch_resumes_in_another_process(tmp_path, web, monkeypatch):
    """Pieces that arrived stay beside the folder, and are not asked for again."""
    monkeypatch.setattr(remote_files, "TRIES", 1)
    web.pages["/et.txt"] = Page(TEXT, statuses=[200, 200, 200, 500])
    with pytest.raises(
        KieloError, match=r"a: could not be fetched. .*et.txt: the server answered 500. Fix: the"
    ):
        fetched(tmp_path, f"{web.address}/et.txt")
    assert not (tmp_path / "raw" / "a").exists()
    (part,) = (tmp_path / "raw").glob(".a.downloads/*.part")
    have = part.stat().st_size
    assert part.read_bytes() == TEXT[:have] and have >= 8000
    web.asked.clear()
    fetched(tmp_path, f"{web.address}/et.txt")
    assert (tmp_path / "raw" / "a" / "et.txt").read_bytes() == TEXT
    assert f"bytes={have}-" in next(given for *_, given in web.asked if given)


def test_a_file_without_a_version_is_begun_again(tmp_path, web, monkeypatch):
    """A file of the same size can have taken its place since: no head of one joins the tail of another."""
    monkeypatch.setattr(remote_files, "TRIES", 1)
    web.pages["/et.txt"] = Page(TEXT, version="", breaks=[9000])
    fix = "Fix: a server or mirror that tells ETag or Last-Modified, or download the file and give its path"
    with pytest.raises(KieloError, match=f"could not be fetched.*{fix}"):
        fetched(tmp_path, f"{web.address}/et.txt")
    (part,) = (tmp_path / "raw").glob(".a.downloads/*.part")
    part.write_bytes(TEXT[:9000])
    web.pages["/et.txt"] = Page(TEXT.upper(), version="", later=Page(TEXT, version=""))
    fetched(tmp_path, f"{web.address}/et.txt")
    assert (tmp_path / "raw" / "a" / "et.txt").read_bytes() == TEXT.upper()


def test_a_server_without_ranges_that_ends_long_answers(tmp_path, web, monkeypatch):
    monkeypatch.setattr(remote_files, "TRIES", 1)
    web.pages["/et.txt"] = Page(TEXT, has_ranges=False, breaks=[9000] * 9)
    with pytest.raises(KieloError, match="could not be fetched"):
        fetched(tmp_path, f"{web.address}/et.txt")
    (part,) = (tmp_path / "raw").glob(".a.downloads/*.part")
    part.write_bytes(TEXT[:9000])
    with pytest.raises(KieloError, match="Fix: a server or mirror with ranges, or download the file and"):
        fetched(tmp_path, f"{web.address}/et.txt")


def test_only_files_that_are_fetched_need_room(tmp_path, web, monkeypatch):
    """The second file is not reached with max_documents, and its size is not asked for."""
    files = pytest.importorskip("fsspec").filesystem("memory")
    root = f"/rooms{next(_NUMBER)}"
    parquet = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["Üks rida."] * 9}), parquet)
    files.pipe_file(f"{root}/a.parquet", parquet.getvalue())
    files.pipe_file(f"{root}/b.parquet", bytes(1 << 20))
    free = shutil.disk_usage(tmp_path)._replace(free=1 << 19)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    with pytest.raises(KieloError, match="disk full"):
        fetched(tmp_path / "all", f"memory:/{root}")
    one, _ = fetched(tmp_path / "few", f"memory:/{root}", max_documents=5)
    assert one.files == ("a.parquet",)


def test_a_file_that_changes_between_its_pieces_is_begun_again(tmp_path, web):
    new = Page(b"new text\n" * 2000, version="v2")
    web.pages["/et.txt"] = Page(TEXT, later=new)
    one, _ = fetched(tmp_path, f"{web.address}/et.txt")
    assert (tmp_path / "raw" / "a" / "et.txt").read_bytes() == new.content
    folder = tmp_path / "raw" / "a"
    assert counts_of(folder, finished_manifest(folder), RawCounts).versions == {"et.txt": '"v2"'}


def test_checksums_that_a_server_tells(tmp_path, web):
    for name, algorithm in (("Content-MD5", hashlib.md5), ("Digest", hashlib.sha256)):
        begin = "sha-256=" if name == "Digest" else ""
        for content, is_right in ((TEXT, True), (TEXT[::-1], False)):
            value = begin + base64.b64encode(algorithm(content).digest()).decode()
            web.pages["/et.txt"] = Page(TEXT, headers={name: value})
            folder = tmp_path / name / str(is_right)
            if is_right:
                fetched(folder, f"{web.address}/et.txt")
            else:
                with pytest.raises(
                    KieloError, match=r"et.txt: has another (md5|sha256) than the server tells"
                ):
                    fetched(folder, f"{web.address}/et.txt")


def test_addresses_that_give_nothing(tmp_path, web, monkeypatch):
    """Each is refused by its address, with the reason, and nothing is left in the folder."""
    monkeypatch.setattr(remote_files, "TRIES", 2)
    web.pages |= {"/a.pdf": Page(b"x"), "/secret.txt": Page(b"x", statuses=[403] * 9)}
    web.pages["/down.txt"] = Page(b"x", statuses=[500] * 9)
    closed = WebServer()
    closed.close()
    for path, words in (
        (f"{web.address}/gone.txt", r"/gone.txt: the server answered 404"),
        (f"{web.address}/secret.txt", r"/secret.txt: the server answered 403"),
        (f"{web.address}/down.txt", r"/down.txt: the server answered 500"),
        (f"{web.address}/a.pdf", r"no file of text .a.pdf.. Fix: \.txt"),
        (f"{closed.address}/et.txt", r"et.txt: ClientConnectorError: Cannot connect"),
        (f"memory://nothing{next(_NUMBER)}/*.txt", r"no file is there, or none fits the pattern"),
        ("nowhere://a.txt", r"nowhere://a.txt: Protocol not known: nowhere. Fix: https://"),
    ):
        with pytest.raises(KieloError, match=words):
            fetched(tmp_path, path)
        assert not (tmp_path / "raw" / "a").exists()


_NUMBER = count()


def test_a_folder_and_a_pattern_of_a_file_system(tmp_path):
    """Files are chosen as those of local paths: by kind, without `leave_out`. Other data are refused."""
    fsspec = pytest.importorskip("fsspec")
    files, root = fsspec.filesystem("memory"), f"/bucket{next(_NUMBER)}"
    for name in ("b.txt", "a.txt", "deep/c.jsonl", "README.md", ".hidden.txt"):
        files.pipe_file(f"{root}/{name}", name.encode())
    one, _ = fetched(tmp_path, f"memory:/{root}")
    assert one.files == ("a.txt", "b.txt", "deep/c.jsonl")
    assert (tmp_path / "raw" / "a" / "deep" / "c.jsonl").read_text() == "deep/c.jsonl"
    assert fetched(tmp_path / "2", f"memory:/{root}/*.txt")[0].files == ("a.txt", "b.txt")
    files.pipe_file(f"{root}/about/README.txt", b"x")
    assert fetched(tmp_path / "6", f"memory:/{root}/about/README.txt")[0].files == ("README.txt",)
    with pytest.raises(KieloError, match=r"no file of text \(README.txt\)"):
        fetched(tmp_path / "7", f"memory:/{root}/about")
    files.rm_file(f"{root}/about/README.txt")
    assert fetched(tmp_path / "3", f"memory:/{root}/de*")[0].files == ("deep/c.jsonl",)
    assert fetched(tmp_path / "4", f"memory:/{root}", leave_out=["deep/*", "b*"])[0].files == ("a.txt",)
    files.pipe_file(f"{root}/x.csv", b"")
    with pytest.raises(KieloError, match=r"1 files that look like data would not be read: x.csv. Fix: "):
        fetched(tmp_path / "5", f"memory:/{root}")
    folder, manifest = fetch_text(Source(name="a", path=f"memory:/{root}/a.txt"), tmp_path / "to", print)
    assert folder.parent == tmp_path / "to" / "text" and list(manifest.files) == ["a.txt"]
    recipe = Recipe(name="t", language="et", corpus=Corpus(sources=[f"memory:/{root}/a.txt"]))
    files.rm_file(f"{root}/a.txt")  # a machine without a network
    (one,) = fetch_sources(recipe, tmp_path / "raw2", print, tmp_path / "to")
    assert one.root == str(folder) and one.files == ("a.txt",)
    with pytest.raises(KieloError, match="is not in KIELO_PREFETCHED"):
        fetch_sources(
            recipe.model_copy(update={"corpus": Corpus(sources=["memory://b.txt"])}),
            tmp_path,
            print,
            tmp_path,
        )


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("https://me:word@host/a.txt", "name or password"),
        ("s3://key:word@bucket/a.txt", "name or password"),
        ("https://host/a.txt?X-Amz-Signature=12", "key or signature"),
        ("https://host/a.txt?download=1&access_token=12", "key or signature"),
    ],
)
def test_secrets_are_refused_before_they_are_stored(path, words):
    with pytest.raises(ValueError, match=words):
        Source(name="a", path=path)
    assert Source(name="a", path="hf://datasets/o/n@main/et/*.parquet").is_downloaded


def test_names_of_sources_at_addresses():
    paths = [
        "https://zenodo.org/1/fi.jsonl.gz?download=1",
        "s3://bucket/et/*.zst",
        "hf://datasets/o/n/x.parquet",
    ]
    assert [source.name for source in Corpus(sources=paths).sources] == ["fi", "et", "x"]


@pytest.mark.parametrize(("package", "fix"), [("aiohttp", "'kielo.remote.'"), ("gcsfs", "gcsfs")])
def test_a_missing_package_is_named_before_anything_is_fetched(tmp_path, web, monkeypatch, package, fix):
    monkeypatch.setitem(sys.modules, package, None)
    web.pages["/et.txt"] = Page(TEXT)
    sources = [f"{web.address}/et.txt", "gs://bucket/b.txt"]
    with pytest.raises(KieloError, match=rf": needs the package {package}. Fix: pip install {fix}"):
        fetch_sources(Recipe(name="t", language="et", corpus=Corpus(sources=sources)), tmp_path, print)
    assert not web.asked


@pytest.mark.full
def test_a_bucket_of_s3(tmp_path, monkeypatch):
    """A pattern, a folder, a file that is missing, and a bucket that is missing."""
    monkeypatch.setattr(remote_files, "PIECE_BYTES", 8000)
    with bucket(monkeypatch, "texts") as client:
        client.put_object(Bucket="texts", Key="et/a.txt", Body=TEXT)
        client.put_object(Bucket="texts", Key="et/b.jsonl", Body=b"{}")
        one, _ = fetched(tmp_path, "s3://texts/et/*.txt")
        assert one.files == ("a.txt",) and (tmp_path / "raw" / "a" / "a.txt").read_bytes() == TEXT
        assert fetched(tmp_path / "2", "s3://texts/et")[0].files == ("a.txt", "b.jsonl")
        with pytest.raises(KieloError, match="s3://texts/et/c.txt: .*not found"):
            fetched(tmp_path / "3", "s3://texts/et/c.txt")
        with pytest.raises(KieloError, match="s3://other/x: "):
            fetched(tmp_path / "4", "s3://other/x")
