"""What shells, homes and rules of sites do to a launch, on a real Slurm of four nodes: `make test-slurm`."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from kielo.cli.main import main
from tests.slurm.jobs import TWO_NODES, launch, queue, start_again
from tests.slurm.launched_run import NAME, STEPS, LaunchedRun, weights
from tests.slurm.one_machine import Machine, why_not

ONE_NODE = ["--account", "granted_project", "--nodes", "1", "--hours", "0.3", "--grace", "120"]
# Exported in groups' profiles, by an allocation around the shell, and as a site's default.
SHELL = {
    "SBATCH_ACCOUNT": "other_project", "SBATCH_PARTITION": "urgent", "SBATCH_TIMELIMIT": "5",
    "SBATCH_QOS": "low", "SBATCH_SIGNAL": "TERM@1", "SBATCH_EXPORT": "NONE", "SBATCH_NO_REQUEUE": "1",
    "SLURM_MEM_PER_CPU": "100", "SLURM_MEM_PER_NODE": "200", "SLURM_CPUS_PER_TASK": "7",
    "SRUN_CPUS_PER_TASK": "7", "SQUEUE_PARTITION": "urgent",
}  # fmt: skip

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def shown(machine: Machine, job: str) -> dict[str, str]:
    words = machine.ask("scontrol", "--oneliner", "show", "job", job).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def finish(run: LaunchedRun) -> None:
    run.wait(lambda: run.stopped != "" or "failed" in run.outcomes)
    assert run.stopped == "finished", run.logs()


def test_a_job_is_the_one_that_was_asked_for_and_trains(machine, run, monkeypatch, capsys) -> None:
    """In a shell whose variables would bill another project, end the job, or let it die at its start."""
    for name, value in SHELL.items():
        monkeypatch.setenv(name, value)
    capsys.readouterr()
    launch(*ONE_NODE, "--jobs", "2")
    said = capsys.readouterr().out
    assert "left out of the environment" in said and "SBATCH_ACCOUNT=other_project" in said
    first, second = run.ids
    facts = shown(machine, first)
    assert facts["Account"] == "granted_project" and facts["Partition"] == "work" and facts["Requeue"] == "1"
    assert (facts["TimeLimit"], facts["NumNodes"].split("-")[0]) == ("00:18:00", "1")
    assert shown(machine, second)["Dependency"].startswith(f"afterany:{first}")
    finish(run)
    assert run.last_step == STEPS


def test_a_job_that_the_site_changes_is_cancelled(machine, run, monkeypatch, capsys) -> None:
    """A wrapper of sbatch, as some sites have, gives every job five minutes."""
    wrapper = run.place / "bin" / "sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/bash\nexec {shutil.which("sbatch")} --time=5 "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", str(wrapper.parent), prepend=":")
    assert main(["launch", f"runs/{NAME}", *ONE_NODE]) == 1
    assert "was cancelled, because it had seconds 300 in place of 1080" in capsys.readouterr().err
    run.wait(lambda: queue(machine) == {})
    assert run.ids == []


@pytest.mark.full
def test_a_preempted_job_waits_again_and_spends_no_job(machine, run, undisturbed) -> None:
    """A job that goes first needs its nodes: it saves, waits, and ends with the same bits."""
    launch(*TWO_NODES, "--jobs", "2")
    first, second = run.ids
    frozen_at = run.freeze(first)
    urgent = machine.ask("sbatch", "--parsable", "--partition=urgent", "--nodes=4", "--wrap", "sleep 1")
    run.wait(run.was_signalled)
    run.wake()
    start_again(machine, run, first)
    assert run.newest_step in (frozen_at, frozen_at + 1) and queue(machine)[second] == "PENDING Dependency"
    run.wait(lambda: urgent not in queue(machine))
    finish(run)
    assert [(attempt.job, attempt.outcome) for attempt in run.attempts] == [
        (first, "requeue"), (first, "finished"),
    ]  # fmt: skip
    assert "spends no job" in (run.launch / "logs" / f"job_{first}.log").read_text()
    assert weights(run.folder) == undisturbed


def test_what_ends_before_the_first_line_is_told(machine, run, capsys) -> None:
    """Kielo that cannot be imported; then a log folder that is gone: `status` has the reason of each."""
    launch(*ONE_NODE, "--jobs", "1", "--dry-run")
    environment = run.launch / "environment.sh"
    environment.write_text(environment.read_text() + "KIELO=(python3 -m no_such_package)\n")
    machine.ask("bash", str(run.launch / "submit.sh"))
    run.wait(lambda: run.outcomes == ["failed"])
    capsys.readouterr()
    assert main(["status", str(run.folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert any("no_such_package" in line for line in told["log_lines"]), told
    assert "did not understand" not in run.stopped
    run.wait(lambda: queue(machine) == {})
    launch(*ONE_NODE, "--jobs", "1", "--dry-run")
    shutil.rmtree(run.launch / "logs")
    (job,) = machine.ask("sbatch", "--parsable", str(run.launch / "job.sh")).split()
    (run.launch / "chain" / "jobs").write_text(job + "\n")
    run.wait(lambda: queue(machine) == {})
    assert main(["status", str(run.folder)]) == 0
    told = capsys.readouterr().out
    assert f"job {job}: FAILED, exit code 0:53, JobLaunchFailure, before its first line" in told
    assert "logs is gone, and jobs fail without it" in told


@pytest.mark.full
def test_packages_of_a_home_do_not_reach_the_ranks(machine, run, tmp_path, monkeypatch) -> None:
    """A broken safetensors in ~/.local and on PYTHONPATH, of the shell that submits."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    of_home = tmp_path / ".local" / "lib" / version / "site-packages" / "safetensors"
    of_home.mkdir(parents=True)
    (of_home / "__init__.py").write_text('raise ImportError("the safetensors of a home")\n')
    monkeypatch.setenv("PYTHONPATH", str(of_home.parent))
    launch(*ONE_NODE, "--jobs", "1", "--dry-run", "--venv", sys.prefix)
    broken = subprocess.run(
        [sys.executable, "-c", "import safetensors"], env=os.environ, capture_output=True, text=True
    )
    assert "of a home" in broken.stderr
    machine_has = os.environ | machine.environment | {"PYTHONPATH": str(of_home.parent)}
    subprocess.run(["bash", run.launch / "submit.sh"], env=machine_has, check=True, capture_output=True)
    finish(run)


@pytest.mark.full
def test_two_runs_of_one_name_share_the_machine(machine, run, packed, tmp_path) -> None:
    """A second chain of the same name, of another folder, begins while the first one runs."""
    launch(*ONE_NODE, "--jobs", "2")
    first, _ = run.ids
    run.freeze(first, ranks=1)
    other = tmp_path / "other"
    shutil.copytree(packed, other)
    os.chdir(other)
    launch(*ONE_NODE, "--jobs", "1")
    (theirs,) = LaunchedRun(other, run.of_scheduler).ids
    run.wait(lambda: queue(machine).get(theirs, "").startswith("RUNNING"))
    assert queue(machine)[first].startswith("RUNNING")
    assert main(["cancel", f"runs/{NAME}", "--now"]) == 0
    assert main(["cancel", str(run.folder), "--now"]) == 0
