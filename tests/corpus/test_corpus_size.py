"""30 MB of text in 1, 4 and 16 parts: the same bytes, all planted copies, and the memory of workers."""

import json
import runpy
from pathlib import Path

import pytest

from kielo.artifact.manifest import finished_manifest, hash_manifest
from kielo.corpus import corpus_parts, corpus_tasks
from kielo.corpus.corpus_stage import run_corpus
from kielo.recipe.sections import Corpus, Recipe

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "data" / "corpus_size.py"))
BYTES, MOST_BYTES_OF_WORKER = 30_000_000, 300_000_000


@pytest.mark.full
def test_the_text_is_as_planned():
    """Documents, exact copies and near copies, counted in the text. The same bytes at each call."""
    text = BENCHMARK["SyntheticText"](40)
    chunks = [text.chunk(number)[0] for number in range(5)]
    assert chunks == [BENCHMARK["SyntheticText"](40).chunk(number)[0] for number in range(5)]
    documents = [json.loads(line)["text"] for chunk in chunks for line in chunk.splitlines()]
    assert len(documents) == 200 and len(set(documents)) == 200 - 4 * 2
    words = [set(enumerate(text.split())) for text in set(documents)]
    near = [len(a & b) / len(a) for n, a in enumerate(words) for b in words[:n] if len(a & b) > 0.8 * len(a)]
    assert len(near) == 4 * 2 and min(near) > 0.9
    assert text.chunk(4)[1] == {"documents": 40, "exact_copies": 2, "near_copies": 2}


@pytest.mark.full
@pytest.mark.timeout(1900)  # beside two other processes on two cores
def test_large_text_in_parts(tmp_path, monkeypatch):
    """Near and exact copies go. Nothing but the number of parts differs."""
    pytest.importorskip("rensa")
    text, hashes = tmp_path / "text", set()
    planted = BENCHMARK["write_text"](text, BYTES, 1)
    sizes = [path.stat().st_size for path in sorted(text.iterdir())]
    assert 0.95 * BYTES < sum(sizes) < 1.05 * BYTES and len(sizes) == 16
    corpus = Corpus(
        sources=str(text), language_identifier="lid176", near_copies="hplt",
        line_language_threshold=0, document_language_threshold=0,
    )  # fmt: skip
    for number in (1, 4, 16):
        files = len(sizes) // number
        most = max(sum(sizes[begin : begin + files]) for begin in range(0, len(sizes), files))
        monkeypatch.setattr(corpus_parts, "part_bytes", lambda total, most=most: most)
        peaks, folder = BENCHMARK["PeaksOfWorkers"](), tmp_path / f"{number} parts"
        with monkeypatch.context() as kept:
            kept.setattr("kielo.corpus.corpus_stage.remove_tasks", lambda *_, **__: None)
            peaks.start()
            run_corpus(Recipe(name="t", language="et", corpus=corpus), folder, tmp_path / "raw", False)
        of_workers = peaks.end()
        assert of_workers and max(of_workers) < MOST_BYTES_OF_WORKER  # a part is the work of one of them
        (work,) = (tmp_path / f".{number} parts.tasks").iterdir()
        assert len(list((work / "clean").iterdir())) == number
        corpus_tasks.remove_tasks(folder, work, has_others=False)
        hashes.add(hash_manifest(folder))
    counts = finished_manifest(folder).counts
    copies = planted["exact_copies"] + planted["near_copies"]
    assert len(hashes) == 1 and counts["documents_in"] == planted["documents"]
    assert 0.98 * copies <= counts["documents_in"] - counts["documents_kept"] <= copies
