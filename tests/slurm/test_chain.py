"""A run in chains of jobs on a real Slurm of four nodes: `make test-slurm`.

Whatever disturbs a chain finds the ranks stopped by SIGSTOP in mid-run, so that no assertion depends on how
fast the machine is; Slurm wakes what it ends.
"""

import os
import re
import signal
from contextlib import suppress
from datetime import datetime

import pytest

from kielo.artifact.attempt_files import Outcome
from kielo.artifact.stage_json import write_json
from kielo.cli.main import main
from tests.slurm.jobs import TWO_NODES, launch, queue, start_again
from tests.slurm.launched_run import NAME, STEPS, LaunchedRun, weights
from tests.slurm.one_machine import NAMES, Machine, processes, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def let_time_run_out(machine: Machine, job: str) -> None:
    """Shortens the job's time to end in two to three minutes, of which it is to use two to save."""
    started = datetime.fromisoformat(machine.ask("squeue", "-h", "-j", job, "-o", "%S"))
    minutes = int((datetime.now() - started).total_seconds() // 60) + 3
    machine.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")


def test_slurm_says_when_a_job_would_start(machine, run, capsys) -> None:
    """Of an empty machine now; a queue that it does not have is told. Waiting jobs are in the status."""
    launch(*TWO_NODES, "--dry-run")
    told = capsys.readouterr().out
    first = re.search(r"start\tfirst in work on 2 nodes, about (.*)", told)
    assert abs((datetime.fromisoformat(first[1]) - datetime.now()).total_seconds()) < 300, told
    assert queue(machine) == {}
    card = run.folder.parents[1] / "slurm.toml"
    text = card.read_text()
    card.write_text(text.replace('{ name = "work" }', '{ name = "work" }, { name = "play" }'))
    launch(*TWO_NODES, "--dry-run")
    told = capsys.readouterr().out
    assert "first in work on 2 nodes" in told and "play\t2\t" in told and "nvalid partition" in told
    card.write_text(text)
    launch(*TWO_NODES, "--jobs", "2")
    assert main(["status", str(run.folder)]) == 0


def test_a_chain_of_time_limited_jobs_ends_like_an_undisturbed_run(machine, run, undisturbed, capsys) -> None:
    """Slurm's warning before the end stops two jobs in mid-run; the third finishes, the fourth is cancelled.

    Meanwhile `kielo status` tells the queue, each rank has its log, and a second launch is refused.
    """
    launch(*TWO_NODES, "--jobs", "4")
    first, second, third, fourth = run.ids
    frozen_at = run.freeze(first)
    capsys.readouterr()
    assert main(["status", str(run.folder)]) == 0
    rows = dict(line.split("\t", 1) for line in capsys.readouterr().out.splitlines())
    waiting = "; ".join(f"{job} PENDING Dependency" for job in (second, third, fourth))
    assert rows["jobs"] == f"{first} RUNNING None; {waiting} (4 submitted)"
    assert rows["step"].startswith(f"{frozen_at} of {STEPS}, loss ")
    assert main(["launch", f"runs/{NAME}", *TWO_NODES]) == 1
    refused = capsys.readouterr().err
    assert f"jobs of this run are in the queue already ({first} RUNNING, {second} PENDING" in refused
    assert set(queue(machine)) == {first, second, third, fourth} and len(refused.splitlines()) == 1
    let_time_run_out(machine, first)
    run.freeze(second)
    assert frozen_at <= run.newest_step <= frozen_at + 1 and first_step(run, second) == run.newest_step + 1
    let_time_run_out(machine, second)
    run.wait(lambda: run.stopped != "")
    assert run.stopped == "finished" and run.outcomes == ["requeue", "requeue", "finished"]
    assert [attempt.job for attempt in run.attempts] == [first, second, third]
    run.wait(lambda: queue(machine) == {})
    for job in (first, second, third):
        logs = sorted(path.name for path in (run.launch / "logs" / f"{job}.0").glob("*.log"))
        assert logs == ["kielo1.00000.log", "kielo2.00001.log"]
    assert first_step(run, first) == 1
    assert weights(run.folder) == undisturbed


def first_step(run: LaunchedRun, job: str) -> int:
    """Returns the first step that rank 0 of a job has in its log."""
    log = next((run.launch / "logs" / f"{job}.0").glob("*.00000.log")).read_text()
    return int(re.findall(r"^step (\d+)/", log, re.MULTILINE)[0])


def test_what_sbatch_refuses_is_passed_on(machine, run, capsys) -> None:
    """An account, and more nodes than there are, by a wrong card: one line, and nothing is queued."""
    card = (run.place / "slurm.toml").read_text()
    (run.place / "eight_nodes.toml").write_text(card.replace("nodes = 4\n", "nodes = 8\n", 1))
    for flags, reason in (
        (["--nodes", "2", "--account", "refused_project"], "Requested partition configuration not available"),
        (["--nodes", "4", "--spares", "4"], "Node count specification invalid"),
    ):
        capsys.readouterr()
        command = ["launch", f"runs/{NAME}", "--cluster", "eight_nodes.toml", *flags, "--hours", "0.1"]
        assert main(command) == 1
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1
        assert "sbatch refused the job, and nothing is queued: sbatch: error" in said
        assert reason in said and queue(machine) == {} and run.ids == []


def test_a_dependency_that_breaks_and_a_cancel(machine, run, capsys, fault_times) -> None:
    """The first job is killed outright: a job that wants its success never starts, the chain goes on.

    Then `kielo cancel`: the job that runs saves and stops, the one that waits is gone.
    """
    launch(*TWO_NODES, "--jobs", "3")
    first, second, third = run.ids
    control = machine.ask(
        "sbatch", "--parsable", "--output=/dev/null", f"--dependency=afterok:{first}", "--wrap", "true"
    )
    run.wait(lambda: queue(machine).get(first, "").startswith("RUNNING"))
    fault_times.note("planted")
    machine.ask("scancel", "--signal=KILL", "--full", first)
    run.wait(lambda: first not in queue(machine))
    fault_times.note("found")
    run.freeze(second)
    fault_times.note("next_step")
    assert queue(machine)[control] == "PENDING DependencyNeverSatisfied"
    assert queue(machine)[second].startswith("RUNNING")
    machine.ask("scancel", control)
    capsys.readouterr()
    assert main(["cancel", str(run.folder)]) == 0
    assert f"cancelled {second}, {third}; the running job saves and stops" in capsys.readouterr().out
    run.wait(run.was_signalled)
    run.wake()
    run.wait(lambda: queue(machine) == {})
    assert run.outcomes[-1] == "requeue" and run.stopped == "cancelled by kielo cancel"
    assert run.newest_step == run.last_step < STEPS


@pytest.mark.full
def test_a_chain_survives_scancel_requeue_and_a_lost_node(machine, run, undisturbed) -> None:
    """One job is cancelled, one requeued, and again when the daemon of a node dies: the same bits.

    Nobody ends the rank on that node. When it wakes, its fellows are gone, and it leaves without harm.
    """
    launch(*TWO_NODES, "--jobs", "3")
    first, second, third = run.ids
    run.freeze(first)
    machine.ask("scancel", first)
    run.freeze(second)
    assert run.outcomes[0] == "requeue" and first not in queue(machine)
    machine.ask("scontrol", "requeue", second)
    start_again(machine, run, second)
    run.freeze(second, restarts=1)
    assert [attempt.job for attempt in run.attempts] == [first, second, second]
    (lost,) = processes(run.of_scheduler | {"SLURM_PROCID": "1"})
    node = next(name for name in NAMES if lost in processes({"SLURMD_NODENAME": name}))
    machine.kill_daemon(node)
    start_again(machine, run, second)
    with suppress(ProcessLookupError):
        os.kill(lost, signal.SIGCONT)
    run.wait(lambda: run.stopped != "")
    assert run.stopped == "finished" and run.outcomes[-1] == "finished"
    last = {path.name for path in (run.launch / "logs" / f"{second}.2").glob("*.log")}
    assert sorted(name.partition(".")[2] for name in last) == ["00000.log", "00001.log"]
    assert node not in {name.partition(".")[0] for name in last}
    assert (run.launch / "logs" / f"job_{second}.log").read_text().count("attempt from") == 3
    machine.start_daemons()
    run.wait(lambda: lost not in processes(run.of_scheduler))
    assert weights(run.folder) == undisturbed


@pytest.mark.full
def test_a_retry_in_the_job_meets_where_task_0_runs(machine, run, undisturbed) -> None:
    """The node that is blamed is the first of the job. It is taken last, and yet srun puts task 0 there: it
    goes by its own order of nodes, and not by that of the list.
    """
    launch(*TWO_NODES)
    (job,) = run.ids
    run.freeze(job)
    (first,) = set(run.ranks()) & processes(run.of_scheduler | {"SLURM_PROCID": "0"}).keys()
    blamed = Outcome(outcome="hung", step=1, tokens=1, exit_code=76, message="x", blamed_nodes=[NAMES[0]])
    write_json(run.folder / "train", blamed)
    os.kill(first, signal.SIGKILL)
    run.wait(lambda: run.stopped != "")
    assert run.stopped == "finished" and weights(run.folder) == undisturbed
    attempt = run.launch / "logs" / f"{job}.0.1"
    (log,) = attempt.glob("*.00000.log")
    assert f"MASTER_ADDR={log.name.partition('.')[0]} " in (attempt / "meeting.sh").read_text()


@pytest.mark.full
def test_a_spare_node_takes_the_place_of_one_that_preflight_refuses(machine, run) -> None:
    """The third of three nodes has another setting of NCCL than its fellows; the fourth is the spare."""
    launch("--nodes", "3", "--spares", "1", "--hours", "0.3", "--jobs", "2", "--preflight", "--dry-run")
    environment = run.launch / "environment.sh"
    fault = '[ "$SLURMD_NODENAME" != kielo3 ] || export NCCL_PROTO=Simple\n'
    environment.write_text(environment.read_text() + fault)
    assert machine.tell("bash", str(run.launch / "submit.sh")).returncode == 0
    run.wait(lambda: run.stopped != "" or "failed" in run.outcomes)
    (left_out,) = (run.folder / "launch" / "left_out_nodes").read_text().splitlines()
    assert re.fullmatch(rf"kielo3 \S+ refused by preflight in job {run.ids[0]}", left_out)
    assert run.stopped == "finished" and run.outcomes == ["finished"]
    logs = {path.name for path in (run.launch / "logs" / f"{run.ids[0]}.0").glob("*.log")}
    assert {"kielo1.00000.log", "kielo2.00001.log", "kielo3.00002.log", "kielo4.00002.log"} == logs
    assert "kielo3 refused by preflight; spare nodes take their place" in job_log(run)


def job_log(run: LaunchedRun) -> str:
    return (run.launch / "logs" / f"job_{run.ids[0]}.log").read_text()
