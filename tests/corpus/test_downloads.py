"""Sources on disk and from elsewhere: which files they are, when they are read again, what fails and how."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from kielo.artifact.manifest import hash_json, read_manifest
from kielo.artifact.prefetched import text_folder
from kielo.corpus import download, fetch
from kielo.corpus.download import FetchProblem, fetch_debian_package, fetch_huggingface_dataset
from kielo.corpus.fetch import downloaded, fetch_sources, fetch_text, file_stamps, is_fetched
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus, Recipe, Source


def recipe(*sources) -> Recipe:
    return Recipe(name="t", language="et", corpus=Corpus(sources=list(sources)))


def found(tmp_path: Path, **source):
    (one,) = fetch_sources(recipe({"name": "a"} | source), tmp_path / "run" / "raw", print)
    return one


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}\n")
    return folder


def test_files_of_a_folder_and_of_a_pattern(tmp_path):
    """Of the source's kind, sorted, below links too, each once; names are relative to the folder, or to that
    above the pattern's first sign.
    """
    text = write(tmp_path / "text", "b.txt", "a.txt", "deep/c.jsonl", "deep/x.odd", ".hidden.txt", "d[1].txt")
    (text / "deep" / "round").symlink_to(text)
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "elsewhere", "e.txt")
    (text / "link").symlink_to(tmp_path / "elsewhere")
    whole = found(tmp_path, path=str(text))
    assert whole.files == ("a.txt", "b.txt", "d[1].txt", "deep/c.jsonl", "link/e.txt")
    assert (whole.root, whole.origin, whole.name, whole.kind) == (str(text), str(text), "a", "text")
    assert whole.stamps == file_stamps(text, whole.files) and len(whole.stamps) == 5
    assert whole.stamps[0] == (14, (text / "a.txt").stat().st_mtime_ns)
    for pattern, root, files in (
        ("*.txt", tmp_path, ("text/a.txt", "text/b.txt", "text/d[1].txt")),
        ("*/*.jsonl", tmp_path, ("text/deep/c.jsonl",)),
        ("d[[]1].txt", text, ("d[1].txt",)),
        ("dee[p]", text, ("deep/c.jsonl", "deep/round/a.txt")),
    ):
        one = found(tmp_path, path=str(text / pattern))
        assert one.root == str(root) and one.files[: len(files)] == files, pattern
    write(tmp_path / "other", "e.txt", "x/y/e.txt")
    deep = found(tmp_path, path=str(tmp_path / "other" / "**" / "e.txt"))
    assert deep.files == ("other/e.txt", "other/x/y/e.txt")
    single = found(tmp_path, path=str(text / "a.txt"), max_documents=3, documents="files", clean=False)
    assert (single.root, single.files) == (str(text), ("a.txt",))
    assert (single.max_documents, single.documents, single.is_cleaned) == (3, "files", False)
    assert single.text_fields == ("text",)
    assert found(tmp_path, path=str(text / "d[1].txt")).files == ("d[1].txt",)


def test_files_that_cannot_be_a_source(tmp_path):
    """A wrong format, a link that leads nowhere, what is no file, a name that is no UTF-8, nothing at all."""
    text = write(tmp_path / "text", "a.pdf")
    for path, words in (
        (text / "a.pdf", r"a: .*a.pdf: unknown format. Fix: \.txt"),
        (text, r"text: has no file of text \(not read: a.pdf\). Fix: "),
        (text / "*.txt", "no such file or folder, or no match"),
    ):
        with pytest.raises(KieloError, match=words):
            found(tmp_path, path=str(path))
    (text / "b.txt").symlink_to(text / "gone")
    with pytest.raises(KieloError, match="b.txt: a link that leads nowhere. Fix: repair"):
        found(tmp_path, path=str(text))
    (text / "b.txt").unlink()
    os.mkfifo(text / "b.txt")
    with pytest.raises(KieloError, match="b.txt: neither a file nor a folder. Fix: repair"):
        found(tmp_path, path=str(text))
    (text / "b.txt").unlink()
    (text / "a.pdf").unlink()
    (text / "folder.txt").mkdir()  # a folder with a text's name is a folder
    write(text / "folder.txt", "c.txt")
    assert found(tmp_path, path=str(text)).files == ("folder.txt/c.txt",)
    odd = os.fsencode(text) + b"/\xf5.txt"
    Path(os.fsdecode(odd)).write_text("x")
    with pytest.raises(KieloError, match="not UTF-8. Fix: rename the file"):
        found(tmp_path, path=str(text))
    with pytest.raises(KieloError, match="gone.txt: cannot be read .No such file"):
        file_stamps(text, ["gone.txt"])


def test_a_file_without_permission(tmp_path, monkeypatch):
    text = write(tmp_path / "text", "a.txt")
    monkeypatch.setattr(fetch.os, "access", lambda path, mode: mode != os.R_OK)
    with pytest.raises(KieloError, match="a.txt: no permission to read it. Fix: `chmod"):
        found(tmp_path, path=str(text / "a.txt"))


def test_the_runs_own_files_are_no_source(tmp_path):
    """Neither its folder nor one that holds it, nor what stages replace; other files in it are."""
    run = write(tmp_path / "run", "corpus/a.txt", "mine/b.txt", "raw/c.txt")
    for place in (tmp_path, run):
        with pytest.raises(KieloError, match="contains the run's own folder .*run, whose files"):
            found(tmp_path, path=str(place))
    with pytest.raises(KieloError, match="corpus/a.txt is in .*corpus, which Kielo writes"):
        found(tmp_path, path=str(run / "corpus" / "a.txt"))
    assert found(tmp_path, path=str(run / "mine")).files == ("b.txt",)


def test_contents_are_read_again_when_a_file_changes(tmp_path, monkeypatch):
    """Another size, time or inode; the hash is of names and contents."""
    text, hashed = write(tmp_path / "text", "a.txt", "b.txt"), []
    real = fetch.hash_file
    monkeypatch.setattr(fetch, "hash_file", lambda path: hashed.append(Path(path).name) or real(path))
    first = found(tmp_path, path=str(text)).fingerprint
    assert hashed == ["a.txt", "b.txt"]
    assert first == hash_json({name: real(text / name) for name in ("a.txt", "b.txt")})
    cache = tmp_path / "run" / "raw" / ".kielo-hashes.json"
    written = cache.stat()
    assert found(tmp_path, path=str(text)).fingerprint == first and len(hashed) == 2
    assert (cache.stat().st_ino, cache.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    status = (text / "a.txt").stat()
    os.utime(text / "a.txt", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert found(tmp_path, path=str(text)).fingerprint == first and hashed[2:] == ["a.txt"]
    (text / "c.txt").write_text("text of b.txt\n")
    (text / "c.txt").replace(text / "b.txt")
    assert found(tmp_path, path=str(text)).fingerprint == first and hashed[3:] == ["b.txt"]
    assert len(json.loads(cache.read_text())) == 4
    for content in ("[]", "{"):
        cache.write_text(content)
        assert found(tmp_path, path=str(text)).fingerprint == first
    assert len(hashed) == 8

    def full(path, content):
        raise OSError

    monkeypatch.setattr(fetch, "write_json_atomically", full)
    cache.unlink()
    assert found(tmp_path, path=str(text)).fingerprint == first and not cache.exists()


# --- From elsewhere ---

PACKAGE = Source(name="help", debian_package="help-et", huggingface_dataset="o/wiki", max_documents=5)


def test_a_package_of_debian_by_hand(tmp_path, monkeypatch):
    """Updated, downloaded and unpacked in a folder of its own; pages and the licence are kept, no links."""
    commands, failing = [], set()
    monkeypatch.setattr(download.shutil, "which", lambda program: program not in failing)

    def run(command, **keys):
        commands.append((command, keys))
        workplace = Path(keys.get("cwd", tmp_path))
        if command[0] == "apt-config":
            return SimpleNamespace(stdout='Acquire::http::Proxy "p";\nDPkg::Post-Invoke "x";\n')
        if "download" in command and "deb" not in failing:
            (workplace / "help-et_1%3a2.0-1_all.deb").touch()
        if "-x" in command:
            write(workplace / "tree", "usr/doc/copyright", "usr/a.html", "usr/b.htm", "usr/c.css")
            (workplace / "tree" / "usr" / "0.html").symlink_to("a.html")
        code = int(any(word in failing for word in command))
        return SimpleNamespace(returncode=code, stderr=f"W: x\nE: {command[1]} failed\n")

    monkeypatch.setattr(download.subprocess, "run", run)
    assert fetch_debian_package(PACKAGE, tmp_path) == "Debian package help-et 1:2.0-1"
    pages = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert pages == ["pages/usr/a.html", "pages/usr/b.htm", "pages/usr/doc/copyright"]
    assert not (tmp_path / "apt").exists()
    (_, update, fetched, unpack) = commands
    assert update[0] == ["apt-get", "-qq", "update"] and unpack[0][:2] == ["dpkg-deb", "-x"]
    assert fetched[0] == ["apt-get", "-qq", "download", "--", "help-et"]
    assert update[1]["cwd"] == tmp_path / "apt" and update[1]["env"]["LC_ALL"] == "C"
    assert update[1]["timeout"] == 300 and update[1]["stdin"] == subprocess.DEVNULL
    assert update[1]["capture_output"] is True and update[1]["text"] is True
    failing.add("update")  # one of several servers may be missing
    assert fetch_debian_package(PACKAGE, tmp_path / "b") == "Debian package help-et 1:2.0-1"
    for word, told in (
        ("download", "E: -qq failed"), ("deb", "E: -qq failed"), ("-x", "E: -x failed"),
        ("apt-config", "apt-config is missing"),
    ):  # fmt: skip
        failing.clear()
        failing.add(word)
        with pytest.raises(FetchProblem, match=told):
            fetch_debian_package(PACKAGE, tmp_path / word)

    def late(command, **keys):
        if command[0] == "apt-config":
            return SimpleNamespace(stdout="")
        raise subprocess.TimeoutExpired(command, 300)

    monkeypatch.setattr(download.subprocess, "run", late)
    failing.clear()
    with pytest.raises(FetchProblem, match="apt-get -qq update: no answer in 300 s"):
        fetch_debian_package(PACKAGE, tmp_path / "late")


def test_apt_is_told_to_write_nowhere_else(tmp_path, monkeypatch):
    """Of the machine's settings those of `Acquire` alone stay; the rest is line by line."""
    dump = 'Acquire::http::Proxy "p";\nAPT::Update::Post-Invoke "x";\nAcquire::Languages "et";\n'
    asked = []

    def run(command, **keys):
        asked.append((command, keys))
        return SimpleNamespace(stdout=dump)

    monkeypatch.setattr(download.subprocess, "run", run)
    path = download.write_apt_configuration(tmp_path / "w")
    assert path == tmp_path / "w" / "apt.conf" and path.read_text().splitlines() == [
        'Acquire::http::Proxy "p";', 'Acquire::Languages "et";', "#clear Acquire::Languages;",
        'Dir::Etc::parts "/dev/null";', 'Dir::Etc::main "/dev/null";', f'Dir::State "{tmp_path}/w/state";',
        f'Dir::State::status "{tmp_path}/w/status";', f'Dir::Cache "{tmp_path}/w/cache";',
        'APT::Sandbox::User "root";', 'Acquire::Languages "none";', 'Acquire::Retries "2";',
        'Acquire::http::Timeout "30";', 'Acquire::https::Timeout "30";',
    ]  # fmt: skip
    assert (tmp_path / "w" / "state/lists/partial").is_dir() and (tmp_path / "w" / "status").is_file()
    assert (tmp_path / "w" / "cache/archives/partial").is_dir()
    assert download.write_apt_configuration(tmp_path / "w") == path
    assert asked[0] == (
        ["apt-config", "dump"],
        {"capture_output": True, "text": True, "timeout": 60, "check": False},
    )


def test_errors_of_programs_on_one_line():
    last = download.last_errors
    assert last("a\n\n E: b\nc\nE: d\n") == "E: b E: d" and last("a\n b \n\nc\nd\n") == "a b c"
    assert last("x" * 600) == "x" * 500 and last("") == last("\n ") == "failed without saying why"


class Hub:
    """Serves files, in place of the network. asked: what was downloaded."""

    def __init__(self, **files):
        self.files = {name.replace("__", "/").replace("_", "."): content for name, content in files.items()}
        self.asked = []

    def HfApi(self):  # noqa: N802
        return self

    def dataset_info(self, dataset, timeout):
        assert timeout == 30
        names = [*self.files, "README.md"]
        return SimpleNamespace(sha="abc", siblings=[SimpleNamespace(rfilename=name) for name in names])

    def hf_hub_download(self, dataset, file, *, repo_type, revision, local_dir):
        assert (repo_type, revision) == ("dataset", "abc")
        if isinstance(self.files[file], Exception):
            raise self.files[file]
        self.asked.append(file)
        path = Path(local_dir) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.table({"text": ["x"] * self.files[file]}), path)
        else:
            path.write_text(self.files[file])


def test_a_dataset_of_the_hub_by_hand(tmp_path, monkeypatch):
    """Data files of the subset, sorted, until there are enough rows; each in its place."""

    def fetched(hub: Hub, **keys) -> tuple[str, list[str]]:
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        source = Source(name="w", **{"huggingface_dataset": "o/wiki"} | keys)
        origin = fetch_huggingface_dataset(source, folder, tmp_path / "aside")
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        assert files == sorted(hub.asked)
        return origin, hub.asked

    rows = {
        "et__b_parquet": 3,
        "et__a_parquet": 2,
        "fi__c_jsonl": "x",
        "et__d_parquet": 9,
        "ett__e_parquet": 1,
    }
    for most, number in ((None, 3), (6, 3), (5, 2), (3, 2), (2, 1), (1, 1)):
        origin, asked = fetched(Hub(**rows), huggingface_subset="et", max_documents=most)
        assert asked == ["et/a.parquet", "et/b.parquet", "et/d.parquet"][:number]
        assert origin == "Hugging Face dataset o/wiki et revision abc"
    origin, asked = fetched(Hub(a_jsonl="x", b_jsonl_gz="y", c_jsonl_zst="z", d_csv="no"), max_documents=1)
    assert asked == ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst"]  # whose rows are not known
    assert origin == "Hugging Face dataset o/wiki revision abc"
    origin, asked = fetched(Hub(et__deep__a_jsonl="x", et__deep__b_jsonl="y"), huggingface_subset="et")
    assert asked == ["et/deep/a.jsonl", "et/deep/b.jsonl"]
    for hub, words in (
        (Hub(**{".._x_jsonl": "x"}), "outside of the folder"),
        (Hub(a_csv="x"), "no data files in subset None. Its subsets: none"),
        (Hub(a_jsonl=KeyError("odd")), "KeyError: 'odd'"),
    ):
        if words.startswith("outside"):
            hub.files = {"../x.jsonl": "x"}
        with pytest.raises(FetchProblem, match=words):
            fetched(hub)
    with pytest.raises(FetchProblem, match="no data files in subset 'sv'. Its subsets: et, ett, fi"):
        fetched(Hub(**rows), huggingface_subset="sv")
    hub = Hub(a_jsonl="x")
    hub.files = {"/etc/x.jsonl": "x"}
    with pytest.raises(FetchProblem, match="'/etc/x.jsonl' would be written outside"):
        fetched(hub)


def test_each_way_is_tried_and_what_failed_is_noted(tmp_path, monkeypatch):
    """The package first, else the dataset; files of no known format are none; what was brought is taken."""
    said, ways = [], {"package": ("pages/a.html", None), "dataset": ("a.jsonl", None)}

    def way(kind):
        def fetch_it(source, folder, aside=None):
            name, problem = ways[kind]
            if aside is not None:
                aside.mkdir(exist_ok=True)
            if problem:
                raise FetchProblem(problem)
            write(folder, name)
            return f"{kind} of {source.name}"

        return fetch_it

    monkeypatch.setattr(fetch, "fetch_debian_package", way("package"))
    monkeypatch.setattr(fetch, "fetch_huggingface_dataset", way("dataset"))

    def fetched(folder: str, prefetched=None, source=PACKAGE):
        said.clear()
        return fetch_sources(recipe(source), tmp_path / folder, said.append, prefetched)[0]

    one = fetched("a")
    assert (one.origin, one.files, one.root) == (
        "package of help",
        ("pages/a.html",),
        str(tmp_path / "a/help"),
    )
    assert said == ["help: fetching Debian package help-et"]
    brought = read_manifest(tmp_path / "a/help")
    assert brought.counts == {"origin": "package of help", "problems": [], "versions": {}}
    assert (brought.kind, brought.version) == ("raw", 1)  # another number would fetch all of it again
    assert fetched("a") == one and said == ["help: fetched before"]
    ways["package"] = ("notes.pdf", None)
    other = fetched("b")
    told = "Debian package help-et: no files of a known format in it (.txt, .jsonl, "
    assert (other.origin, other.files) == ("dataset of help", ("a.jsonl",))
    assert said[1].startswith(f"help: {told}") and said[2] == "help: fetching Hugging Face dataset o/wiki"
    assert read_manifest(tmp_path / "b/help").counts["problems"][0].startswith(told)
    assert not (tmp_path / "b" / ".help.downloads").exists()
    ways["dataset"] = ("a.jsonl", "no network")
    with pytest.raises(
        KieloError,
        match="help: could not be fetched. Debian.*; Hugging .*no network. Fix: use a text of your own",
    ):
        fetched("c")
    assert (tmp_path / "c" / ".help.downloads").exists() and not (tmp_path / "c/help").exists()
    changed = PACKAGE.model_copy(update={"max_documents": 6})
    with pytest.raises(KieloError, match="could not be fetched"):
        fetched("a", source=changed)
    # What `kielo prefetch` brought.
    ways["package"] = ("pages/a.html", None)
    brought, raw = tmp_path / "brought", tmp_path / "d"
    assert not is_fetched(PACKAGE, raw, brought)
    with pytest.raises(KieloError, match="corpus.sources, help"):
        fetched("d", brought)
    root, manifest = fetch_text(PACKAGE, brought, said.append)
    wanted = {"debian_package": "help-et", "huggingface_dataset": "o/wiki", "huggingface_subset": None}
    wanted["max_documents"] = 5
    assert root == text_folder(brought, "help", wanted) and manifest.counts["problems"] == []
    assert is_fetched(PACKAGE, raw, brought) and not is_fetched(PACKAGE, raw, None)
    assert not is_fetched(changed, raw, brought) and is_fetched(PACKAGE, tmp_path / "a", None)
    taken = fetched("d", brought)
    assert (taken.root, said) == (str(root), ["help: fetched before"]) and not raw.exists()
    said.clear()
    assert fetch_text(PACKAGE, brought, said.append) == (root, manifest) and said == ["help: fetched before"]
    local = Source(name="x", path="a.txt")
    assert downloaded([local, PACKAGE, Source(name="y", huggingface_dataset="o/d")])[0] is PACKAGE
    assert len(downloaded([local, PACKAGE, Source(name="y", huggingface_dataset="o/d")])) == 2
