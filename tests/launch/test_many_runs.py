"""`kielo launch`, `status` and `cancel` of a recipe of several languages: one table, reasons by run."""

import json
from pathlib import Path

import pytest

from kielo.cli.main import main
from kielo.launch.start_times import Start, Starts
from tests.launch.stand_in import Site
from tests.launch.test_ladder import CARD
from tests.resolve.test_resolve import finish_pack, finish_tokenizer

RECIPE = """
name = "small_{language}"
languages = ["et", "fi", "sv"]
cluster = "here.toml"
nodes = [1]
corpus.sources = ["text/{language}.txt"]
tokenizer.vocab_size = 300
dataset.sequence_length = 64
model = { hidden_size = 32, intermediate_size = 64, num_hidden_layers = 1, num_attention_heads = 2 }
train = { tokens = 12_800, tokens_per_step = 256, micro_batch_sequences = 2 }
"""


def make_text(code: str) -> None:
    run = Path(f"runs/small_{code}")
    finish_tokenizer(run / "tokenizer", 300)
    finish_pack(run / "tokens", {code: 12_801}, heldout=640)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    stubs = Site.make(tmp_path / "stubs")
    monkeypatch.setenv("PATH", str(tmp_path / "stubs"), prepend=":")
    monkeypatch.chdir(tmp_path)
    Path("here.toml").write_text(CARD)
    Path("several.toml").write_text(RECIPE)
    return stubs


def states(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    runs = json.loads(capsys.readouterr().out)["languages"]
    return {code: run["state"] for code, run in runs.items()}


def test_what_is_ready_is_launched_and_the_rest_is_told(site: Site, capsys) -> None:
    """A chain for each language; one without text fails alone, and the same command launches it later."""
    make_text("et"), make_text("fi")
    command = ["launch", "several.toml", "--jobs", "2", "--json"]
    assert main(command) == 1
    runs = json.loads(capsys.readouterr().out)["languages"]
    assert runs["et"]["submitted"] == ["101", "102"] and runs["fi"]["submitted"] == ["103", "104"]
    assert runs["sv"]["state"] == "failed" and "runs/small_sv/tokens: not made yet" in runs["sv"]["said"]
    waits = {job: facts.get("Dependency") for job, facts in site.jobs().items()}
    assert waits == {"101": None, "102": "afterany:101", "103": None, "104": "afterany:103"}
    make_text("sv")
    assert main(command) == 0
    assert states(capsys) == {"et": "queued", "fi": "queued", "sv": "submitted"}
    site.set("101", JobState="RUNNING")
    assert main(["status", "several.toml"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].startswith("et\tpack done; 1 RUNNING, 1 PENDING\t")
    assert rows[3].startswith("sv\tpack done; 2 PENDING\t")
    # A run without its launch.json is a failure of its own. Jobs that pack are no launch.
    lost, packs = Path("runs/small_et/launch/0001/launch.json"), Path("runs/small_sv/launch")
    lost.rename("launch.json"), (packs / "0001").rename(packs / "pack_0001")
    assert main(["cancel", "several.toml"]) == 1
    told = capsys.readouterr()
    assert told.out.startswith("et:\nfi:\ncancelled 103, 104") and "sv:" not in told.out
    assert "small_et/launch/0001: has no launch.json" in told.err
    assert [site.jobs()[job]["JobState"] for job in ("101", "103", "105")] == [
        "RUNNING",
        "CANCELLED",
        "PENDING",
    ]
    Path("launch.json").rename(lost), (packs / "pack_0001").rename(packs / "0001")
    assert main(["cancel", "several.toml"]) == 0
    assert {facts["JobState"] for facts in site.jobs().values()} <= {"CANCELLED", "RUNNING"}


def test_chains_share_what_the_queue_takes(site: Site, capsys) -> None:
    """Two jobs of a person: a job each for two languages, and the third waits for another command."""
    Path("here.toml").write_text(CARD.replace('name = "all"', 'name = "all", max_jobs = 2'))
    for code in ("et", "fi", "sv"):
        make_text(code)
    assert main(["launch", "several.toml"]) == 0
    told = capsys.readouterr().out
    assert "\nsv\tlater\t" in told and "sv: the queue takes 2 jobs of a person" in told
    assert "The same command launches the missing runs." in told and sorted(site.jobs()) == ["101", "102"]
    assert main(["launch", "several.toml", "--jobs", "2"]) == 1
    assert "--jobs: makes" in capsys.readouterr().err


def test_a_recipe_that_no_language_can_launch_is_one_line(site: Site, capsys) -> None:
    for flags, said in (
        (["--nodes", "3"], "gives 1 to 2"),
        (["--pack", "2"], "--pack: is for a single run of 3 languages. Fix: --set language=et"),
        (["--set", "train.tokens_per_step=3"], "train.tokens_per_step"),
    ):
        assert main(["launch", "several.toml", *flags, "--dry-run"]) == 1
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1
    assert not Path("runs").exists()


def test_a_rehearsed_launch_asks_once_for_each_number_of_nodes(site: Site, capsys, monkeypatch) -> None:
    asked: list[tuple[int, tuple]] = []

    def starts(plan, sizes) -> Starts:
        asked.append((plan.nodes, sizes))
        return Starts([Start("all", plan.nodes, 2.0, "2026-12-01T08:00:00")])

    monkeypatch.setattr("kielo.cli.launch_languages.starts_of", starts)
    assert main(["launch", "several.toml", "--dry-run"]) == 0
    assert (
        "\nstart of a job on 1 nodes: first in all on 1 nodes, about 2026-12-01 08" in capsys.readouterr().out
    )
    assert main(["launch", "several.toml", "--dry-run", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["starts"]) == ["1"]
    assert asked == [(1, ())] * 2


@pytest.mark.full
def test_one_command_writes_the_jobs_of_75_languages(tmp_path: Path, monkeypatch, capsys) -> None:
    """HPLT's encoders on LUMI: a folder of scripts each, within the hours that were published, 57,600."""
    monkeypatch.chdir(tmp_path)
    command = ["launch", "seventy_five_berts", "--account", "project_462000000", "--dry-run"]
    assert main(command) == 0
    told = capsys.readouterr().out
    rows = [line.split("\t") for line in told.splitlines() if "\twritten\t" in line]
    assert len(rows) == 75 and len(list(tmp_path.glob("runs/*/launch/0001/submit.sh"))) == 75
    hours = float(
        told.partition("all 75 together: ")[2]
        .partition("planned ")[2]
        .partition(" device")[0]
        .replace(",", "")
    )
    assert 20_000 < hours < 57_600
    recipe = tmp_path / "runs/seventy_five_berts_zh/launch/0001/recipe.toml"
    assert recipe.read_text().count("text/zh/") == 1
