"""The corpus stage: one outcome for any number of workers, a funnel that adds up, clean failures."""

import json
import subprocess
import sys

import pytest
import zstandard

from kielo.artifact.documents import read_documents
from kielo.artifact.manifest import hash_manifest
from kielo.corpus.corpus_stage import run_corpus
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus, Recipe
from tests.corpus.texts import ENGLISH, estonian_document, recipe


def _write_text(path):
    """24 Estonian documents, an English one, a mixed one, and duplicates of documents and lines."""
    texts = [estonian_document(number) for number in range(24)]
    texts += [
        "\n".join(ENGLISH),
        estonian_document(30) + "\n" + ENGLISH[0],
        texts[3],
        texts[4] + "\nA",
        "Lühike lause on siin.",
    ]
    path.write_text("".join(json.dumps({"id": f"n{n}", "text": text}) + "\n" for n, text in enumerate(texts)))
    return texts


def test_same_corpus_for_any_number_of_workers_and_a_funnel_that_adds_up(tmp_path):
    """1 and 3 workers give the same bytes; what steps dropped and what is left sum to what came in."""
    texts = _write_text(tmp_path / "a.jsonl")
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write("no JSON\n")
    manifests = {
        workers: run_corpus(
            recipe(tmp_path / "a.jsonl", workers=workers), tmp_path / f"c{workers}", tmp_path / "raw", False
        )
        for workers in (1, 3)
    }
    assert hash_manifest(tmp_path / "c1") == hash_manifest(tmp_path / "c3")
    assert sorted(path.name for path in (tmp_path / "c3").iterdir()) == [
        "documents",
        "funnel.json",
        "manifest.json",
    ]

    documents = list(read_documents(tmp_path / "c1" / "documents"))
    expected = texts[:24] + [estonian_document(30)]
    assert [document["text"] for document in documents] == expected
    assert {document["source"] for document in documents} == {"a"} and documents[24]["id"] == "n25"

    counts, rows = manifests[1].counts, json.loads((tmp_path / "c1" / "funnel.json").read_text())["steps"]
    assert (counts["documents_in"], counts["documents_kept"]) == (len(texts) + 1, 25)
    assert (
        counts["sources"][0]["bad_records"] == 1
        and "a.jsonl, line 30" in counts["sources"][0]["bad_examples"][0]
    )
    for what in ("documents", "bytes"):
        assert sum(row[what] for row in rows) == counts[f"{what}_in"] - counts[f"{what}_kept"]
        assert rows[-1][f"{what}_left"] == counts[f"{what}_kept"]
    assert rows[-1]["words_left"] == sum(len(document["text"].split()) for document in documents)


def test_same_messages_for_any_number_of_workers(tmp_path, capsys):
    """Reasons of equally many documents, examples of one document and of several, and bad records."""
    wrong = [[], [("user", "a")], [("user", "a"), ("assistant", " ")], [("user", "a"), ("user", "b")]]
    chats = [
        [{"role": role, "content": text} for role, text in chat]
        for chat in (*wrong[::-1], [("user", "a"), ("assistant", "b")], *wrong)
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    foreign = ["Дом", "Привет, мир", "Привет, мир"]
    texts = ["\n".join([estonian_document(number), *foreign[3 - number % 4 :]]) for number in range(12)]
    lines = [json.dumps({"text": text}) for text in texts]
    lines[5:5] = lines[9:9] = ["no JSON", "{}", "no JSON", "{}"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    paths = [("a.jsonl", "text"), ("c.jsonl", "instructions")]
    sources = [{"path": str(tmp_path / name), "kind": kind} for name, kind in paths]
    told = {}
    for workers in (1, 3):
        corpus = Corpus(sources=sources, workers=workers, max_bad_share=0.9)
        made = run_corpus(
            Recipe(name="t", language="et", corpus=corpus), tmp_path / f"c{workers}", tmp_path / "raw"
        )
        first, *rest = capsys.readouterr().err.splitlines()
        assert first == f"corpus: cleaning 2 files with {workers} workers"
        told[workers] = rest, made.counts
        assert hash_manifest(tmp_path / f"c{workers}") == hash_manifest(tmp_path / "c1")
    assert told[1] == told[3]
    (examples,) = [line for line in told[1][0] if "another script dropped" in line]
    assert examples.endswith(
        "a: 18 lines with letters of another script dropped, e.g. Привет, мир | Привет, мир"
    )


def test_nothing_to_do_when_nothing_changed(tmp_path):
    """A second run leaves the folder alone, also with other workers; other settings or text do not."""
    file, folder = tmp_path / "a.jsonl", tmp_path / "corpus"
    _write_text(file)
    first = run_corpus(recipe(file), folder, tmp_path / "raw", False)
    before = (folder / "manifest.json").stat().st_mtime_ns
    assert run_corpus(recipe(file, workers=2), folder, tmp_path / "raw", False) == first
    assert (folder / "manifest.json").stat().st_mtime_ns == before
    changed = run_corpus(recipe(file, min_document_characters=10), folder, tmp_path / "raw", False)
    assert changed.counts["documents_kept"] == first.counts["documents_kept"] + 1
    file.write_text(json.dumps({"text": estonian_document(0)}))
    assert run_corpus(recipe(file), folder, tmp_path / "raw", False).counts["documents_in"] == 1


def test_empty_corpus_fails_with_the_share_at_each_threshold(tmp_path):
    """English text in an Estonian recipe is an error with funnel and thresholds, and leaves no folder."""
    (tmp_path / "a.txt").write_text("\n".join(ENGLISH))
    with pytest.raises(
        KieloError, match=r"(?s)nothing is left.*looks like en.*share of lines.*0.65: 0.0%.*0.95"
    ):
        run_corpus(recipe(tmp_path / "a.txt"), tmp_path / "corpus", tmp_path / "raw", False)
    (tmp_path / "a.txt").write_text("\n \n")
    with pytest.raises(KieloError, match=r"no document in .*a\.txt"):
        run_corpus(recipe(tmp_path / "a.txt"), tmp_path / "corpus", tmp_path / "raw", False)
    assert not list(tmp_path.glob("corpus*"))


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_input_keeps_the_corpus_that_was_there(tmp_path, workers):
    """A text that turns out damaged, in this process or in a worker, leaves the earlier corpus whole."""
    good = tmp_path / "good.jsonl"
    _write_text(good)
    folder = tmp_path / "corpus"
    run_corpus(recipe(good), folder, tmp_path / "raw", False)
    before = hash_manifest(folder)
    bad = tmp_path / "bad.jsonl.zst"
    bad.write_bytes(zstandard.compress(good.read_bytes())[:-20])
    with pytest.raises(KieloError, match=r"bad\.jsonl\.zst: cut short"):
        run_corpus(recipe(bad, workers=workers), folder, tmp_path / "raw", False)
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"hea\nhalb \xf5\n")
    with pytest.raises(KieloError, match=r"bad\.txt, line 2: invalid UTF-8"):
        run_corpus(recipe(bad, workers=workers), folder, tmp_path / "raw", False)
    assert hash_manifest(folder) == before
    assert not list(tmp_path.glob("corpus.*"))


def test_a_script_without_a_main_guard_can_call_it(tmp_path):
    """Workers never import the caller's main file, so a plain script, without the guard, runs once."""
    _write_text(tmp_path / "a.jsonl")
    script = tmp_path / "my script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from kielo.corpus.corpus_stage import run_corpus\n"
        "from kielo.recipe.sections import Corpus, Recipe\n"
        "here = Path(__file__).parent\n"
        "corpus = Corpus(sources=str(here / 'a.jsonl'), workers=2)\n"
        "run_corpus(Recipe(name='t', language='et', corpus=corpus), here / 'corpus', here / 'raw')\n"
        "print('ran', __file__ is not None)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.stdout == "ran True\n", done.stderr
    assert len(done.stderr.splitlines()) == 3 and "kept 25 of 29 documents" in done.stderr
