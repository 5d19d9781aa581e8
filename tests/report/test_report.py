"""Promises of the report's three files: true figures, nothing from outside, whole or not at all."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console

from kielo.artifact.scores import Summary
from kielo.artifact.stage_json import read_json
from kielo.recipe.errors import KieloError
from kielo.report.figures import FIGURES, parity_curves
from kielo.report.make_summary import print_summary
from kielo.report.units import format_bytes
from kielo.report.write import write_report
from tests.report import synthetic_run
from tests.report.synthetic_run import HOSTILE, RECIPE, STAGES


class Page(HTMLParser):
    """Texts, tags with their attributes, and whether every element was closed in turn."""

    VOID = {"meta", "br", "img", "link", "input"}

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def test_summary_has_just_the_promised_keys(run_folder: Path) -> None:
    """summary.json, key by key, and the figures of the stages that made them."""
    summary = json.loads((run_folder / "summary.json").read_text(encoding="utf-8"))
    report = summary["stages"].pop("report")
    assert report["seconds"] > 0 and report["skipped"] is False
    assert summary.pop("kielo_version")
    assert summary.pop("parameters") > 1e6 and summary.pop("tokens") == 3_014_656
    assert summary == {
        "stages": {name: stage.content() for name, stage in STAGES.items()},
        "corpus": {
            "bytes_in": 4_620_000,
            "documents_in": 2550,
            "bytes_kept": 2_185_000,
            "documents_kept": 1905,
        },
        "bits_per_byte": {"model": 1.413, "unigram": 2.301, "xz": 1.612, "ngram": 1.552},
        "masked_tokens": None,
        "parity": {"max_relative_loss_difference": 4e-7, "steps": 20, "passed": True},
        "tokens_per_second": 12_000.0,
        "export": str(run_folder / "hf"),
    }


def test_a_transplanted_vocabulary_has_a_section(run_folder: Path, tmp_path: Path) -> None:
    """Rows copied, composed and random; without a map none."""
    assert "old weights" not in Page((run_folder / "report.html").read_text(encoding="utf-8")).text
    shutil.copytree(run_folder, tmp_path / "run")
    synthetic_run.transplant(tmp_path / "run")
    page = write_report(tmp_path / "run", RECIPE, STAGES).read_text(encoding="utf-8")
    for told in ("A new vocabulary for old weights", "5 50.0%", "Made of 2.5 old rows, on average", "4 40.0%",
                 "1 10.0%", "<|end|> </s>", f"{HOSTILE} <s>"):  # fmt: skip
        assert told in Page(page).text, told


def test_page_asks_nothing_of_the_network_and_runs_nothing(run_folder: Path) -> None:
    """No element loads anything, no script, no handler; hostile text from every stage stands
    there as text.
    """
    html = (run_folder / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        assert not any(name.startswith("on") or name in ("src", "srcset") for name in attributes)
        references = [value for name, value in attributes.items() if name.endswith("href")]
        assert all(reference.startswith("#") for reference in references)
    assert not re.search(r"url\((?!#)|@import", html)
    # the description, a sample's prompt and text, a funnel's reason, a setting of each side
    assert page.text.count(HOSTILE) >= 6
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))


def test_page_says_what_the_run_showed(run_folder: Path, tmp_path: Path) -> None:
    """Every figure that a reader comes for; and a run that failed is told to have failed,
    with the setting named.
    """
    text = Page((run_folder / "report.html").read_text(encoding="utf-8")).text
    for told in ("beats all three baselines", "1.413", "1.552", "byte 6-gram", "line in another language",
                 "1.70 MB", "2.310", "12,000", "4.0e-07", "tolerance", "RoPE base", "held-out 2.9",
                 "from_pretrained", "already done", "4 min 12 s", "2,990,080", "733–738",
                 "after spikes of the loss: 739–739",
                 "million parameters", "5.91 of help", "0.001 to 0.0001, cosine", "model FLOPs"):  # fmt: skip
        assert told in text, told
    shutil.copytree(run_folder, tmp_path / "run")
    synthetic_run.verify(tmp_path / "run" / "verify", passed=False)
    synthetic_run.evaluate(tmp_path / "run" / "evaluate", model=1.6)
    page = Page(write_report(tmp_path / "run", RECIPE, STAGES).read_text(encoding="utf-8"))
    assert "beats 2 of three baselines" in page.text and "does not compute the same" in page.text
    assert "layers.0.attention" in page.text
    assert ("tr", {"class": "differs"}) in page.tags


def test_every_figure_is_on_the_page(run_folder: Path) -> None:
    """An entry of `FIGURES` whose section does not exist would be missing."""
    html = (run_folder / "report.html").read_text(encoding="utf-8")
    assert html.count("<figcaption>") == len(FIGURES)


def test_an_unfinished_run_has_a_report_too(tmp_path: Path) -> None:
    """The page says what has not run; the summary holds nulls; there is no card without an export."""
    synthetic_run.corpus(tmp_path / "corpus")
    text = Page(write_report(tmp_path, RECIPE, {"corpus": STAGES["corpus"]}).read_text(encoding="utf-8")).text
    for stage in ("tokenizer", "train", "verify", "evaluate", "export"):
        assert f"The {stage} stage has not run yet." in text
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert summary["bits_per_byte"] == dict.fromkeys(("model", "unigram", "xz", "ngram"))
    assert summary["export"] is None and not (tmp_path / "hf").exists()
    print_summary(read_json(tmp_path, Summary), Console(record=True))


def test_a_damaged_file_is_named(run_folder: Path, tmp_path: Path) -> None:
    """A certificate cut short is an error that names it, and no page is left behind."""
    shutil.copytree(run_folder / "verify", tmp_path / "verify")
    (tmp_path / "verify" / "parity.json").write_text('{"passed": tr', encoding="utf-8")
    with pytest.raises(KieloError, match=r"parity\.json"):
        write_report(tmp_path, RECIPE, {})
    assert not (tmp_path / "report.html").exists()


def test_model_card(run_folder: Path) -> None:
    """Front matter that YAML reads as meant (Norwegian is not false); bits per byte, parity, how
    to load it.
    """
    card = (run_folder / "hf" / "README.md").read_text(encoding="utf-8")
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "license": "mpl-2.0",
        "language": ["no"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["kielo"],
    }
    for told in (
        "| **this model** | 1.413 |",
        "| Interpolated byte 6-gram | 1.552 |",
        "Passed",
        "4.0e-07",
        # fmt: skip
        "AutoModelForCausalLM.from_pretrained",
        "libreoffice-help-et",
        "MPL-2.0 (LibreOffice help)",
    ):
        assert told in body, told
    assert "<script>" not in re.sub(r"\\.", "", body)
    code = re.search(r"```python\n(.*?)```", body, re.DOTALL).group(1)
    compile(code, "README.md", "exec")


def test_card_names_datasets_of_the_hub(run_folder: Path) -> None:
    """A source on the hub is listed for the hub to link; a local path of the machine is never shown."""
    from kielo.report.gather import gather
    from kielo.report.model_card import render

    sources = [
        {"huggingface_dataset": "wikimedia/wikipedia", "huggingface_subset": "20231101.et"},
        {"path": "/home/someone/secret/texts.txt"},
    ]
    recipe = RECIPE.model_validate(RECIPE.model_dump() | {"corpus": {"sources": sources}})
    card = render(gather(run_folder, recipe, {}))
    assert yaml.safe_load(card.split("---\n")[1])["datasets"] == ["wikimedia/wikipedia"]
    assert "local text texts" in card and "/home/someone" not in card


def test_card_names_the_first_weights(run_folder: Path, tmp_path: Path) -> None:
    """Those of the hub in the front matter too, a followed run by its name, and a folder without its path."""
    from kielo.report.gather import gather
    from kielo.report.model_card import render

    shutil.copytree(run_folder, tmp_path / "run")
    synthetic_run.transplant(tmp_path / "run")

    def card(weights: str, **given: str) -> tuple[dict[str, Any], str]:
        model = RECIPE.model.model_copy(update={"weights": weights, "transplant": "mean"})
        recipe = RECIPE.model_copy(update={"model": model, **given})
        _, front, body = render(gather(tmp_path / "run", recipe, {})).split("---\n", 2)
        return yaml.safe_load(front), body

    front, body = card(weights="hf:OWNER/NAME@main")
    assert front["base_model"] == "OWNER/NAME" and "OWNER/NAME, whose licence" in body
    assert "of 10 rows: 5 began as the row of the same text or role, 4 as means of others, and 1 at" in body
    front, body = card(weights=f"hf:{tmp_path}/first/hf", follows=f"{tmp_path}/first.toml")
    assert "base_model" not in front and "of another run, first." in body and str(tmp_path) not in body
    _, body = card(weights=f"hf:{tmp_path}/weights")
    assert "weights of a folder: name them" in body and str(tmp_path) not in body


def test_sets_and_sources_are_told_of_one_by_one(run_folder: Path, tmp_path: Path) -> None:
    """Bits per byte by source and language on page and card; each source's address and licence on the card.

    A text from outside of the mixture is in the tables, a set that is not known has a dash, and a run of one
    source has no table.
    """
    folder = shutil.copytree(run_folder, tmp_path / "run")
    names, codes = ["wiki_fi", "code", "books"], [["fi", "sv"], [], ["nn"]]
    sets = [
        {"name": name, "languages": languages, "bits_per_byte": 1.25 + number, "bytes": 2_000, "documents": 3}
        for number, (name, languages) in enumerate(zip(names, codes))
    ]
    synthetic_run.evaluate(folder / "evaluate", sets=sets)
    last = {
        name: {"loss": 2.5, "bits_per_byte": None if name == "books" else 0.75, "languages": languages}
        for name, languages in zip(names, codes)
    }
    row = {"step": 739, "tokens": 4096 * 739, "heldout_loss": 3.1, "heldout_sets": last}
    with open(folder / "train" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    sources = [
        {"name": "wiki_fi", "path": "/home/someone/a.txt", "language": ["fi", "sv"],
         "licence": "CC BY-SA 4.0", "address": "https://fi.wikipedia.org"},
        {"name": "code", "path": "/home/someone/b", "kind": "code"},
    ]  # fmt: skip
    recipe = RECIPE.model_validate(RECIPE.model_dump() | {"corpus": {"sources": sources}})
    page = Page(write_report(folder, recipe, STAGES).read_text(encoding="utf-8")).text
    for told in (
        "wiki_fi fi, sv 1.250 2.00 kB 3", "code 2.250", "books nn 3.250",
        "Held-out set after step 739 Languages Loss Bits per byte wiki_fi fi, sv 2.500 0.750",
        "books nn 2.500 –",
    ):  # fmt: skip
        assert told in page, told
    card = (folder / "hf" / "README.md").read_text(encoding="utf-8")
    for told in (
        "| wiki\\_fi | fi, sv | 1.250 |\n| code |  | 2.250 |\n| books | nn | 3.250 |",
        "- Source: local text wiki\\_fi; from https://fi.wikipedia.org; licence: CC BY-SA 4.0\n",
        "- Source: local text code\n",
    ):
        assert told in card, told
    assert yaml.safe_load(card.split("---\n")[1])["language"] == ["no", "fi", "sv"]
    alone = (run_folder / "hf" / "README.md").read_text(encoding="utf-8")
    assert "held-out set" not in alone and "licence:" not in alone


def test_terminal_table(run_folder: Path) -> None:
    """The table says which baselines are beaten, by name, and takes no text for markup."""
    content = json.loads((run_folder / "summary.json").read_text(encoding="utf-8"))
    content["stages"]["report"]["seconds"] = 1.0
    content["export"] = "runs/[red]x"
    content["bits_per_byte"]["xz"] = 1.2
    console = Console(record=True, width=100)
    print_summary(Summary.model_validate(content), console)
    text = console.export_text()
    for told in (
        "1.552  (beaten)",
        "1.200  (not beaten)",
        "passed: largest",
        "[red]x",
        "5 min 34 s",
        "1 of 8 stages",
    ):
        assert told in text, told


def test_units() -> None:
    """Three figures with a unit, on both sides of each border."""
    assert [format_bytes(n) for n in (0, 999, 1000, 95_000, 2_310_000, 5e12)] == [
        "0 B", "999 B", "1.00 kB", "95.0 kB", "2.31 MB", "5.00 TB"
    ]  # fmt: skip


def test_equal_losses_are_counted_and_not_drawn_as_a_difference() -> None:
    """A zero has no place on a logarithmic axis: the figure says how many there are."""

    def drawn(ours: list[float], theirs: list[float], rounding: list[float] | None = None) -> str:
        losses = SimpleNamespace(ours=ours, theirs=theirs, rounding_differences=rounding)
        return parity_curves(SimpleNamespace(parity=SimpleNamespace(losses=losses, tolerance=1e-5))) or ""

    assert "equal to the last bit in 2 of 3 steps" in drawn([2.0, 1.5, 1.25], [2.0, 1.5, 1.2500001])
    assert "equal to the last bit in 2 of 2 steps" in drawn([2.0, 1.5], [2.0, 1.5])
    assert "equal to" not in drawn([2.0, 1.5], [2.1, 1.6])
    assert "tolerance 1e-05" in drawn([2.0, 1.5], [2.0, 1.6])
    assert "limit by rounding" in drawn([2.0, 1.5], [2.0, 1.6], [1e-7, 1e-2])
