"""Tables of the page and their markup, from small results made by hand."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kielo.artifact.chronicle import chronicle
from kielo.artifact.stage_counts import BorderExample, RowMap
from kielo.report import write
from kielo.report.gather import Gathered, StageRow, gather
from kielo.report.units import fill_template
from tests.report.made_page import NOTHING, section, words
from tests.report.synthetic_run import RECIPE, STAGES
from tests.report.test_whole_page import Text


@pytest.fixture(autouse=True)
def without_figures(monkeypatch) -> None:
    """Figures take most of a page's time; test_whole_page.py has them on it."""
    monkeypatch.setattr(write.figures, "FIGURES", ())


@pytest.fixture
def gathered(run_folder) -> Gathered:
    return gather(run_folder, RECIPE, STAGES)


def test_tables_of_the_chronicle(tmp_path) -> None:
    """All of their columns are text."""
    tables = [SimpleNamespace(title="A & B", header=("one", "two"), rows=[("x", "y")])]
    assert section("chronicle", replace(NOTHING, chronicle=tables)) == (
        '<h3>A &amp; B</h3>\n<div class="scroll" role="group" tabindex="0" aria-label="Table: one">'
        '<table class="pairs"><thead><tr>'
        '<th class="text" scope="col">one</th><th class="text" scope="col">two</th></tr></thead><tbody>'
        '<tr><td class="text">x</td><td class="text">y</td></tr></tbody></table></div>'
    )
    assert chronicle(tmp_path) == []


def test_what_could_not_be_read_is_shown(gathered) -> None:
    funnel = gathered.funnel.model_copy(
        update={
            "sources": [
                SimpleNamespace(name="a", bad_examples=["line 3: no JSON"], masked={}, bytes_in=1),
                SimpleNamespace(name="b", bad_examples=[], masked={}, bytes_in=1),
            ]
        }
    )
    shown = '<summary>The first records that could not be read</summary><div class="scroll" '
    html = section("corpus", replace(gathered, funnel=funnel))
    assert (
        shown in html and '<td class="text">a</td><td class="text">line 3: no JSON</td></tr></tbody>' in html
    )
    assert shown not in section("corpus", gathered)


def test_the_table_of_the_funnel_has_texts_and_numbers(gathered) -> None:
    """A step's name and what it left stand in its first row only."""
    html = section("corpus", gathered)
    rows = re.findall(r"<tr>((?:<td.*?</td>)+)</tr>", html)
    cells = [re.findall(r'<td class="(\w+)">(.*?)</td>', row) for row in rows]
    kinds = ["text", "text", "number", "number", "number", "number"]
    assert [kind for kind, _ in cells[3]] == kinds
    assert [text for _, text in cells[3]][2:] == ["0", "0 B", "", ""] and cells[3][0][1] == ""


def test_details_of_the_corpus(gathered) -> None:
    """Words, examples, other languages, copies and personal data, if the funnel has them."""
    assert "Words" not in section("corpus", gathered) and "kept and dropped" not in section(
        "corpus", gathered
    )
    source = SimpleNamespace(
        bad_examples=[], masked={"email": 1200, "national_number": 3}, bytes_in=4_000_000
    )
    steps = [step.model_copy(update={"words": 7, "words_left": 1234}) for step in gathered.funnel.steps]
    examples = [
        BorderExample(step="line language", reason="", source="web", text="Tere <b>"),
        BorderExample(step="line language", reason="looks like fi", source="web", text="Moi"),
        BorderExample(step="script", reason="", source="web", text="nothing was dropped here"),
    ]
    found = {"sources": [source], "steps": steps, "examples": examples, "cluster_sizes": {"2": 1500}}
    found["identified"] = {"lines": {"fi": 1_000_000}}
    page = replace(gathered, funnel=gathered.funnel.model_copy(update=found))
    lines = words("corpus", page)
    at = lines.index("Words left")
    assert lines[at - 4 : at] == ["Text dropped", "Words dropped", "Documents left", "Text left"]
    for after in (
        ["Lines dropped by language: the identifier said", "Text dropped", "Share of the text read", "fi",
         "1.00 MB", "25.00%"],
        ["Documents of a cluster of near copies", "Clusters", "2", "1,500"],
        ["Personal data that were masked", "Occurrences", "email", "1,200", "national number", "3"],
        ["Verdict", "Source", "Beginning of the text", "kept", "web", "Tere <b>", "dropped: looks like fi"],
    ):  # fmt: skip
        at = lines.index(after[0])
        assert lines[at : at + len(after)] == after
    assert "nothing was dropped here" not in lines and "Tere &lt;b&gt;" in section("corpus", page)


def test_words_of_the_tokenizer(gathered) -> None:
    """Tokens with loss where some are masked, documents that nobody counted, text of a folder of tokens."""
    tokens = {
        "sources": {
            "a": {"tokens": 5000, "tokens_with_loss": 1200, "documents": 7, "bytes": 23_000},
            "b": {"tokens": 1100, "documents": None, "bytes": 4_400, "folder": "x"},
        },
        "heldout": {"tokens": 30, "documents": 2, "bytes": 120},
    }
    packing = [
        SimpleNamespace(
            source="a", sequence_length=2048, sequences=31_000, cut=0.0123, cut_in_one_stream=0.4567,
            filling=0.98765,
        )
    ]  # fmt: skip
    measured = gathered.tokenizer.model_copy(
        update={"exact_round_trip_share": 0.9994, "vocabulary_used_share": 1.0, "vocabulary_size": 4097}
    )
    found = {"tokenizer": measured, "tokens": tokens, "packing": packing}
    lines = words("tokenizer", replace(NOTHING, **found))
    assert lines[:3] == ["Measured on held-out documents", "Vocabulary", "4,097"]
    at = lines.index("Texts that come back exactly")
    assert lines[at + 1 : at + 4] == ["99.9 %", "Vocabulary in use", "100 %"]
    assert lines[lines.index("Packed source") :] == [
        "Packed source", "Tokens", "With loss", "Documents", "Text",
        "a", "5,000", "1,200", "7", "23.0 kB", "b", "1,100", "1,100", "unknown", "about 4.40 kB",
        "held-out", "30", "30", "2", "120 B",
        "Best-fit packed", "Sequence", "Sequences", "Documents cut", "In one stream", "Filling",
        "a", "2,048", "31,000", "1.23%", "45.67%", "98.765%",
    ]  # fmt: skip
    del tokens["sources"]["a"]["tokens_with_loss"]
    lines = words("tokenizer", replace(NOTHING, **found | {"packing": []}))
    assert lines[lines.index("Packed source") :][:8] == [
        "Packed source", "Tokens", "Documents", "Text", "a", "5,000", "7", "23.0 kB",
    ]  # fmt: skip


def test_words_of_a_transplant() -> None:
    made = RowMap(
        method="focus", old_tokenizer="", old_vocabulary_size=9,
        rows=[[1], [2], [3, 4], [5, 6, 7], [1, 2, 3, 4], [], [], []],
        control_tokens={"<|b|>": "</s>", "<|a|>": "<s>"}, weights={"3": [0.1, 0.2, 0.7]},
    )  # fmt: skip
    found = replace(NOTHING, row_map=made)
    html = section("transplant", found)
    assert Text(html).lines == [
        "Rows of the new vocabulary", "Tokens", "Share",
        "Copied from a token of the same text, byte or role", "2", "25.0%",
        "Made of 3.0 old rows, on average (1 weighted by similarity)", "3", "37.5%", "Random", "3", "37.5%",
        "Control token", "Begins as", "<|a|>", "<s>", "<|b|>", "</s>",
    ]  # fmt: skip
    assert '<td class="text">&lt;s&gt;</td>' in html
    bare = made.model_copy(update={"weights": {}, "control_tokens": {}, "rows": []})
    assert words("transplant", replace(found, row_map=bare))[3:] == [
        "Copied from a token of the same text, byte or role", "0", "0.0%",
        "Made of 0.0 old rows, on average", "0", "0.0%", "Random", "0", "0.0%",
    ]  # fmt: skip


def test_stages_with_and_without_a_time() -> None:
    rows = [StageRow("train", "done", 75.0), StageRow("export", "not finished", None)]
    found = replace(NOTHING, stage_rows=rows, versions={"torch": "2.13"})
    html = section("stages", found)
    assert Text(html).lines[3:] == [
        "train", "done", "1 min 15 s", "export", "not finished",
        "Package", "Version", "kielo", "9.8", "torch", "2.13",
    ]  # fmt: skip
    assert '<td class="text">done</td><td class="number">1 min 15 s</td>' in html
    assert '<td class="number"></td>' in html


SETTINGS = {  # value → its text
    "float": (1234567.8, "1.23457e+06"), "int": (7, "7"), "word": ("word", "word"), "nothing": (None, "–"),
    "empty": ([], "none"), "bool": (True, "True"), "six": ([1, 2, 3, 4, 5, 6], "1, 2, 3, 4, 5, 6"),
    "seven": ((1, 2, 3, 4, 5, 6, 7), "1, 2, 3, …, 6, 7"), "nested": ([[1, 2], 0.5], "1, 2, 0.5"),
    "four": ({"a_b": 1, "c": 2, "d": 2, "e": 2}, "A b: 1; C: 2; D: 2; E: 2"),
    "five": ({"a": 1, "b": 2, "c": 2, "d": 2, "e": 2.5},
             "1 for 1 tensors; 2 for 3 tensors; 2.5 for 1 tensors"),
    "mixed": ({"a": 1, "b": 2, "c": 2, "d": 2, "e": "x"}, "A: 1; B: 2; C: 2; D: 2; E: x"),
    "left out": ({"a": None, "b": [], "c": "", "d": 0.25}, "D: 0.25"),
}  # fmt: skip


def test_settings_as_text(gathered) -> None:
    """Long lists by their ends, many numbers counted; a setting that differs is marked."""
    ours = {f"one_{name}": value for name, (value, _) in SETTINGS.items()} | {"b": 1}
    settings = gathered.parity.settings.model_copy(
        update={"ours": ours, "theirs": {"b": 2, "c": 3}, "differing": ["b"]}
    )
    found = replace(NOTHING, parity=gathered.parity.model_copy(update={"settings": settings}))
    html = section("parity", found).partition("Settings side by side")[2]
    rows = [[f"One {name}", said, "–"] for name, (_, said) in SETTINGS.items()]
    rows = [["Effective setting", "Kielo", "transformers"], *rows, ["B", "1", "2"], ["C", "–", "3"]]
    assert Text(html).lines == [cell for row in rows for cell in row]
    cells = '<td class="text">B</td><td class="text">1</td><td class="text">2</td></tr>'
    assert f"<tr class=differs>{cells}" in html and html.count("class=differs") == 1


def test_a_value_that_a_page_needs_is_named() -> None:
    """A page never has a gap where a value is missing."""
    with pytest.raises(LookupError, match="recipe"):
        fill_template("page.html.jinja")
