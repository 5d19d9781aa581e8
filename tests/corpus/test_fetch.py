"""Sources are found or fetched, the outcome is recorded, and what cannot be had is said with its reasons."""

import glob
import gzip
import json
import lzma
import os
import re
import sys
import types
from fnmatch import fnmatch
from pathlib import Path

import pytest

from kielo.artifact.manifest import read_manifest
from kielo.corpus import download
from kielo.corpus.fetch import HASHES_NAME, fetch_sources, local_files
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus, Recipe, Source
from tests.corpus.texts import recipe

PACKAGE = Source(
    name="help",
    debian_package="no-such",
    huggingface_dataset="some/wiki",
    huggingface_subset="et",
    max_documents=3,
)


def _hub(files):
    """A hub that serves these files, standing in for the network."""

    def hf_hub_download(dataset, file, *, repo_type, revision, local_dir):
        (local_dir / file).parent.mkdir(parents=True, exist_ok=True)
        (local_dir / file).write_text(files[file])

    siblings = [types.SimpleNamespace(rfilename=name) for name in files]
    api = types.SimpleNamespace(
        dataset_info=lambda name, timeout: types.SimpleNamespace(sha="abc", siblings=siblings)
    )
    return types.SimpleNamespace(HfApi=lambda: api, hf_hub_download=hf_hub_download)


def _recipe(*sources):
    return Recipe(name="t", language="et", corpus=Corpus(sources=sources))


def test_without_apt_the_dataset_is_taken_and_both_are_recorded(tmp_path, monkeypatch):
    """Without apt the Hugging Face subset is fetched, as the manifest says; a second call fetches nothing."""
    monkeypatch.setattr(download.shutil, "which", lambda program: None)
    monkeypatch.setitem(
        sys.modules, "huggingface_hub", _hub({"et/0.jsonl": '{"text": "a"}\n', "fi/0.jsonl": "x"})
    )
    (source,) = fetch_sources(_recipe(PACKAGE), tmp_path, print)
    assert (
        source.files == ("et/0.jsonl",) and source.origin == "Hugging Face dataset some/wiki et revision abc"
    )
    assert "apt-get is missing" in read_manifest(tmp_path / "help").counts["problems"][0]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert fetch_sources(_recipe(PACKAGE), tmp_path, print) == (source,)


def test_both_ways_failing_says_why(tmp_path, monkeypatch):
    """The message holds both reasons and a way out; nothing half-fetched stays."""
    monkeypatch.setattr(download.shutil, "which", lambda program: None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", _hub({"fi/0.jsonl": "x"}))
    with pytest.raises(
        KieloError, match=r"apt-get is missing.*subset 'et'. Its subsets: fi.*--set corpus.sources"
    ):
        fetch_sources(_recipe(PACKAGE), tmp_path, print)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["nothing.txt", "no-folder/*.txt"])
def test_missing_path_is_named(tmp_path, name):
    """A path or pattern that fits nothing is a KieloError with it."""
    with pytest.raises(KieloError, match="no such file or folder, or no match$"):
        fetch_sources(recipe(tmp_path / name), tmp_path / "raw", print)
    with pytest.raises(KieloError, match=f"{re.escape(name)}: .* no match in {re.escape(os.getcwd())}$"):
        local_files(Source(name="a", path=name))


def test_folder_without_text_is_refused(tmp_path):
    """A folder of other things is refused with the formats that are read."""
    (tmp_path / "a.docx").write_bytes(b"PK")
    with pytest.raises(KieloError, match=r"no file of text \(not read: a.docx\). .*\.parquet"):
        fetch_sources(recipe(tmp_path), tmp_path / "raw", print)


def files_of(folder: Path, pattern: str, *leave_out: str) -> list[str]:
    """Returns the names below `folder` of what a pattern below it gives."""
    root, found, _ = local_files(Source(name="a", path=str(folder / pattern), leave_out=leave_out))
    return [(root / name).relative_to(folder).as_posix() for name in found]


def tree(folder: Path) -> None:
    names = ("a.txt", "A.TXT", ".h.txt", "c[1].txt", "README.md", "fi/a.txt", "fi/new/b.txt", "fi/.old/c.txt")
    for name in (*names, "et/d.jsonl", "et/folder.txt/e.txt", "et/folder.txt/.f/g.txt", ".h/i.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x\n")


@pytest.mark.parametrize(("pattern", "found"), [
    ("*.txt", ["a.txt", "c[1].txt"]),
    ("c[[]?].t*", ["c[1].txt"]),
    ("[!a]*.txt", ["c[1].txt"]),
    ("*/*.txt", ["et/folder.txt/.f/g.txt", "et/folder.txt/e.txt", "fi/a.txt"]),
    ("**/*.txt", [
        "a.txt", "c[1].txt", "et/folder.txt/.f/g.txt", "et/folder.txt/e.txt", "fi/a.txt", "fi/new/b.txt",
    ]),
    ("**/new/*", ["fi/new/b.txt"]),
    ("f*/new/b.txt", ["fi/new/b.txt"]),
    ("*/.old/*", ["fi/.old/c.txt"]),
    (".*/*", [".h/i.txt"]),
    ("f*/**", ["fi/.old/c.txt", "fi/a.txt", "fi/new/b.txt"]),
    ("f*/../et/*.jsonl", ["fi/../et/d.jsonl"]),
])  # fmt: skip
@pytest.mark.parametrize("is_relative", [True, False])
def test_a_pattern_matches_what_glob_matches(tmp_path, monkeypatch, pattern, found, is_relative):
    """And folders that match are read with all that is in them."""
    tree(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert files_of(Path() if is_relative else tmp_path, pattern) == found
    matched = [Path(name) for name in glob.glob(pattern, recursive=True)]
    below = {path for one in matched for path in (one.rglob("*") if one.is_dir() else [one])}
    assert {path.as_posix() for path in below if path.suffix in (".txt", ".jsonl") and path.is_file()} == {
        *found
    }


@pytest.mark.parametrize("pattern", ["**/*.txt", "**", "*", "*/**/*.txt", "*/*/*/*.txt"])
def test_links_in_a_circle_end(tmp_path, pattern):
    """Each file is read once, under a name without a link if the pattern has it."""
    (tmp_path / "text" / "sub" / "deep").mkdir(parents=True)
    for name in ("a.txt", "sub/b.txt", "sub/deep/c.txt"):
        (tmp_path / "text" / name).write_text("x\n")
    for name in ("back", "again", "sub/up"):
        (tmp_path / "text" / name).symlink_to(tmp_path / "text")
    found = files_of(tmp_path / "text", pattern)
    if pattern[:3] != "*/*":
        assert found == ["a.txt", "sub/b.txt", "sub/deep/c.txt"]
    assert len({os.path.realpath(tmp_path / "text" / name) for name in found}) == len(found) == 3


@pytest.mark.parametrize("leave_out", [
    (), ("v*/*",), ("current/*",), ("a/link/*",), ("*/real/*",), ("a/*", "*/v2.txt"), ("*[k]/*", "?1/*"),
    ("*l*/*.txt", "v[!1]*"),
])  # fmt: skip
@pytest.mark.parametrize("pattern", ["", "*", "**", "*/*.txt", "**/*.txt", "*/*/*.txt", "[ac]*/**", "a/**"])
def test_a_file_is_left_out_by_its_name_and_read_by_another(tmp_path, pattern, leave_out):
    """Names are as glob finds them. A file is read once, by a name without a link if that is not left out."""
    for name in ("v1/v1.txt", "v2/v2.txt", "other/o.txt", "z/real/r.txt", "z/real/deep/d.txt", "a/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n")
    for link, target in (("current", "v2"), ("a/link", "../z/real"), ("a/again", "../current")):
        (tmp_path / link).symlink_to(target)
    matched = map(Path, glob.glob(str(tmp_path / pattern), recursive=True))
    found = set()
    for path in matched:
        walk = os.walk(path, followlinks=True)
        found |= {path} if path.is_file() else {Path(top) / name for top, _, names in walk for name in names}
    names: dict[str, set[str]] = {}
    for path in found:
        name = str(path.relative_to(tmp_path))
        if not any(fnmatch(name, one) for one in leave_out):
            names.setdefault(str(path.resolve().relative_to(tmp_path)), set()).add(name)
    if pattern[:1] in ("*", "["):  # whose names begin with the folder
        leave_out = tuple(f"{tmp_path.name}/{one}" for one in leave_out)
    if not names:
        with pytest.raises(KieloError, match="has no file of text"):
            files_of(tmp_path, pattern, *leave_out)
        return
    read = files_of(tmp_path, pattern, *leave_out)
    assert sorted(str((tmp_path / name).resolve().relative_to(tmp_path)) for name in read) == sorted(names)
    assert all(own in read or own not in names[own] and names[own] & {*read} for own in names)
    unread = local_files(Source(name="a", path=str(tmp_path / pattern), leave_out=leave_out))[2]
    assert len(unread) + len(read) == len({path.resolve() for path in found})


@pytest.mark.parametrize(("leave_out", "most"), [
    ((), 1), (("0/*",), 2), (("*/*",), 2), (("*/3/*", "*/5/7/*", "1?*"), 8), (("*",), 1),
])  # fmt: skip
@pytest.mark.parametrize("pattern", ["", "**/*.txt", "*/*/*/*/*/*/*.txt"])
def test_folders_that_link_to_each_other_are_not_read_by_every_name(
    tmp_path, monkeypatch, pattern, leave_out, most
):
    """12 folders have 12! names of 12 parts. A folder is listed as often as patterns tell names apart."""
    folders = [str(number) for number in range(12)]
    for one in folders:
        (tmp_path / one).mkdir()
        (tmp_path / one / "a.txt").write_text("x\n")
        for other in folders:
            (tmp_path / one / f"{other}_").symlink_to(tmp_path / other)
    listed, real = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or real(path))
    if leave_out in (("*",), ("*/*",)):
        with pytest.raises(KieloError, match="has no file of text"):
            files_of(tmp_path, pattern, *leave_out)
    else:
        found = files_of(tmp_path, pattern, *leave_out)
        assert len({(tmp_path / name).resolve() for name in found}) == len(found) == 12
    assert len(listed) <= 13 * most * (pattern.count("/") + 1)


@pytest.mark.parametrize("pattern", ["**/*.txt", "*/*.txt", "f*/new/*.txt", "fi/*.txt"])
def test_a_folder_that_a_pattern_cannot_read_is_refused(tmp_path, monkeypatch, pattern):
    """Its files would be left out silently. A folder that cannot match may be closed."""
    tree(tmp_path)
    closed = "fi/new" if "new" in pattern else "fi"

    def refusing(function):
        def called(path="."):
            if os.path.realpath(path) == str((tmp_path / closed).resolve()):
                raise PermissionError(13, "Permission denied", str(path))
            return function(path)

        return called

    monkeypatch.setattr(os, "listdir", refusing(os.listdir))
    monkeypatch.setattr(os, "scandir", refusing(os.scandir))
    with pytest.raises(KieloError, match=rf"{closed}: cannot be read \(Permission denied\). Fix"):
        files_of(tmp_path, pattern)
    if closed == "fi":
        assert files_of(tmp_path, "e*/*") == ["et/d.jsonl", "et/folder.txt/.f/g.txt", "et/folder.txt/e.txt"]
        assert files_of(tmp_path, "*.txt") == ["a.txt", "c[1].txt"]


@pytest.mark.parametrize(("name", "is_text"), [
    ("authors.txt", True), ("Changes in town.txt", True), ("notice.txt", True), ("Citation.txt", True),
    ("readme-et.txt", True), ("LICENSE.jsonl", True), ("checksums.jsonl.gz", True), ("COPYING.parquet", True),
    ("README.txt", False), ("Readme.TXT", False), ("license.html", False), ("AUTHORS.txt", False),
    ("NOTICE.txt.gz", False), ("SHA256SUMS.txt", False), ("dataset_infos.json", False),
])  # fmt: skip
def test_files_about_data_are_known_by_their_whole_name(tmp_path, name, is_text):
    """They are left out of a folder. A file whose own name is given is read."""
    for file in (name, "a.txt"):
        (tmp_path / file).write_text("x\n")
    _, read, unread = local_files(Source(name="a", path=str(tmp_path)))
    assert (read, unread) == ((sorted([name, "a.txt"]), []) if is_text else (["a.txt"], [name]))
    assert files_of(tmp_path, name) == [name]
    (tmp_path / "a.txt").unlink()
    if not is_text:
        with pytest.raises(KieloError, match=f"has no file of text .not read: {name}.. Fix: "):
            files_of(tmp_path, "")


def test_an_ignored_file_may_have_a_name_that_is_not_utf8(tmp_path):
    """It is shown with a backslash, in a record and in a refusal."""
    (tmp_path / "a.txt").write_text("x\n")
    (tmp_path / os.fsdecode(b"h\xf5bu.log")).write_text("x\n")
    assert local_files(Source(name="a", path=str(tmp_path)))[2] == [r"h\xf5bu.log"]
    (tmp_path / os.fsdecode(b"h\xf5bu.csv")).write_text("x\n")
    with pytest.raises(KieloError, match=r"would not be read: h\\xf5bu.csv. Fix"):
        files_of(tmp_path, "")


def test_a_link_may_lead_into_a_folder_whose_name_is_not_utf8(tmp_path):
    (tmp_path / os.fsdecode(b"\xff")).mkdir()
    (tmp_path / os.fsdecode(b"\xff") / "a.txt").write_text("x\n")
    (tmp_path / "text").symlink_to(os.fsdecode(b"\xff"))
    found, again = (fetch_sources(recipe(tmp_path / "text"), tmp_path / "raw", print)[0] for _ in range(2))
    assert (
        found == again
        and r"\xff/a.txt" in json.loads((tmp_path / "raw" / HASHES_NAME).read_text()).popitem()[0]
    )


def test_hash_follows_the_text(tmp_path):
    """A source's hash is that of its text: same text same hash, whatever happened in between."""
    file = tmp_path / "a.txt"

    def fingerprint():
        return fetch_sources(recipe(file), tmp_path / "raw", print)[0].fingerprint

    file.write_text("one\n")
    first = fingerprint()
    assert fingerprint() == first
    file.write_text("two!\n")
    assert fingerprint() != first
    file.write_text("one\n")
    assert fingerprint() == first


@pytest.mark.parametrize(
    ("files", "fetched"),
    [
        (("et/0.jsonl.xz", "et/1.ndjson", "et/2.json.gz", "et/stats.json", "README.md"), 3),
        (("et/0.json", "et/1.json", "dataset_infos.json"), 2),
    ],
)
def test_data_of_a_dataset_is_fetched_under_its_usual_names(tmp_path, monkeypatch, files, fetched):
    """A plain .json is data where there is nothing else: beside other data it has settings or counts."""
    covers = {".xz": lzma.compress, ".gz": gzip.compress}

    def written(dataset: str, file: str, local_dir: str, **more: object) -> None:
        path = Path(local_dir) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(covers.get(path.suffix, bytes)(b'{"text": "a"}\n'))

    hub = _hub(dict.fromkeys(files, ""))
    hub.hf_hub_download = written
    monkeypatch.setattr(download.shutil, "which", lambda program: None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    source = PACKAGE.model_copy(update={"huggingface_subset": None, "max_documents": None})
    (found,) = fetch_sources(_recipe(source), tmp_path, print)
    assert len(found.files) == fetched and all(name in files for name in found.files)
