"""Near copies: planted copies go, other text stays, clusters as a plain search finds them."""

import random
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest

from kielo.artifact.documents import read_documents
from kielo.artifact.manifest import hash_manifest
from kielo.corpus import corpus_parts, near_copies
from kielo.corpus.corpus_stage import run_corpus
from kielo.corpus.near_copies import PUBLISHED, root_of, unite
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus, Recipe

GENERATOR = random.Random(5)
LETTERS = "aeioukstlmnrpvd"
WORDS = ["".join(GENERATOR.choices(LETTERS, k=GENERATOR.randint(2, 9))) for _ in range(4000)]


def text_of(number: int, words: int = 150) -> list[str]:
    return random.Random(number).choices(WORDS, k=words)


def changed(words: list[str], share: float, seed: int) -> list[str]:
    """Return the words with a share of them replaced, as edits of runs of words replace them."""
    generator, words = random.Random(seed), list(words)
    for place in generator.sample(range(len(words)), round(share * len(words))):
        words[place] = generator.choice(WORDS)
    return words


def run(folder: Path, name: str, texts: list[list[str]], **keys) -> list[dict]:
    lines = (orjson.dumps({"id": f"{n}", "text": " ".join(text)}) for n, text in enumerate(texts))
    (folder / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    keys = {"line_language_threshold": 0, "document_language_threshold": 0, "near_copies": "fineweb2"} | keys
    corpus = Corpus(sources=str(folder / "a.jsonl"), workers=1, deduplicate_lines=False, **keys)
    run_corpus(Recipe(name="t", language="et", corpus=corpus), folder / name, folder / "raw", False)
    return list(read_documents(folder / name / "documents"))


def test_trees_of_pairs():
    """Components of a random graph, beside a search; the root is the smallest number."""
    generator = np.random.default_rng(4)
    pairs = generator.integers(0, 500, (400, 2), dtype=np.uint32)
    parent = np.arange(500, dtype=np.uint32)
    for some in np.split(pairs, [0, 7, 150]):
        unite(parent, some)
    label = list(range(500))
    for _ in range(500):
        for first, second in pairs.tolist():
            label[first] = label[second] = min(label[first], label[second])
    assert root_of(parent, np.arange(500, dtype=np.uint32)).tolist() == label


def test_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(KieloError, match='corpus.near_copies needs a package. Fix: pip install "rensa>=0.5"'):
        near_copies.refuse_missing()


def test_shingles_are_runs_of_words_of_one_document():
    texts = [["a", "b", "c", "d"], ["x"], [], ["b", "c", "d"]]
    runs, begins = near_copies.shingles(texts, 3)
    assert begins.tolist() == [0, 2, 2, 2, 3] and runs[1] == runs[2] != runs[0]
    assert [len(set(near_copies.shingles([["a", "b", "a"]], n)[0].tolist())) for n in (1, 2, 3)] == [2, 2, 1]
    assert (PUBLISHED["fineweb2"].bands * PUBLISHED["fineweb2"].rows, PUBLISHED["fineweb2"].words) == (112, 5)


@pytest.mark.parametrize("keep, stays", [("first", "0"), ("longest", "3")])
def test_a_document_of_a_cluster_stays_by_the_rule(tmp_path, monkeypatch, keep, stays):
    """It is the same for any parts. The size of its cluster is kept, and exact copies count in it."""
    pytest.importorskip("rensa")
    first = text_of(1)
    texts = [first, text_of(2), changed(first, 0.01, 3), [*first, "lõpp"], first, text_of(4), ["lühike"] * 3]
    hashes = set()
    for size in (1 << 30, 1000):
        monkeypatch.setattr(corpus_parts, "part_bytes", lambda total, size=size: size)
        made = run(tmp_path, f"{size}", texts, near_copies_keep=keep, min_document_characters=1)
        hashes.add(hash_manifest(tmp_path / f"{size}"))
    assert [document["id"] for document in made] == sorted([stays, "1", "5", "6"])
    sizes = {document["id"]: document["metadata"].get("cluster_size") for document in made}
    assert sizes == {stays: 4, "1": None, "5": None, "6": None} and len(hashes) == 1


@pytest.mark.full
@pytest.mark.parametrize("how, share", [("hplt", 0.05), ("fineweb2", 0.01)])
def test_planted_copies_go_and_other_text_stays(tmp_path, how, share):
    """Recall ≥ 0.95 of copies with a share of words replaced, of 150 to 900 words; others stay ≥ 0.99."""
    pytest.importorskip("rensa")
    originals = [text_of(n, 150 + 3 * (n % 250)) for n in range(400)]
    copies = [changed(text, share, 9000 + n) for n, text in enumerate(originals[:200])]
    made = run(tmp_path, "c", originals + copies, near_copies=how, near_copies_keep="first")
    left = {int(document["id"]) for document in made}
    assert sum(number < 400 for number in left) >= 0.99 * 400
    assert sum(number >= 400 for number in left) <= 0.05 * 200
