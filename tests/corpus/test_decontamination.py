"""Documents with words of the evaluation are dropped, by a comparison of words that a plain script does."""

import json
from random import Random
from unicodedata import normalize

import pyarrow as pa
import pytest

from kielo.artifact.documents import read_documents
from kielo.artifact.prefetched import Brought, Prefetched
from kielo.artifact.stage_counts import Funnel
from kielo.artifact.stage_json import read_json, write_json
from kielo.corpus.corpus_stage import plan_corpus, run_corpus
from kielo.corpus.evaluation_items import evaluation_items
from kielo.corpus.step import effective_settings
from kielo.recipe.cards import language
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus, Evaluate, EvaluationText, Recipe
from tests.corpus.texts import ESTONIAN, estonian_document, recipe

QUESTION = "Miks külmub järve vesi kõigepealt pealt ja alles siis põhjast, kui talv on pikk ja väga külm?"
SHORT = "Kui palju jalgu on kahel väga vanal ämblikul?"


def dropped(tmp_path, texts: list[str], evaluate=None, **keys) -> dict[str, int]:
    """Run a corpus of the texts. Return how many documents were dropped for each reason."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = recipe(source, **keys)
    if evaluate is not None:
        made = made.model_copy(update={"evaluate": evaluate})
    run_corpus(made, tmp_path / "corpus", tmp_path / "raw")
    rows = read_json(tmp_path / "corpus", Funnel).steps
    return {row.reason: row.documents for row in rows if row.name == "decontaminate" and row.documents}


def kept(tmp_path) -> list[str]:
    files = sorted((tmp_path / "corpus" / "documents").iterdir())
    return [document["text"] for path in files for document in read_documents(path)]


def test_texts_and_questions_are_looked_for(tmp_path, capsys, monkeypatch):
    """By evaluation: own texts, and a task's questions in the folder of `kielo prefetch`."""
    text, folder = tmp_path / "court.txt", tmp_path / "prefetched"
    text.write_text(" ".join(ESTONIAN[:3]))
    (folder / "datasets" / "xquad").mkdir(parents=True)
    for split, question in (("test", QUESTION), ("train", ESTONIAN[4])):
        table = pa.table({"question": [question, SHORT], "choices": [["a", "b"], ["c", "d"]]})
        path = folder / "datasets" / "xquad" / f"xquad-{split}.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    brought = Brought(kind="task", name="xquad_et", origin="hub", folder="datasets/xquad", bytes=1)
    write_json(folder, Prefetched(brought=[brought], made_at="now"))
    monkeypatch.setenv("KIELO_PREFETCHED", str(folder))
    changed = QUESTION.upper().replace("?", "!").replace(",", " –")
    texts = [estonian_document(9), f"{ESTONIAN[5]} {changed}", " ".join(ESTONIAN[1:3])]
    texts += [f"{ESTONIAN[6]} {SHORT}"]
    texts += [f"{ESTONIAN[7]} {ESTONIAN[4]}", f"{ESTONIAN[6]} {SHORT[:-12]} putukal, {ESTONIAN[3]}"]
    evaluate = Evaluate(texts=(EvaluationText(name="court", path=str(text)),), tasks=("xquad_et",))
    found = dropped(tmp_path, texts, evaluate, decontaminate=True, deduplicate_lines=False)
    assert found == {"words of xquad_et": 2, "words of court": 1}
    assert kept(tmp_path) == [texts[0], *texts[4:]]
    assert "1 of 1 texts of court, 2 of 6 texts of xquad_et" in capsys.readouterr().err


def test_a_file_about_a_folder_of_texts_is_not_looked_for(tmp_path):
    exams = tmp_path / "exams"
    exams.mkdir()
    for name, text in (("a.txt", SHORT), ("README.txt", QUESTION), (".old.txt", QUESTION)):
        (exams / name).write_text(text)
    (items,) = evaluation_items(recipe(tmp_path, decontaminate=(str(exams),)))
    assert items.files == (exams / "a.txt",)


def test_each_evaluation_is_part_of_the_identity(tmp_path):
    """Also of two files with one name, and the field of a text; planned, not run."""
    for folder in ("arc", "xnli"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test.jsonl").write_text(
            json.dumps({"text": f"{QUESTION} {folder}", "b": SHORT})
        )
    (tmp_path / "in.txt").write_text(estonian_document(1))

    def inputs(evaluate=None, **keys):
        made = recipe(tmp_path / "in.txt", **keys).model_copy(update={"evaluate": evaluate or Evaluate()})
        return plan_corpus(made, tmp_path / "corpus", tmp_path / "raw", False)[1]

    files = tuple(str(tmp_path / folder / "test.jsonl") for folder in ("arc", "xnli"))
    before = inputs(decontaminate=files)
    assert len(before) == 3
    (tmp_path / "arc" / "test.jsonl").write_text(json.dumps({"text": SHORT}))
    assert inputs(decontaminate=files) != before
    text = {"name": "court", "path": files[1]}
    found = [
        inputs(Evaluate(texts=(EvaluationText(**text, **keys),)), decontaminate=True)
        for keys in ({}, {"text_field": "b"}, {"kind": "instructions"})
    ]
    assert len({one["evaluation 1 court"] for one in found}) == 3


@pytest.mark.parametrize("seed", range(3))
def test_the_same_documents_as_a_plain_script_finds(tmp_path, seed):
    """Texts over nine words, so that some have 13 in a row in common: compared as strings."""
    drawn, words = Random(seed), ["vana", "maja", "metsa", "all", "oli", "suur", "ja", "väga", "pime"]
    draw = lambda number: " ".join(drawn.choices(words, k=number))  # noqa: E731
    items, texts = [draw(15) for _ in range(20)], [draw(60) for _ in range(40)]
    for number in range(0, 40, 4):
        begin = drawn.randrange(3)
        texts[number] += " " + " ".join(items[number // 4].split()[begin : begin + drawn.randrange(11, 14)])
    file = tmp_path / "items.txt"
    file.write_text("\n".join(items))

    def grams(text: str) -> set[str]:
        return {" ".join(text.split()[at : at + 13]) for at in range(len(text.split()) - 12)}

    known = set().union(*map(grams, items))
    right = [text for text in texts if not known & grams(text)]
    keys = {"deduplicate_lines": False, "deduplicate_documents": False, "line_language_threshold": 0.0}
    keys |= {"document_language_threshold": 0.0, "decontaminate": (str(file),)}
    found = dropped(tmp_path, texts, **keys)
    assert kept(tmp_path) == right and found == {"words of items.txt": 40 - len(right)}
    assert 0 < len(right) < 40


APOSTROPHES = "'’ʼʻ´‘`′＇"


@pytest.mark.parametrize("in_evaluation", APOSTROPHES)
def test_apostrophes_and_forms_of_unicode_do_not_hide_a_text(tmp_path, in_evaluation):
    """Text that nobody cleaned, beside an evaluation with soft hyphens and one of the apostrophes."""
    plain = (
        "L'été, l'air d'ici n'était jamais aussi doux qu'aujourd'hui, dit-on officiellement à Tartu depuis "
        "très longtemps"
    )
    file, source = tmp_path / "items.txt", tmp_path / "in.jsonl"
    texts = [plain.replace("'", apostrophe) for apostrophe in APOSTROPHES]
    texts += [normalize("NFD", plain), plain.replace("Tartu", "Tar\u00adtu"), plain.replace("ffi", "ﬃ")]
    wide = plain.translate({number: number + 0xFEE0 for number in range(0x21, 0x7F)})
    texts += [wide, plain.replace("Tartu", "Tallinn"), plain.replace("'", " ' "), plain.replace("'", "` ´")]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    file.write_text(plain.replace("'", in_evaluation).replace("jamais", "ja\u00admais"), encoding="utf-8")
    words = {"name": "a", "path": str(source), "clean": False}
    section = Corpus(sources=[words], workers=1, decontaminate=(str(file),))
    run_corpus(Recipe(name="t", language="fr", corpus=section), tmp_path / "corpus", tmp_path / "raw")
    assert kept(tmp_path) == texts[-3:]


def test_a_rule_is_a_setting_of_the_corpora_that_use_it():
    used, other = (effective_settings(Corpus(sources="a", decontaminate=files), language("et"))
                   for files in (("a.txt",), False))  # fmt: skip
    assert used["decontamination_rule"] == 3 and "decontamination_rule" not in other


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"decontaminate": ("items.pdf",)}, "items.pdf: no file of text"),
        ({"decontaminate": True}, "no text of the recipe's evaluation"),
        ({"decontaminate": ("a.txt.zip",)}, "a.txt.zip: no file of text"),
        ({"decontaminate": ("latin.txt",)}, r"latin.txt, line 2: invalid UTF-8 .byte 0xf5.*Fix: convert"),
        ({"decontaminate": ("a.txt.jsonl",)}, "a.txt.jsonl, line 1: not valid JSON"),
        ({"decontaminate": ("broken.jsonl",)}, "broken.jsonl, line 2: not valid JSON"),
        (
            {"decontaminate": ("exams",)},
            "exams: 2 files that look like data would not be read: a.csv, b.parquet",
        ),
    ],
)
def test_what_cannot_be_looked_for_is_refused(tmp_path, monkeypatch, content, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exams").mkdir()
    for name in ("a.csv", "b.parquet", "c.txt", "README.md", "picture.png"):
        (tmp_path / "exams" / name).write_text("kas on\n")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text"\n')
    (tmp_path / "latin.txt").write_bytes("a\nõ\n".encode("latin-1"))
    for name in ("a.txt.zip", "a.txt.jsonl"):
        (tmp_path / name).write_text("kas on\n")
    with pytest.raises(KieloError, match=said):
        dropped(tmp_path, [estonian_document(1)], **content)
