"""The data stages of every shipped recipe run on a toy text of the kinds and languages that it names."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from kielo.artifact.manifest import read_manifest
from kielo.corpus.corpus_stage import run_corpus
from kielo.dataset.pack import pack
from kielo.recipe.read import read_first_language
from kielo.recipe.several_languages import languages_of
from kielo.tokenizer.train import train_tokenizer
from tests.shipped import RUNS

# One long sentence of each language, of our own.
SENTENCES = {
    "af": "Gisteraand het ons langs die strand geloop, en die kinders wou nie huis toe gaan nie",
    "da": "I går aftes gik vi langs stranden, og børnene ville ikke hjem, selv om det var mørkt",
    "en": "Last night we walked along the beach, and the children would not go home, though it was late",
    "et": "Eile õhtul jalutasime mööda randa ja lapsed ei tahtnud koju minna, kuigi oli juba pime",
    "fi": "Eilen illalla kävelimme rantaa pitkin, eivätkä lapset halunneet lähteä kotiin, vaikka oli pimeää",
    "is": "Í gærkvöldi gengum við eftir ströndinni og börnin vildu ekki fara heim þótt dimmt væri",
    "ja": "昨日の夕方、私たちは海岸を歩きましたが、暗くて寒くなっても、子供たちは家に帰りたがりませんでした",
    "lv": "Vakar vakarā mēs pastaigājāmies gar jūru, un bērni negribēja iet mājās, lai gan jau bija tumšs",
    "nb": "I går kveld gikk vi langs stranden, og barna ville ikke dra hjem, selv om det var blitt mørkt",
    "nn": "I går kveld gjekk vi langs stranda, og borna ville ikkje fara heim, sjølv om det var vorte mørkt",
    "ru": "Вчера вечером мы гуляли вдоль берега моря, и дети не хотели идти домой, хотя уже стемнело",
    "sv": "I går kväll gick vi längs stranden, och barnen ville inte gå hem, fastän det var mörkt",
}
DOCUMENTS = 40


def _texts(codes, first):
    """Documents of one line each, all different, in turn in each of the languages."""
    for number in range(first, first + DOCUMENTS):
        yield f"{SENTENCES[codes[number % len(codes)]]} ({number})."


def _write(folder, recipe, source):
    """Writes toy text of the source's kind, in the format of its path, that no other source has."""
    first = DOCUMENTS * recipe.corpus.sources.index(source)
    codes = languages_of(recipe, source)
    if source.kind == "code":
        rows = [{"content": f"def f{n}(x):\r\n\treturn x  +  {n}\n\n"} for n in range(DOCUMENTS)]
    elif source.kind == "parallel":
        rows = list(zip(*(_texts([code], first) for code in codes)))
    else:
        rows = [{"text": text} for text in _texts(codes, first)]
    ending = (source.path or ".jsonl.zst").rpartition("/")[2].lstrip("*").partition(".")[2]
    path = folder / f"{source.name}.{ending}"
    if ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    tabbed = source.kind == "parallel" and "tsv" in ending
    lines = "\n".join("\t".join(row) if tabbed else json.dumps(row, ensure_ascii=False) for row in rows)
    data = (lines + "\n").encode()
    packed = {"gz": gzip.compress, "zst": zstandard.compress}.get(ending.rpartition(".")[2], bytes)(data)
    path.write_bytes(packed)
    return path


# Most kinds and languages: two recipes. All: the full suite.
EVERY_TIME = ("poro_34b", "viking_7b")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in EVERY_TIME else pytest.mark.full) for name in RUNS],
)
def test_data_stages_on_toy_text(name, tmp_path):
    """Corpus, tokenizer and pack end well, and each source keeps at least 0.97 of its documents."""
    recipe = read_first_language(name).recipe
    sources = [
        source.model_copy(
            update={
                "path": str(_write(tmp_path, recipe, source)),
                "debian_package": None,
                "huggingface_dataset": None,
                "huggingface_subset": None,
            }
        )
        for source in recipe.corpus.sources
        if source.path or source.debian_package or source.huggingface_dataset
    ]
    corpus = recipe.corpus.model_copy(
        update={"sources": tuple(sources), "workers": 1, "min_document_characters": 20}
    )
    tokenizer = recipe.tokenizer.model_copy(update={"vocab_size": 400, "path": None})
    dataset = recipe.dataset.model_copy(update={"heldout_share": 0.2})
    parts = {"corpus": corpus, "tokenizer": tokenizer, "dataset": dataset}
    if recipe.model.weights:  # which are not here, nor is the tokenizer that a transplant reads
        parts["model"] = recipe.model.model_copy(update={"weights": None, "transplant": None})
    recipe = recipe.model_copy(update=parts)
    counts = run_corpus(recipe, tmp_path / "corpus", tmp_path / "raw", progress=False).counts
    for source in counts["sources"]:
        assert source["documents_kept"] >= 0.97 * DOCUMENTS, source
    train_tokenizer(recipe, tmp_path / "corpus", tmp_path / "tokenizer")
    pack(recipe, tmp_path / "corpus", tmp_path / "tokenizer", tmp_path / "tokens")
    packed = read_manifest(tmp_path / "tokens").counts["sources"]
    assert set(packed) == {source.name for source in sources}
