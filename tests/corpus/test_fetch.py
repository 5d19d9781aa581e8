"""Sources are found or fetched, the outcome is recorded, and what cannot be had is said with its reasons."""

import gzip
import lzma
import sys
import types
from pathlib import Path

import pytest

from kielo.artifact.manifest import read_manifest
from kielo.corpus import download
from kielo.corpus.fetch import fetch_sources
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
    with pytest.raises(KieloError, match="no such file or folder, or no match"):
        fetch_sources(recipe(tmp_path / name), tmp_path / "raw", print)


def test_folder_without_text_is_refused(tmp_path):
    """A folder of other things is refused with the formats that are read."""
    (tmp_path / "a.docx").write_bytes(b"PK")
    with pytest.raises(KieloError, match=r"no file of a known format.*\.parquet"):
        fetch_sources(recipe(tmp_path), tmp_path / "raw", print)


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
