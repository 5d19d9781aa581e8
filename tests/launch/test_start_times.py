"""When a job would start: asked of a stand-in for Slurm, which submits nothing and may not answer."""

import json

import pytest

from kielo.cli.main import main
from kielo.launch import schedulers
from tests.launch.stand_in import Site

LUMI = ["launch", "norwegian_7b", "--account", "project_462000000", "--nodes", "16", "--dry-run"]
SOON, LATER = "2026-11-27T22:04:00", "2026-11-29T06:00:00"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Makes the stand-in with estimates: queue → time."""

    def made(**starts: str) -> Site:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PATH", str(tmp_path / "commands"), prepend=":")
        monkeypatch.setattr(schedulers, "ESTIMATE_SECONDS", 2)
        return Site.make(
            tmp_path / "commands", starts={name.replace("_", "-"): at for name, at in starts.items()}
        )

    return made


def rows(text: str) -> dict[str, list[str]]:
    return {line.split("\t")[0]: line.split("\t")[1:] for line in text.splitlines() if "\t" in line}


def test_a_dry_run_names_the_queue_and_size_that_start_first(site, capsys):
    """Of both queues that give 16 nodes, and of the recipe's other sizes. Nothing is submitted."""
    made = site(standard_g=LATER, dev_g=SOON)
    assert main(LUMI) == 0
    told = capsys.readouterr().out
    assert rows(told)["start"] == ["first in dev-g on 16 nodes, about 2026-11-27 22:04:00"]
    assert "dev-g\t16\t3\t2026-11-27 22:04:00" in told  # for the three hours that it gives
    assert "standard-g\t64\t48\t2026-11-29 06:00:00" in told and "small-g" not in told
    assert made.jobs() == {}
    assert main([*LUMI, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["starts"]["known"][0]
    assert (first["partition"], first["nodes"], first["at"]) == ("dev-g", 16, SOON)


def test_a_queue_that_the_site_does_not_have_is_told(site, capsys):
    site(dev_g=SOON)
    assert main(LUMI) == 0
    told = capsys.readouterr().out
    assert rows(told)["start"][0].startswith("first in dev-g on 16 nodes")
    assert "standard-g\t16\t48\tInvalid partition name specified" in told


def test_a_scheduler_that_does_not_answer_loses_nothing(site, tmp_path, capsys):
    """One question is asked; the folder is written as without it."""
    site(standard_g="never", dev_g=SOON)
    assert main(LUMI) == 0
    told = capsys.readouterr().out
    assert rows(told)["start"] == ["not known: sbatch did not answer within 2 s"]
    assert (tmp_path / "runs/norwegian_7b/launch/0001/submit.sh").is_file()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (LUMI, "slurm's commands are not on this machine"),
        (
            ["launch", "norwegian_7b", "--cluster", "abci3", "--account", "gaa00000", "--dry-run"],
            "pbs does not say",
        ),
    ],
)
def test_without_a_scheduler_there_is_one_line(words, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(schedulers.shutil, "which", lambda command: None)
    assert main(words) == 0
    assert why in rows(capsys.readouterr().out)["start"][0]
