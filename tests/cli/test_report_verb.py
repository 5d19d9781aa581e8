"""`kielo report`: what it writes, and when it opens a browser."""

import webbrowser
from pathlib import Path

import pytest

from kielo.artifact.scores import Summary
from kielo.artifact.stage_json import read_json, write_json
from kielo.cli.main import main
from tests.report import synthetic_run
from tests.report.synthetic_run import STAGES

RECIPE = 'name = "{}"\nlanguage = "et"\ndescription = "d"\ncorpus.sources = [{{ path = "text.txt" }}]\n'


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """The addresses that a browser is asked to open, on a machine with a display and without a job."""
    found: list[str] = []
    monkeypatch.setattr(webbrowser, "open", found.append)
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "JOB_ID", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", ":0")
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_run(tmp_path / "run")


def made_run(folder: Path) -> Path:
    synthetic_run.write_run(folder)
    (folder / "recipe.toml").write_text(RECIPE.format(folder.name))
    return folder


def test_the_page_is_opened_if_asked(run: Path, opened: list[str], monkeypatch, capsys) -> None:
    """Not by itself, and neither in a job nor without a display; stages keep their times."""
    from kielo.report import write

    monkeypatch.setattr(write.figures, "FIGURES", ())
    assert main(["report", str(run)]) == 0 and opened == []
    summary = read_json(run, Summary)
    write_json(run, summary.model_copy(update={"stages": STAGES}))
    assert main(["report", str(run), "--open"]) == 0
    assert opened == [(run / "report.html").as_uri()]
    assert capsys.readouterr().out == f"wrote {run / 'report.html'}\n" * 2
    assert list(read_json(run, Summary).stages) == [*STAGES, "report"]
    for variable, value, reason in (
        ("SLURM_JOB_ID", "7", "this is a job (SLURM_JOB_ID is set)"),
        ("DISPLAY", "", "this machine has no display"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert main(["report", str(run), "--open"]) == 0
        assert f"not opened: {reason}. Fix: " in capsys.readouterr().out
    assert len(opened) == 1


def test_several_runs_are_compared(run: Path, tmp_path: Path, opened: list[str], monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    other = made_run(tmp_path / "other")
    assert main(["report", str(run), str(other)]) == 0
    assert capsys.readouterr().out == "wrote comparison.html\n" and opened == []
    assert "No recipe key and no package version differs." in Path("comparison.html").read_text("utf-8")
    assert not (run / "report.html").exists()
    assert main(["report", str(run), "--to", "x.html"]) == 1
    assert "Fix: name two runs" in capsys.readouterr().err and not Path("x.html").exists()
