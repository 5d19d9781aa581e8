"""`kielo status` and `kielo cancel` of a chain, beside a scheduler of a few lines of bash."""

import shutil
from pathlib import Path

import pytest

from kielo.cli.main import main
from kielo.launch.schedulers import end_jobs, states

SQUEUE = "#!/bin/bash\necho '12 RUNNING None'; echo '13 PENDING Dependency'\n"
LOGGED = (
    '{"step": 40, "tokens": 400, "samples": 40, "loss": 2.5, "tokens_per_second": 150000.0, '
    '"planned_tokens_per_second": 177000.0, "seconds": 9.0, "seconds_left": 7200.0}\n'
)
ATTEMPTS = [  # job 11 ran for an hour; 12 was killed without a word, and runs again since
    "start\t11\t0\t64\t1000000\t\t",
    "end\t11\t0\t64\t1003600\trequeue\tstopped after step 40",
    "start\t12\t0\t64\t1010000\t\t",
    "start\t12\t1\t64\t1013600\t\t",
    "end\t12\t1",  # half a line
]


@pytest.fixture
def run(launched, tmp_path, monkeypatch) -> Path:
    """A run of two attempts, of which one ended, and a scheduler that has two of its jobs."""
    folder = tmp_path / "run"
    shutil.copytree(launched["lumi_g"], folder / "launch" / "0001")
    (folder / "train").mkdir()
    (folder / "train" / "metrics.jsonl").write_text(LOGGED)
    chain = folder / "launch" / "0001" / "chain"
    (chain / "jobs").write_text("11\n12\n13\n")
    (chain / "attempts").write_text("\n".join(ATTEMPTS))
    (folder / "launch" / "left_out_nodes").write_text("nid1 2026-11-20 why\n")
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, script in (("squeue", SQUEUE), ("scancel", f'#!/bin/bash\necho "$@" >> "{tmp_path}/told"\n')):
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    return folder


def test_status_is_one_screen(run, capsys) -> None:
    """Jobs, step, speed beside plan, what is left, what it cost, the last stop, and nodes left out."""
    assert main(["status", str(run)]) == 0
    rows = dict(line.split("\t", 1) for line in capsys.readouterr().out.splitlines())
    assert rows["jobs"] == "12 RUNNING None; 13 PENDING Dependency (3 submitted)"
    assert rows["step"] == "40, loss 2.5000"
    assert rows["speed"] == "150,000 tokens/s; planned 177,000, so 85%"
    assert rows["left"].startswith("2:00:00 of training, 20")
    assert " in 3 attempts; forecast 7" in rows["spent"]
    assert rows["last stop"] == "job 11: requeue. stopped after step 40"
    assert rows["left out"] == "nid1"


def test_status_says_when_waiting_jobs_start(run, tmp_path, capsys) -> None:
    """squeue's estimate of the job that waits; N/A is no time, and a failure is one line."""
    for answer, told in (
        ("13 2026-11-27T22:04:00", "13 about 2026-11-27 22:04:00"),
        ("13 N/A", None),
    ):
        start = f"#!/bin/bash\n[[ $1 == --start ]] && echo '{answer}' && exit\n" + SQUEUE.partition("\n")[2]
        (tmp_path / "commands" / "squeue").write_text(start)
        assert main(["status", str(run)]) == 0
        rows = dict(line.split("\t", 1) for line in capsys.readouterr().out.splitlines())
        assert rows.get("starts") == told and rows["jobs"].startswith("12 RUNNING")


def test_hours_are_those_of_the_attempts(run, monkeypatch) -> None:
    """An ended attempt counts to its end, a killed one to the next start: an hour each of 512 devices."""
    from kielo.launch.status import status

    monkeypatch.setattr("kielo.launch.status.states_or_reason", lambda scheduler, ids: ({}, ""))
    (run / "launch" / "0001" / "chain" / "attempts").write_text(
        "\n".join([*ATTEMPTS[:4], "end\t12\t1\t64\t1013600\tfailed\tx"])
    )
    found = status(run)
    assert found.device_hours == pytest.approx(2 * 512) and found.attempts[-1].outcome == "failed"


def test_cancel_saves_and_ends_the_chain(run, tmp_path, capsys) -> None:
    """The job that waits is cancelled, the one that runs is asked to save, and none starts after it."""
    assert main(["cancel", str(run)]) == 0
    assert "cancelled 12, 13; the running job saves and stops" in capsys.readouterr().out
    assert (tmp_path / "told").read_text().splitlines() == ["13", "--signal=USR1 12"]
    assert "kielo cancel" in (run / "launch" / "0001" / "chain" / "stopped").read_text()
    assert main(["cancel", str(run), "--now"]) == 0
    assert (tmp_path / "told").read_text().splitlines()[2:] == ["13", "12"]


def test_a_run_that_was_never_launched(tmp_path, capsys) -> None:
    """One line says so; and where the scheduler is not, what else stops a run."""
    assert main(["status", str(tmp_path)]) == 1
    assert "was never launched. Fix: kielo launch" in capsys.readouterr().err


def test_cancel_away_from_the_scheduler(run, monkeypatch, capsys) -> None:
    """It names the file that stops the run from any machine."""
    monkeypatch.setenv("PATH", "")
    assert main(["cancel", str(run)]) == 1
    assert "triggers/stop" in capsys.readouterr().err


def test_a_second_launch_of_a_run_whose_jobs_wait_is_refused(launched, tmp_path, monkeypatch, capsys) -> None:
    """One line names the jobs; jobs that are over do not count."""
    monkeypatch.chdir(launched["lumi_g"].parents[3])
    jobs = launched["lumi_g"] / "chain" / "jobs"
    for name, script in (("squeue", SQUEUE), ("sbatch", "#!/bin/bash\nexit 1\n")):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    command = ["launch", "poro_34b", "--cluster", "lumi_g", "--nodes", "64", "--account", "project_462000000"]
    jobs.write_text("12\n13\n")
    try:
        assert main(command) == 1
        assert "in the queue already (12 RUNNING, 13 PENDING)" in capsys.readouterr().err
        jobs.write_text("14\n")  # over
        assert main(command) == 1
        assert "in the queue already" not in capsys.readouterr().err
    finally:
        jobs.unlink()


def test_cancel_of_a_scheduler_without_a_signal_for_jobs(tmp_path, monkeypatch) -> None:
    """Grid Engine's qdel ends jobs at once, so only those that wait are told; with --now all are."""
    (tmp_path / "qdel").write_text(f'#!/bin/bash\necho "$@" >> "{tmp_path}/told"\n')
    (tmp_path / "qdel").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = {"1": "r", "2": "hqw", "3": "Eqw"}
    end_jobs("grid_engine", found, at_once=False)
    assert (tmp_path / "told").read_text() == "2 3\n"
    end_jobs("grid_engine", found, at_once=True)
    assert (tmp_path / "told").read_text().splitlines()[1:] == ["2 3", "1"]


def test_qstat_is_read(tmp_path, monkeypatch) -> None:
    """PBS and Grid Engine list all jobs; the state is in the fifth column of both."""
    lines = "Job id  Name  User  Time Use  S Queue\n11.pbs1 poro_34b me 00:01 R rt_HF\n99.pbs1 x me 0 Q rt\n"
    (tmp_path / "qstat").write_text(f"#!/bin/bash\nprintf '%s' '{lines}'\n")
    (tmp_path / "qstat").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert states("pbs", ["11", "12"]) == {"11": "R"}
