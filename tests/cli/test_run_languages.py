"""`kielo run` and `kielo plan` of a recipe of several languages, of which one has no text."""

import json
import signal
import time
from pathlib import Path

import pytest

from kielo.artifact.manifest import read_manifest, write_stage
from kielo.artifact.metrics import METRICS_NAME, TrainingStep, write_row
from kielo.cli.main import main
from tests.cli.test_run import RECIPE, kielo
from tests.corpus.texts import estonian_document
from tests.house.checks import ROOT


def write_several(folder: Path) -> Path:
    """A recipe for Estonian and Finnish. Their text is taken as it is; the Finnish one is not there."""
    (folder / "et.txt").write_text(text(0), encoding="utf-8")
    head = RECIPE.format(folder=folder / "run_{language}", text="no source")
    head = head.replace('language = "et"', 'languages = ["fi", "et"]').replace('"tiny"', '"tiny_{language}"')
    sources = f'sources = [{{ path = "{folder}/{{language}}.txt", clean = false }}]'
    recipe = folder / "several.toml"
    recipe.write_text(head.replace('sources = "no source"', sources), encoding="utf-8")
    return recipe


def text(first: int) -> str:
    return "\n".join(estonian_document(number).replace("\n", " ") for number in range(first, first + 40))


def test_one_failed_language_does_not_stop_the_others(tmp_path: Path, capfd) -> None:
    """The first fails for lack of text, and the second is made all the same; the table and the exit code
    tell. With its text the same command makes what is missing and no more.
    """
    recipe = write_several(tmp_path)
    assert main(["run", str(recipe), "--to", "corpus"]) == 1
    out, err = capfd.readouterr()
    assert "fi.txt" in err and "\nfi\tfailed\t" in out and "\net\tdone\t" in out
    assert next(line for line in out.splitlines() if line.startswith("fi: ")).count("fi.txt")
    made = read_manifest(tmp_path / "run_et" / "corpus")
    assert made is not None and read_manifest(tmp_path / "run_fi" / "corpus") is None
    (tmp_path / "fi.txt").write_text(text(100), encoding="utf-8")
    assert main(["run", str(recipe), "--to", "corpus", "--json"]) == 0
    runs = json.loads(capfd.readouterr().out)["languages"]
    assert {code: run["state"] for code, run in runs.items()} == {"fi": "done", "et": "done"}
    assert read_manifest(tmp_path / "run_et" / "corpus") == made
    assert read_manifest(tmp_path / "run_fi" / "corpus").counts["documents_kept"] == 40


def test_status_says_how_far_each_language_is(tmp_path: Path, capfd) -> None:
    """From the folders alone, without a run: a stage that is finished, a step of training, and nothing."""
    recipe = write_several(tmp_path)
    for stage in ("corpus", "tokenizer"):
        with write_stage(tmp_path / "run_et" / stage, stage, 1, {}, {}):
            pass
    assert main(["status", str(recipe)]) == 0
    rows = capfd.readouterr().out.splitlines()
    assert rows[1].startswith("fi\tnot begun\t") and rows[2].startswith("et\ttokenizer done\t")
    (tmp_path / "run_et" / "train").mkdir()
    row = TrainingStep(step=7, loss=1.0, tokens_per_second=1.0, seconds=1.0)
    (tmp_path / "run_et" / "train" / METRICS_NAME).write_text(write_row(row) + "\n", encoding="utf-8")
    assert main(["status", str(recipe), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["languages"]["et"]["state"] == "trained to step 7"


def test_what_does_not_check_is_refused_before_any_is_begun(tmp_path: Path, capfd) -> None:
    recipe = write_several(tmp_path)
    assert main(["run", str(recipe), "--set", "train.tokens_per_step=3"]) == 1
    assert "train.tokens_per_step" in capfd.readouterr().err
    assert main(["train", str(recipe)]) == 1
    assert "--set language=fi" in capfd.readouterr().err
    assert not list(tmp_path.glob("run_*"))


def test_a_plan_gives_one_language_and_the_total(capsys) -> None:
    """The total of 75 languages is 75 times the cost of one, in JSON, in the table and in docs/encoders.md,
    beside what was published.
    """
    words = ["seventy_five_berts", "--json"]
    assert main(["plan", *words]) == 0
    several = json.loads(capsys.readouterr().out)
    assert main(["plan", *words, "--set", "language=af"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert "languages" not in one and len(several["languages"]["codes"]) == 75
    assert several["layouts"] == one["layouts"] and several["languages"]["planned"] == "af"
    hours = {layout["name"]: layout["cost"]["device_hours"] for layout in one["layouts"]}
    best = several["languages"]["layouts"][0]
    assert best["device_hours"] == pytest.approx(75 * hours[best["name"]])
    assert main(["plan", "seventy_five_berts"]) == 0
    said = capsys.readouterr().out
    assert "57,600 device-hours" in said
    page = (ROOT / "docs/encoders.md").read_text(encoding="utf-8")
    for layout in several["languages"]["layouts"]:
        hours = f"{layout['safe_device_hours']:,.0f}\t{layout['device_hours']:,.0f}"
        row = f"{layout['hours_each']:,.1f}\t{layout['days_in_a_row']:,.1f}\t{hours}"
        assert row in said and row.replace("\t", " | ") in page


@pytest.mark.full
def test_all_stages_of_two_encoders_and_their_table(tmp_path: Path) -> None:
    """Each has a tokenizer, a model and scores of its own."""
    recipe = write_several(tmp_path)
    (tmp_path / "fi.txt").write_text(text(100), encoding="utf-8")
    sets = ("model.model_type=ltg_bert", "model.position_bucket_size=8", "train.objective=masked_tokens")
    process = kielo("run", recipe, "--json", *(word for one in sets for word in ("--set", one)))
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    runs = json.loads(stdout)["languages"]
    assert all(run["summary"]["masked_tokens"]["model"] >= 0 for run in runs.values())
    vocabularies = {(tmp_path / f"run_{code}/tokenizer/tokenizer.json").read_bytes() for code in runs}
    assert len(vocabularies) == 2


@pytest.mark.full
def test_a_stop_reaches_the_run_at_work_and_begins_no_other(tmp_path: Path) -> None:
    recipe = write_several(tmp_path)
    (tmp_path / "fi.txt").write_text(text(100), encoding="utf-8")
    process = kielo("run", recipe, "--set", "train.tokens=25600000", "--set", "dataset.max_epochs=1000000")
    deadline = time.monotonic() + 300
    while not (tmp_path / "run_fi/train/metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    try:
        stdout, stderr = process.communicate(timeout=200)
    finally:
        process.kill()  # does nothing to one that ended
    assert process.returncode == 75, stderr
    assert "\nfi\tstopped" in stdout and "\net\tnot begun" in stdout and not (tmp_path / "run_et").exists()
