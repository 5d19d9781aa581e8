"""Jobs are those that were asked for, whatever the shell, the site's rules and its way to answer."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from kielo.cli.main import main
from kielo.launch.job_plan import Wishes
from kielo.launch.launch_folder import submit, write_launch
from kielo.launch.schedulers import ends, states
from kielo.launch.script import submit_script
from kielo.launch.status import status
from kielo.recipe.errors import KieloError
from tests.launch.hand_made import plan, site
from tests.launch.stand_in import MANNERS, Site

# What shells have in groups' profiles and inside of an allocation; the last three say which Slurm it is.
SHELL = {
    "SBATCH_ACCOUNT": "other", "SBATCH_PARTITION": "other", "SBATCH_QOS": "other", "SBATCH_TIMELIMIT": "5",
    "SBATCH_SIGNAL": "TERM@1", "SBATCH_ARRAY_INX": "1-3", "SBATCH_EXPORT": "NONE", "SBATCH_GRES": "gpu:1",
    "SBATCH_NO_REQUEUE": "1", "SBATCH_OPEN_MODE": "truncate", "SLURM_MEM_PER_CPU": "2", "SLURM_JOB_ID": "7",
    "SLURM_MEM_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "3", "SLURM_NTASKS": "9", "SRUN_CPUS_PER_TASK": "3",
    "SLURM_CONF": "/conf", "SLURM_CLUSTERS": "here", "SBATCH_CLUSTERS": "here",
}  # fmt: skip
ASKED = {"Account": "p1", "Partition": "usual", "QOS": "high", "TimeLimit": "02:03:04", "NumNodes": "5"}


def written(folder: Path, scheduler: str = "slurm") -> Path:
    queue = {"name": "usual"} | ({"qos": "high"} if scheduler == "slurm" else {})
    of = site(scheduler, {"partitions": [queue]})
    return write_launch(plan(of, Wishes(account="p1", spares=2), chain_length=3))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "site"), prepend=":")
    return tmp_path


def test_the_shell_does_not_change_the_jobs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option as asked for, and said what was left out; the job's own shell has nothing of these."""
    for name, value in SHELL.items():
        monkeypatch.setenv(name, value)
    at = Site.make(here / "site")
    ids, answer = submit(written(here), "slurm")
    found = at.jobs()
    assert ids == list(found) == ["101", "102", "103"]
    for job in found.values():
        assert {key: job[key] for key in ASKED} == ASKED
        assert (job["Export"], job["Signal"], "Array" in job) == ("ALL", "USR1@300", False)
        of_slurm = {name for name in job["environment"] if name.startswith(("SBATCH_", "SLURM_", "SRUN_"))}
        assert of_slurm == {"SLURM_CONF", "SLURM_CLUSTERS", "SBATCH_CLUSTERS"}
    assert [job.get("Dependency") for job in found.values()] == [None, "afterany:101", "afterany:102"]
    assert "left out of the environment" in answer and "SBATCH_ACCOUNT=other" in answer


def test_the_stand_in_takes_options_as_slurm_does(here: Path) -> None:
    """Otherwise the test above could not fail: the same job, submitted by hand in that shell."""
    at = Site.make(here / "site")
    job = written(here) / "job.sh"
    own = SHELL | {"SLURM_MEM_PER_CPU": "", "SLURM_MEM_PER_NODE": ""}
    environment = {name: value for name, value in (os.environ | own).items() if value}
    subprocess.run(["sbatch", job], env=environment, check=True, capture_output=True)
    (made,) = at.jobs().values()
    assert (made["Account"], made["TimeLimit"], made["Export"]) == ("other", "5", "NONE")
    refused = subprocess.run(["sbatch", job], env=os.environ | SHELL, capture_output=True, text=True)
    assert "mutually exclusive" in refused.stderr and refused.returncode == 1


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"Account": "other"}, "account other in place of p1"),
        ({"Partition": "usual,low"}, "partition usual,low in place of usual"),
        ({"QOS": "low", "NumNodes": "4-4"}, "qos low in place of high, nodes 4 in place of 5"),
        ({"TimeLimit": "00:05:00"}, "seconds 300 in place of 7384"),
        ({"TimeLimit": "1-00:00:00"}, "seconds 86400 in place of 7384"),
    ],
)
def test_what_the_site_makes_of_a_job_is_read_back(here: Path, facts: dict[str, str], said: str) -> None:
    """A job that differs is cancelled, and named; nothing is queued."""
    at = Site.make(here / "site", **facts)
    folder = written(here)
    with pytest.raises(KieloError, match=f"job 101 was cancelled, because it had {re.escape(said)}"):
        submit(folder, "slurm")
    assert [job["JobState"] for job in at.jobs().values()] == ["CANCELLED"]
    assert not (folder / "chain" / "jobs").exists()


@pytest.mark.parametrize(
    "facts",
    [{"Account": "P1"}, {"TimeLimit": "02:04:00"}, {"NumNodes": "5-5"}, {"QOS": "(null)"}, {"Account": ""}],
    ids=str,
)
def test_what_is_the_same_in_other_words_is_taken(here: Path, facts: dict[str, str]) -> None:
    """Slurm counts minutes, has accounts in lower case, and a site without accounting shows none."""
    Site.make(here / "site", **facts)
    assert submit(written(here), "slurm")[0] == ["101", "102", "103"]


SAYINGS = {
    "slurm": ("sbatch", {"4242": "4242", "4242;lumi": "4242"}),
    "pbs": ("qsub", {"4242.server": "4242", "4242[].server": "4242[]"}),
    "grid_engine": ("qsub", {"4242": "4242", "4242.1-9:1": "4242"}),
}


@pytest.mark.parametrize("scheduler", SAYINGS)
def test_the_id_among_lines_of_the_site(here: Path, scheduler: str) -> None:
    """Before it and after it; without one nothing is noted, and the person is told to look."""
    command, sayings = SAYINGS[scheduler]
    (here / "site").mkdir()
    program = here / "site" / command
    folder = written(here, scheduler)
    around = ("{}", "Welcome to job 7 of 9\n{}\n", "{}\nnote: your quota is 90 % used", " {}")
    for place, (said, job) in zip(around, [*sayings.items()] * 2, strict=True):
        program.write_text(f"#!/bin/bash\nprintf '%s' '{place.format(said)}'\n")
        program.chmod(0o755)
        ids, _ = submit(folder, scheduler)
        assert ids[-3:] == [job] * 3, place
    noted = (folder / "chain" / "jobs").read_text()
    for said in ("", "Submitted to the queue of the day"):
        program.write_text(f"#!/bin/bash\nprintf '%s' '{said}'\n")
        with pytest.raises(KieloError, match=f"the scheduler named no job.*{said}.*look whether it has one"):
            submit(folder, scheduler)
    assert (folder / "chain" / "jobs").read_text() == noted


@pytest.mark.parametrize("line", ["--all", "-u root", "* ", "0; rm x", "$(id)", "1,2"])
def test_a_line_that_is_no_id_is_refused(here: Path, line: str) -> None:
    """squeue and scancel would take it for an option."""
    folder = written(here)
    (folder / "chain").mkdir(exist_ok=True)
    (folder / "chain" / "jobs").write_text(f"101\n{line}\n")
    with pytest.raises(KieloError, match=r"chain/jobs: '.*' is no id of a job"):
        status(folder.parents[1])


def test_times_that_cannot_be_are_passed_over(here: Path) -> None:
    """A clock that went back, and lines with numbers out of range: hours are never negative or absurd."""
    folder = written(here)
    (folder / "chain").mkdir(exist_ok=True)
    now = 1_800_000_000
    rows = [
        ("start", now, "5"),
        ("end", now - 800_000_000_000_000, "5"),
        ("end", now - 7_200, "5"),
        ("start", now, "x"),
    ]
    rows += [("start", 10**20, "5"), ("start", now, "9" * 30)]
    (folder / "chain" / "attempts").write_text(
        "".join(f"{kind}\t101\t-\t{nodes}\t{seconds}\trequeue\t-\n" for kind, seconds, nodes in rows)
    )
    found = status(folder.parents[1])
    assert [(one.nodes, one.started) for one in found.attempts] == [(5, now)]
    assert found.device_hours == 0


@pytest.mark.parametrize("manner", MANNERS)
def test_sites_answer_in_their_own_way(here: Path, manner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids, what the jobs became, and their states are read all the same."""
    monkeypatch.setenv("LC_ALL", "fi_FI.UTF-8")
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    at = Site.make(here / "site", manner, Partition="other")
    with pytest.raises(KieloError, match="partition other in place of usual"):
        submit(written(here), "slurm")
    (here / "site" / "site.json").write_text(f'{{"manner": "{manner}", "runs": false, "facts": {{}}}}')
    ids, answer = submit(written(here), "slurm")
    assert ids == ["102", "103", "104"] and "read back" not in answer
    at.set("102", JobState="RUNNING")
    at.set("103", JobState="FAILED", ExitCode="0:53", Reason="JobLaunchFailure")
    assert states("slurm", ids) == {"102": "RUNNING None", "104": "PENDING None"}
    assert ends("slurm", ["103"]) == {"103": "FAILED, exit code 0:53, JobLaunchFailure"}


@pytest.mark.parametrize("scheduler", ["pbs", "grid_engine"])
def test_jobs_of_the_others_are_read_back(
    here: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As qstat of each shows them; one with another time is cancelled, and the shell's options are told."""
    shown = {
        "pbs": "Job Id: 5.server\n    Job_Name = mine\n    project = p1\n    queue = {queue}\n"
        "    Resource_List.nodect = 5\n    Resource_List.walltime = 02:03:04\n"
        "    Variable_List = A=1,\n\tB=2\n",
        "grid_engine": "job_number: 5\nhard resource_list: usual={nodes},h_rt=7384\n",
    }[scheduler]
    (here / "site").mkdir()
    for name, text in (("qsub", "env > {here}/environment; echo 5.server"), ("qstat", "cat {here}/shown"),
                       ("qdel", "echo $1 >> {here}/cancelled")):  # fmt: skip
        (here / "site" / name).write_text("#!/bin/bash\n" + text.replace("{here}", str(here)) + "\n")
        (here / "site" / name).chmod(0o755)
    monkeypatch.setenv("PBS_DEFAULT", "other_server")
    monkeypatch.setenv("PBS_NODEFILE", "/of/an/interactive/job")
    monkeypatch.setenv("HOME", str(here))
    (here / ".sge_request").write_text("# mine\n-l h_rt=60\n")
    (here / "shown").write_text(shown.format(queue="usual", nodes=5))
    _, answer = submit(written(here, scheduler), scheduler)
    told = {"pbs": "PBS_DEFAULT=other_server", "grid_engine": "adds options to each job: -l h_rt=60"}
    assert told[scheduler] in answer and "read back" not in answer
    if scheduler == "pbs":
        assert "PBS_NODEFILE" not in (here / "environment").read_text()
    assert not (here / "cancelled").exists()
    (here / "shown").write_text(shown.format(queue="low", nodes=4))
    wrong = {"pbs": "partition low in place of usual", "grid_engine": "nodes 4 in place of 5"}
    with pytest.raises(KieloError, match=wrong[scheduler]):
        submit(written(here, scheduler), scheduler)
    assert len((here / "cancelled").read_text().split()) == 1


def test_two_runs_of_one_name_do_not_wait_for_each_other(here: Path) -> None:
    """Jobs wait for ids; nothing in a job or its submission waits for a name."""
    at = Site.make(here / "site")
    for folder in ("a", "b"):
        os.mkdir(folder)
        os.chdir(folder)
        submit(written(here), "slurm")
        os.chdir(here)
    waits = [job.get("Dependency") for job in at.jobs().values()]
    assert waits == [None, "afterany:101", "afterany:102", None, "afterany:104", "afterany:105"]
    assert "singleton" not in submit_script(plan(site()), here)


def test_jobs_that_never_began_are_told_with_their_end(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log folder went away: each job fails before its first line, and the scheduler alone knows."""
    at = Site.make(here / "site")
    folder = written(here)
    ids, _ = submit(folder, "slurm")
    (folder / "logs").rmdir()
    for job in ids:
        at.set(job, JobState="FAILED", ExitCode="0:53", Reason="NonZeroExitCode")
    assert main(["status", "runs/mine"]) == 0
    told = capsys.readouterr().out
    for job in ids:
        assert f"job {job}: FAILED, exit code 0:53, NonZeroExitCode, before its first line" in told
    assert "logs is gone, and jobs fail without it. Fix: mkdir -p" in told


def test_the_last_lines_of_what_failed_are_shown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the rank that names an error, else of the step, else of the job: at most 20, and their file."""
    Site.make(here / "site")
    folder = written(here)
    ids, _ = submit(folder, "slurm")
    (folder / "chain" / "attempts").write_text(
        f"start\t{ids[0]}\t0\t3\t1000\t\t\nend\t{ids[0]}\t0\t3\t1100\tfailed\texit code 1\n"
    )
    (folder / "logs" / f"job_{ids[0]}.log").write_text(
        "srun: error: node1: task 0: Exited with exit code 1\n"
    )
    assert status(Path("runs/mine")).last_words[0].name == f"job_{ids[0]}.log"
    attempt = folder / "logs" / f"{ids[0]}.0"
    attempt.mkdir()
    (attempt / "node1.00000.log").write_text("waits for the others\n")
    lines = [f"  File line {number}" for number in range(40)] + ["ModuleNotFoundError: No module named 'x'"]
    (attempt / "node2.00001.log").write_text("\n".join(lines) + "\n")
    assert main(["status", "runs/mine"]) == 0
    told = capsys.readouterr().out
    assert f"the end of {attempt / 'node2.00001.log'}:\n" in told
    assert told.endswith("ModuleNotFoundError: No module named 'x'\n") and "File line 21" in told
    assert "File line 20\n" not in told
    assert main(["status", "runs/mine", "--json"]) == 0
    assert '"log_lines"' in capsys.readouterr().out
