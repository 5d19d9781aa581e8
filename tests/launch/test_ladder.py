"""A ladder: what is written for its rungs, what is refused, its table and page, and one with real steps."""

import contextlib
import json
import os
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from kielo.artifact.attempt_files import Outcome
from kielo.artifact.launch_files import Ladder, MeasuredSpeed, PlannedSpeed, ReferenceSpeed, Rung
from kielo.artifact.stage_json import read_json, write_json
from kielo.cli.main import main
from kielo.launch.script import SCRIPTS
from kielo.report.ladder_page import markdown, table, write_ladder_report
from tests.cli.test_run import write_recipe
from tests.launch.stand_in import Site

LUMI = ["--cluster", "lumi_g", "--account", "project_462000000"]
LADDER = "runs/norwegian_7b/launch/ladder_lumi_g"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The folder in which a ladder of a 7B on one and two nodes of LUMI was written."""
    folder = tmp_path_factory.mktemp("ladder")
    with contextlib.chdir(folder):
        assert main(["launch", "norwegian_7b", *LUMI, "--ladder", "2,1", "--dry-run"]) == 0
    return folder


def test_each_rung_is_a_launch_with_its_layout_that_saves_nothing(written) -> None:
    """Three layouts on each number of nodes; the job of those has their launches and its own name."""
    ladder = read_json(written / LADDER, Ladder)
    assert [rung.nodes for rung in ladder.rungs] == [1, 1, 1, 2, 2, 2]
    for rung in ladder.rungs:
        folder = written / LADDER / rung.folder
        recipe = tomllib.loads((folder / "launch/0001/recipe.toml").read_text())
        layout = recipe["layout"]
        assert f"tp{layout.get('tensor', 1)}" in rung.layout or layout.get("tensor", 1) == 1
        ranks = [layout.get(axis, 1) for axis in ("pipeline", "replicate", "shard", "context", "tensor")]
        product = 1
        for number in ranks:
            product *= number
        assert product == rung.devices == 8 * rung.nodes
        assert recipe["folder"] == str(folder) and recipe["train"]["log_every_steps"] == 1
        environment = (folder / "launch/0001/environment.sh").read_text()
        assert 'COMMAND=(train "$FOLDER/recipe.toml" --measure 10)' in environment
        assert (folder / "tokens").readlink() == Path("../../../../tokens")
    job = written / LADDER / "2_nodes/job_0001/job.sh"
    text = job.read_text()
    assert "--job-name=norwegian_7b_2_nodes\n" in text and "--nodes=2\n" in text
    assert all(str(written / LADDER / rung.folder / "launch/0001") in text for rung in ladder.rungs[3:])
    subprocess.run(["bash", "-n", job], check=True)
    assert [one.tflops_per_device for one in ladder.references] == [91, 88, 83]


def test_a_measured_rung_is_not_measured_again(written, monkeypatch, capsys) -> None:
    """Only the others are in the next job; with another recipe it is refused, and nothing is written."""
    monkeypatch.chdir(written)
    first = read_json(written / LADDER, Ladder).rungs[0]
    done = written / LADDER / first.folder / "train"
    done.mkdir(exist_ok=True)
    write_json(done, Outcome(outcome="finished", step=10, tokens=1, exit_code=0, message=""))
    command = ["launch", "norwegian_7b", *LUMI, "--ladder", "1", "--dry-run"]
    assert main(command) == 0
    assert first.layout + "," not in capsys.readouterr().out
    assert first.folder not in (written / LADDER / "1_nodes/job_0002/job.sh").read_text()
    assert main([*command, "--set", "train.tokens_per_step=2097152"]) == 1
    assert "was measured with another [train]" in capsys.readouterr().err
    assert not (written / LADDER / "1_nodes/job_0003").exists()
    (done / Outcome.FILE_NAME).unlink()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ladder", "0"], "--ladder 0: not understood. Fix: numbers of nodes such as 1,2,4,8"),
        (["--ladder", "1,many"], "not understood"),
        (["--ladder", "1,1025"], "--ladder 1025: standard-g of lumi_g gives 1 to 1024"),
        (["--ladder", "1", "--nodes", "2"], "--nodes: a ladder chooses it itself"),
        (["--ladder", "1", "--hours", "0.5"], "may take"),
        (["--ladder", "1", "--set", "train.tokens=41943040", "--set", "train.tokens_per_step=8388608"],
         "the run has 5 steps of 8,388,608 tokens"),
        (["--ladder", "1", "--set", "model.num_hidden_layers=160"], "no layout of norwegian_7b fits"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line_before_anything_is_written(
    arguments, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "norwegian_7b", *LUMI, "--dry-run", *arguments]) == 1
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_rung_that_fails_or_hangs_does_not_stop_the_others(tmp_path) -> None:
    """The job tells how many failed."""
    rungs = []
    for name, body in {"fails": "exit 1", "hangs": "sleep 300", "works": "touch measured"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.sh").write_text(body + "\n")
        rungs.append(shlex.quote(str(tmp_path / name)))
    settings = f"WORKING_FOLDER='{tmp_path}'; RUNGS=({' '.join(rungs)}); LIMITS=(100 1 100)"
    told = subprocess.run(
        ["bash", "-c", f"{settings}\n. '{SCRIPTS / 'ladder.sh'}'"],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert (tmp_path / "measured").exists() and told.returncode == 1
    assert "2 of 3 rungs failed" in told.stdout


def a_ladder() -> Ladder:
    """1 node: 1000 tokens/s, and a slower layout; 4: 3000 of 4000, below the plan's interval; 8: failed."""

    def rung(nodes: int, layout: str, speed: float | None, planned: float, state: str = "measured") -> Rung:
        measured = speed and MeasuredSpeed(
            steps=8, step_seconds=1.0, tokens_per_second=speed, tflops_per_device=speed / nodes / 10
        )
        of_plan = PlannedSpeed(
            tokens_per_second=planned, low_tokens_per_second=0.9 * planned,
            high_tokens_per_second=1.1 * planned, tflops_per_device=planned / nodes / 10,
        )  # fmt: skip
        return Rung(
            nodes=nodes, devices=8 * nodes, layout=layout, folder=f"{nodes}_nodes/{layout}", planned=of_plan,
            measured=measured or None, state=state,
        )  # fmt: skip

    return Ladder(
        name="<run>", cluster="lumi_g", machine="", parameters=7 * 10**9, tokens_per_step=1000,
        sequence_length=10,
        rungs=[
            rung(1, "tp2", 800.0, 1010.0), rung(1, "dp8", 1000.0, 1000.0), rung(4, "dp32", 3000.0, 3900.0),
            rung(8, "dp64", None, 7000.0, "failed: out of memory on rank 3"),
        ],
        references=[
            ReferenceSpeed(nodes=2, tflops_per_device=91.0, tolerance=0.1, software="Megatron", source="x")
        ],
        kielo_version="0", written_at="2026-11-23",
    )  # fmt: skip


def test_the_table_is_measured_beside_planned() -> None:
    """Linear is 4 × 1000 tokens/s on 4 nodes, by the fastest layout on one; a failed rung says why."""
    _, rows = table(a_ladder())
    assert rows[1] == ("1", "dp8", "1,000", "100", "100%", "1,000", "+0%")
    assert rows[2] == ("4", "dp32", "3,000", "75", "75%", "3,900", "-23% (outside of the interval)")
    assert rows[0][4:] == ("80%", "1,010", "-21% (outside of the interval)")
    assert rows[3] == ("8", "dp64", "failed: out of memory on rank 3", "–", "–", "7,000", "–")


def test_the_report_has_the_references_and_replaces_no_other_file(tmp_path) -> None:
    assert "91 TFLOP/s a device ± 10%, Megatron (x)" in markdown(a_ladder())
    write_ladder_report(tmp_path, a_ladder())
    assert read_json(tmp_path, Ladder) == a_ladder()
    write_ladder_report(tmp_path, a_ladder())  # its own is
    (tmp_path / "ladder.md").write_text("mine")
    with pytest.raises(Exception, match="ladder.md: exists"):
        write_ladder_report(tmp_path, a_ladder())


CARD = """
name = "here"
description = "This machine, a rank a node"
accelerator = "cpu"
devices_per_node = 1
nodes = 2
memory_gib_per_node = 4
cpu_cores_per_node = 1
network = "none"
network_gbit_per_second_per_node = 1
scheduler = "slurm"
max_wall_hours = 2
internet_on_compute_nodes = true
source = "tests"
date = "2026-11"

[jobs]
partitions = [{ name = "all" }]

[jobs.sources]
partitions = "tests"
"""


@pytest.mark.full
def test_a_ladder_with_real_steps(tmp_path, monkeypatch, capsys) -> None:
    """One rank, then one and two: measured, calibrated on, planned by that, and skipped the next time.

    The run itself gets neither a checkpoint nor a log.
    """
    stubs = tmp_path / "stubs"
    Site.make(stubs, runs=True, first=os.getpid() % 15_000)  # two suites may run on one machine
    monkeypatch.setenv("PATH", str(stubs), prepend=":")
    (tmp_path / ".bash_profile").write_text(f"PATH='{stubs}':$PATH\n")  # of the rungs, which are login shells
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.toml").write_text(CARD)
    recipe = str(write_recipe(tmp_path))
    assert main(["run", recipe, "--to", "pack"]) == 0
    command = ["launch", recipe, "--cluster", "here.toml", "--ladder"]
    ladder = tmp_path / "run/launch/ladder_here"
    assert main([*command, "1"]) == 0
    assert main(["status", str(ladder)]) == 0
    (own,) = read_json(ladder, Ladder).rungs
    assert own.state == "measured" and own.measured.steps == 8 and own.planned is None, own
    assert main(["plan", "calibrate", str(ladder), "--to", "here_measured.toml"]) == 0
    by_plan = [*command, "1,2", "--set", "machine=here_measured.toml"]
    assert main(by_plan) == 0
    capsys.readouterr()
    assert main(["status", str(ladder), "--json"]) == 0
    rungs = json.loads(capsys.readouterr().out)["rungs"]
    assert {rung["state"] for rung in rungs} == {"measured"}, rungs
    assert {rung["nodes"] for rung in rungs} == {1, 2} and len(rungs) >= 5
    planned = [rung for rung in rungs if rung["planned"]]
    assert len([rung for rung in planned if rung["nodes"] == 2]) == 3
    assert "% of linear" in (ladder / "ladder.md").read_text()
    jobs = sorted(ladder.glob("*/job_*"))
    assert main(by_plan) == 0 and "all measured" in capsys.readouterr().out
    assert sorted(ladder.glob("*/job_*")) == jobs
    assert not (tmp_path / "run/train").exists()
    assert not list(ladder.glob("*/*/train/checkpoints/step_*"))
