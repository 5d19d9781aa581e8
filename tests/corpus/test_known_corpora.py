"""HPLT's and FineWeb2's files as they are published: what becomes metadata, and filters by their scores."""

import json

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from kielo.artifact.documents import read_documents
from kielo.artifact.stage_counts import Funnel
from kielo.artifact.stage_json import read_json
from kielo.corpus.corpus_stage import run_corpus
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus, Recipe, Source
from tests.corpus.texts import estonian_document

# A record of https://hplt-project.org/datasets/v3.0, with all its fields.
HPLT = {
    "f": "./path/1.warc.gz", "o": 578687, "s": 17058, "rs": 102687, "u": "https://a.ee/1", "c": "text/html",
    "ts": "2021-11-28T06:59:26Z", "de": "utf-8", "crawl_id": "wide17", "lang": ["ekk_Latn", "fin_Latn"],
    "prob": [0.91, 0.05], "xml": "<doc/>", "html_lang": ["et"], "cluster_size": 3, "seg_langs": ["ekk_Latn"],
    "id": "h1", "filter": "keep", "pii": [[1, 4]], "doc_scores": [7.5, 9, 8, 10, 9, 10, 10, 9, 8],
    "web-register": {"NA": 0.9},
}  # fmt: skip
# A row of https://huggingface.co/datasets/HuggingFaceFW/fineweb-2
FINEWEB2 = {
    "id": "<urn:uuid:1>", "dump": "CC-MAIN-2022-05", "url": "https://b.ee/2", "date": "2022-01-19T04:16:00Z",
    "file_path": "s3://commoncrawl/1.warc.gz", "language": "ekk", "language_score": 0.97,
    "language_script": "Latn", "minhash_cluster_size": 12, "top_langs": "{}",
}  # fmt: skip


def run(tmp_path, progress=False, **source):
    recipe = Recipe(
        name="t", language="et", corpus=Corpus(workers=1, sources=[{"name": "a", "clean": False} | source])
    )
    run_corpus(recipe, tmp_path / "corpus", tmp_path / "raw", progress)
    documents = list(read_documents(tmp_path / "corpus" / "documents"))
    rows = read_json(tmp_path / "corpus", Funnel).steps
    return documents, {row.reason: row.documents for row in rows if row.documents}


def hplt(tmp_path, records):
    lines = [
        json.dumps(HPLT | {"text": estonian_document(number)} | one) for number, one in enumerate(records)
    ]
    path = tmp_path / "10_1.jsonl.zst"
    path.write_bytes(zstandard.compress("\n".join(lines).encode()))
    return str(path)


def test_hplt_by_its_own_scores(tmp_path):
    odd = {"doc_scores": [], "prob": "high", "cluster_size": True, "u": 7}
    records = [{}, {"doc_scores": [4.9, 10]}, {"prob": [0.5]}, odd, {"doc_scores": [5]}]
    path = hplt(tmp_path, records)
    documents, _ = run(tmp_path / "all", path=path)
    assert [document["metadata"] for document in documents[:1]] == [
        {
            "file": "10_1.jsonl.zst", "number": 1, "url": "https://a.ee/1", "date": "2021-11-28T06:59:26Z",
            "language_score": 0.91, "document_score": 7.5, "cluster_size": 3,
        }
    ]  # fmt: skip
    assert documents[3]["metadata"] == {"file": "10_1.jsonl.zst", "number": 4, "date": HPLT["ts"]}
    documents, dropped = run(tmp_path / "some", path=path, min_document_score=5, min_language_score=0.6)
    assert [document["metadata"]["number"] for document in documents] == [1, 5]
    assert dropped == {"document_score under 5": 1, "language_score under 0.6": 1, "no language_score": 1}


def test_fineweb2_by_its_own_columns(tmp_path):
    scores = [0.9, 0.91, 0.92, 0.93, 0.94]
    texts = [
        {"text": estonian_document(number), "language_score": score} for number, score in enumerate(scores)
    ]
    rows = [FINEWEB2 | one for one in texts]
    path = tmp_path / "000_00000.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    documents, dropped = run(tmp_path, path=str(path), min_language_score=0.93)
    assert [document["metadata"]["language_score"] for document in documents] == [0.93, 0.94]
    assert documents[0]["metadata"] == {
        "file": path.name, "number": 4, "url": "https://b.ee/2", "date": "2022-01-19T04:16:00Z",
        "language_score": 0.93, "cluster_size": 12,
    }  # fmt: skip
    assert dropped == {"language_score under 0.93": 3}


def scored(tmp_path, scores: list[float]) -> str:
    """Near copies with scores in Parquet, which can have NaN."""
    of = {key: value for key, value in HPLT.items() if key not in ("pii", "web-register")}
    text = estonian_document(1)
    rows = [of | {"doc_scores": [score], "text": f"{text} {n}"} for n, score in enumerate(scores)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def test_scores_that_are_no_number_are_missing(tmp_path, capsys):
    path = scored(tmp_path, [float("nan"), 7.0, 9.0])
    documents, dropped = run(tmp_path, progress=True, path=path, min_document_score=5)
    assert [one["metadata"]["number"] for one in documents] == [2, 3] and dropped == {"no document_score": 1}
    said = " ".join(capsys.readouterr().err.split())
    assert "1 documents whose document_score is no finite number" in said


@pytest.mark.full
def test_of_near_copies_one_with_a_score_stays(tmp_path):
    pytest.importorskip("rensa")
    sources = [{"name": "a", "path": scored(tmp_path, [float("nan"), 7.0, 9.0])}]
    keys = {"near_copies": "hplt", "near_copies_keep": "score", "deduplicate_lines": False}
    recipe = Recipe(name="t", language="et", corpus=Corpus(workers=1, sources=sources, **keys))
    run_corpus(recipe, tmp_path / "near", tmp_path / "raw", progress=False)
    assert [one["metadata"]["number"] for one in read_documents(tmp_path / "near" / "documents")] == [3]


def test_scores_that_a_source_has_not(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        "\n".join(json.dumps({"text": estonian_document(n), "language_score": 1}) for n in range(3))
    )
    with pytest.raises(KieloError, match="(?s)corpus.sources, a .*no document_score +3 documents"):
        run(tmp_path, path=str(path), min_document_score=5)
    for keys in ({"kind": "code"}, {"path": None, "tokens": "x"}):
        with pytest.raises(ValueError, match="min_document_score"):
            Source(**{"name": "a", "path": "x", "min_document_score": 5} | keys)
