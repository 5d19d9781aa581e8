"""The rules for Swedish text of kb-labb/LUMI-porting-Megatron-LM, as the recipe swedish_oscar has them."""

from pathlib import Path

from kielo.artifact.documents import read_documents
from kielo.corpus.corpus_stage import run_corpus
from kielo.recipe.read import read_recipe

KEPT = (
    "Stockholm är Sveriges huvudstad och landets största stad, belägen vid Mälarens utlopp i Östersjön, "
    "och har varit residensstad sedan sextonhundratalet.",
    "Biblioteket öppnar klockan nio på vardagar, men på lördagar är det stängt hela förmiddagen, eftersom "
    "personalen då sorterar böcker.",
)
DROPPED = {
    "another language": "I går aftes gik vi langs stranden, og børnene ville ikke hjem, selv om det var "
    "mørkt, og vi havde lovet deres mor at være tidligt hjemme.",
    "letters of another script": "Den ryska författaren Лев Толстой skrev romanen Krig och fred, som handlar "
    "om Napoleons fälttåg och om flera adliga familjer i Moskva.",
    "a duplicate": KEPT[0],
    "no sentence": "Stockholm 1912 IOC VM EM OS 4 x 100 m stafett, 1. USA 2. GB 3. SWE, 42,6 42,8 43,1; "
    "4 x 400 m, 1. USA 2. FRA 3. GB, 3.16,6 3.20,7.",
}


def test_one_document_a_line_and_only_swedish(tmp_path: Path) -> None:
    """More than 95 % sure of Swedish, no letter of another script, each document once."""
    text = tmp_path / "oscar.txt"
    text.write_text("\n".join([*KEPT, *DROPPED.values()]) + "\n", encoding="utf-8")
    recipe = read_recipe("swedish_oscar_gpt2", [f"corpus.sources={text}", "corpus.workers=1"]).recipe
    assert run_corpus(recipe, tmp_path / "corpus", tmp_path / "raw", progress=False).counts
    files = sorted((tmp_path / "corpus" / "documents").glob("*.jsonl.zst"))
    assert [document["text"] for file in files for document in read_documents(file)] == [*KEPT]
