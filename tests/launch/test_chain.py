"""The chain's logic, which is bash: `job.sh` runs against a scheduler of stubs, and must go on or stop."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kielo.artifact.attempt_files import EXIT_CODES, Outcome
from kielo.cli.main import main

FLAGS = ["--cluster", "karolina", "--nodes", "16", "--account", "open-00-00"]
FLAGS += ["--layout", "tp2-dp64-mb4-zero3-norms+activations", "--dry-run"]
JOBS = ["7", "8", "9"]
# Name → the stub: a line of bash. Of srun only the step that trains does anything: what the test wrote.
STUBS = {
    "scontrol": '[ "$1" != show ] || printf "node%s\\n" $(seq 16)',
    "srun": 'case "$*" in *"rank.sh"*"--rank"*) . "$ATTEMPT_STUB" ;; esac',
    "scancel": 'echo "$@" >> "$CANCELLED"',
    "sinfo": "true",
    "mpirun": 'case "$*" in *"rank.sh"*"--rank"*) . "$ATTEMPT_STUB" ;; esac',
    "qdel": 'echo "$@" >> "$CANCELLED"',
}
KILLED = "echo 'srun: error: node3: task 5: Killed' >&2; exit 137"


def ends(outcome: str, message: str, code: int, *nodes: str) -> str:
    """Bash for a training that leaves this outcome.json. nodes: those that its heartbeat blames."""
    found = Outcome(
        outcome=outcome,
        step=3,
        tokens=96,
        exit_code=EXIT_CODES[outcome],
        message=message,
        blamed_nodes=list(nodes),
    )
    file = f"{{run}}/train/{Outcome.FILE_NAME}"
    return f"mkdir -p {{run}}/train; echo '{json.dumps(found.content())}' > {file}; exit {code}"


PBS = ["--cluster", "abci3", "--nodes", "16", "--account", "gaa00000", "--dry-run"]
# A training that is asked to stop: it says so where it was asked, and otherwise would end by itself.
IS_ASKED = "trap 'touch {run}/was_asked; exit 75' USR1; {first}; sleep 30 & wait $!; kill $!; exit 0"


class Chain:
    """A launch folder, and a scheduler that starts its jobs when asked."""

    def __init__(self, written: Path, folder: Path):
        """written: the folder in which the launch was written; every path that is in it is changed."""
        shutil.copytree(written, folder, dirs_exist_ok=True)
        for file in (file for file in folder.rglob("*") if file.is_file()):
            file.write_text(file.read_text().replace(str(written), str(folder)))
        self.folder, self.run = folder / "runs/viking_7b/launch/0001", folder / "runs/viking_7b"
        self.cancelled, self.stubs = folder / "cancelled", folder / "stubs"
        (self.folder / "chain/jobs").write_text("\n".join(JOBS) + "\n")
        self.stubs.mkdir()
        (self.stubs / "nodes").write_text("".join(f"node{number}\n" for number in range(16)))
        for name, line in STUBS.items():
            (self.stubs / name).write_text(f"#!/bin/bash\n{line}\n")
            (self.stubs / name).chmod(0o755)

    def job(self, training: str, number: str = JOBS[0]) -> int:
        """Returns the exit code of a job whose step that trains is `training`."""
        attempt = self.stubs / "attempt"
        attempt.write_text(f"run='{self.run}'\n" + training.replace("{run}", '"$run"') + "\n")
        environment = os.environ | {
            "PATH": f"{self.stubs}:{os.environ['PATH']}",
            "SLURM_JOB_ID": number,
            "SLURM_JOB_NODELIST": "node[1-16]",
            "PBS_JOBID": f"{number}.server",
            "PBS_NODEFILE": str(self.stubs / "nodes"),
            "ATTEMPT_STUB": str(attempt),
            "CANCELLED": str(self.cancelled),
        }
        with open(self.folder / "log", "ab") as log:  # not a pipe, which the watcher's sleep would hold open
            return subprocess.run(
                ["bash", self.folder / "job.sh"], env=environment, stdout=log, stderr=log, timeout=60
            ).returncode

    def checkpoint(self, step: int) -> None:
        folder = self.run / f"train/checkpoints/step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")

    @property
    def attempts(self) -> list[str]:
        return (self.folder / "chain/attempts").read_text().splitlines()

    @property
    def stopped(self) -> str:
        """Why the chain ended; empty: it goes on."""
        file = self.folder / "chain/stopped"
        return file.read_text().strip() if file.exists() else ""


def written(folder: Path, flags: list[str]) -> Path:
    """The folder, with a launch in it whose jobs list no versions, which takes half a second each."""
    with contextlib.chdir(folder):
        assert main(["launch", "viking_7b", *flags]) == 0
    with open(folder / "runs/viking_7b/launch/0001/environment.sh", "a") as environment:
        environment.write("PYTHON=(true) KIELO=(true)\n")
    return folder


@pytest.fixture(scope="module")
def of_slurm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("slurm"), FLAGS)


@pytest.fixture(scope="module")
def of_pbs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("pbs"), PBS)


@pytest.fixture
def chain(of_slurm: Path, tmp_path: Path) -> Chain:
    return Chain(of_slurm, tmp_path)


@pytest.fixture
def chain_of_pbs(of_pbs: Path, tmp_path: Path) -> Chain:
    return Chain(of_pbs, tmp_path)


def test_a_finished_run_ends_its_chain(chain: Chain) -> None:
    """The jobs after it are cancelled, and one that starts nevertheless trains nothing."""
    assert chain.job(ends("finished", "", 0)) == 0
    assert chain.stopped == "finished" and chain.cancelled.read_text().split() == [
        "--quiet", "--state=PENDING", "8", "9",
    ]  # fmt: skip
    assert chain.job("touch {run}/trained_again", "8") == 0
    assert not (chain.run / "trained_again").exists()


def test_a_job_at_its_end_is_followed(chain: Chain) -> None:
    assert chain.job(ends("requeue", "stopped after step 3", 75)) == 0
    assert not chain.stopped and not chain.cancelled.exists()


def test_a_trigger_ends_the_chain(chain: Chain) -> None:
    (chain.run / "triggers").mkdir(parents=True)
    (chain.run / "triggers/stop").touch()
    assert chain.job(ends("requeue", "", 75)) == 0
    assert "triggers/stop" in chain.stopped


# Runs what prepares a node, which is this machine, and the training that a test wrote.
PREPARES = 'case "$*" in *"prepare"*) while [ "$1" != bash ]; do shift; done; "$@" ;; *) %s ;; esac'


def test_a_node_without_a_place_for_caches_trains_nothing(chain: Chain) -> None:
    """The attempt notes why. A name that is no path, as of a variable that is not set, ends the chain."""
    (chain.stubs / "srun").write_text("#!/bin/bash\n" + PREPARES % STUBS["srun"] + "\n")
    job = chain.folder / "job.sh"
    text = job.read_text()
    (line,) = re.findall(r"^NODE_FOLDER=.*$", text, re.MULTILINE)
    file = chain.folder / "a file"
    file.touch()
    job.write_text(text.replace(line, f'NODE_FOLDER="{file}"'))
    assert chain.job("touch {run}/trained; " + ends("finished", "", 0)) == 1 and not chain.stopped
    *_, outcome, message = chain.attempts[-1].split("\t")
    assert (
        outcome == "failed" and f"cannot write to {file}/kielo_" in message and "Not a directory" in message
    )
    for name in ("", "caches"):
        (chain.folder / "chain/stopped").unlink(missing_ok=True)
        job.write_text(text.replace(line, f'NODE_FOLDER="{name}"'))
        assert (
            chain.job(ends("finished", "", 0)) == 1 and f"is '{name}' here, which is no path" in chain.stopped
        )
    assert not (chain.run / "trained").exists()
    (chain.folder / "chain/stopped").unlink()
    chain.checkpoint(5)  # so that this is not the fourth attempt at the same place
    job.write_text(text.replace(line, f'NODE_FOLDER="{chain.folder}/of the node"'))
    assert chain.job(ends("finished", "", 0)) == 0 and chain.stopped == "finished"


def test_the_same_failure_twice_ends_the_chain(chain: Chain) -> None:
    """Another failure, or the same one after a new checkpoint, does not."""
    chain.checkpoint(5)
    assert chain.job(ends("failed", "loss is NaN", 1)) == 1 and not chain.stopped
    folder = "{run}/train/checkpoints/step_00000010"
    saves = f"mkdir -p {folder}; touch {folder}/manifest.json; "
    assert chain.job(saves + ends("failed", "loss is NaN", 1)) == 1 and not chain.stopped
    assert chain.job(ends("failed", "the disk is full", 1)) == 1 and not chain.stopped
    assert chain.job(ends("failed", "the disk is full", 1)) == 1
    assert chain.stopped == "twice the same: the disk is full"


def test_a_command_that_is_not_understood_ends_the_chain_at_once(chain: Chain) -> None:
    """Other programs exit with 2, too: then no rank has noted a refusal, and the next job tries again."""
    assert chain.job("exit 2") == 1 and not chain.stopped
    chain.checkpoint(5)
    refused = "export KIELO_REFUSAL_FILE=$(ls -td {run}/launch/0001/logs/*.0 | head -n 1)/refusal.txt; "
    assert chain.job(f"{refused} '{sys.executable}' -m kielo train run --step 3; exit $?") == 1
    assert chain.stopped.startswith("kielo did not understand its command: unrecognized arguments: --step 3")


def test_an_exit_code_0_without_the_outcome_is_a_failure(chain: Chain) -> None:
    """A step that never became Kielo: `bash` of an image, or `true` in its place."""
    assert chain.job("exit 0") == 1
    assert not chain.stopped and chain.attempts[-1].split("\t")[5] == "failed"


def test_attempts_without_a_new_checkpoint_are_counted(chain: Chain) -> None:
    """The fourth is not begun. A new checkpoint sets the count back."""
    for step, attempts in ((0, 2), (5, 3)):
        chain.checkpoint(step)
        for _ in range(attempts):
            assert chain.job(ends("requeue", "", 75)) == 0 and not chain.stopped
    assert chain.job("touch {run}/trained_again") == 1
    assert chain.stopped.startswith("3 attempts in a row made nothing after step_00000005")
    assert not (chain.run / "trained_again").exists()


AGAIN = "n=$(($(cat {run}/tries 2> /dev/null) + 1)); echo $n > {run}/tries; if [ $n -gt 1 ]; then "


def hung(node: str, then: str = "exit 0", first: str = "") -> str:
    """Bash for a training that hangs the first time, by a rank on `node`. first, then: of its two tries."""
    return AGAIN + f"{then}; fi; {first}" + ends("hung", "the job hangs, 31 s without a heartbeat", 76, node)


def test_a_hang_is_followed_by_another_attempt_in_the_same_job(chain: Chain, fault_times) -> None:
    """It has a log folder and a port of its own, and its node is noted."""
    first, second = "touch {run}/hangs; ", "touch {run}/again; "
    assert chain.job(hung("node4", second + ends("finished", "", 0), first)) == 0
    of_files = time.monotonic() - time.time()
    for moment, name in (("planted", "hangs"), ("found", "again")):
        fault_times.note(moment, (chain.run / name).stat().st_mtime + of_files)
    assert chain.stopped == "finished"
    assert (chain.folder / "chain/failed_nodes").read_text() == "node4\n"
    assert sorted(path.name for path in (chain.folder / "logs").iterdir()) == ["7.0", "7.0.1"]
    kinds = [line.split("\t")[0] for line in (chain.folder / "chain/attempts").read_text().splitlines()]
    assert kinds == ["start", "end"] * 2
    ports = [
        (chain.folder / "logs" / name / "meeting.sh").read_text().split()[2] for name in ("7.0", "7.0.1")
    ]
    assert ports[0] != ports[1]


def test_a_spare_node_takes_the_place_of_one_that_failed(chain: Chain) -> None:
    """Also where it failed only once; without a spare node it is used again."""
    job = (chain.folder / "job.sh").read_text().replace("NODES=16\nSPARES=0", "NODES=15\nSPARES=1")
    (chain.folder / "job.sh").write_text(job)
    assert chain.job(hung("node4", ends("finished", "", 0))) == 0
    tried = [line for line in (chain.folder / "log").read_text().splitlines() if "attempt from" in line]
    hosts = [line.split(" on ")[1].split(";")[0].split(",") for line in tried]
    assert [len(one) for one in hosts] == [15, 15]
    assert "node4" in hosts[0] and "node4" not in hosts[1] and "node16" in hosts[1]


def test_killed_ranks_are_tried_again_and_blame_no_node(chain: Chain) -> None:
    """srun names the first node whose tasks it lost, mostly one of those that gave up waiting."""
    assert chain.job(AGAIN + ends("finished", "", 0) + "; fi; " + KILLED) == 0
    assert chain.stopped == "finished" and not (chain.folder / "chain/failed_nodes").read_text()
    assert "ended with exit code 137" in chain.attempts[1]


def test_the_ranks_meet_on_the_node_of_task_0(chain: Chain) -> None:
    """The first node by the scheduler, whatever list srun is given: also where it hung and is taken last."""
    assert chain.job(hung("node1", ends("finished", "", 0))) == 0
    for name in ("7.0", "7.0.1"):
        meeting = (chain.folder / "logs" / name / "meeting.sh").read_text()
        assert re.search(r"MASTER_ADDR=node1\b(?!\d)", meeting), meeting


def test_a_job_whose_watcher_is_killed_goes_on(chain: Chain) -> None:
    """Who looks for signs of life is a process of its own; without it ranks still watch each other."""
    kill = (
        "for pid in $(pgrep -P $PPID); do [ $pid = $$ ] || { kill -KILL $pid; touch {run}/killed; }; done; "
    )
    assert chain.job("mkdir -p {run}; " + kill + ends("finished", "", 0)) == 0
    assert chain.stopped == "finished" and (chain.run / "killed").exists()


def test_without_a_decision_the_next_job_goes_on(chain: Chain) -> None:
    """As of a container that does not start. The chain still ends where no attempt makes a checkpoint."""
    with open(chain.folder / "environment.sh", "a") as environment:
        environment.write("DECIDE=(false)\n")
    for _ in range(3):
        assert chain.job(ends("failed", "loss is NaN", 1)) == 1 and not chain.stopped
    log = (chain.folder / "log").read_text()
    assert (
        log.count("Kielo could not decide what follows") == 3
        and "failed: the ranks ended with exit code 1" in log
    )
    assert chain.job("touch {run}/trained_again") == 1
    assert chain.stopped.startswith(
        "3 attempts in a row made nothing after the start; the last: the ranks ended"
    )


def test_no_attempt_begins_when_the_job_is_nearly_over(chain: Chain) -> None:
    job = (chain.folder / "job.sh").read_text()
    (chain.folder / "job.sh").write_text(re.sub("WALL_SECONDS=.*", "WALL_SECONDS=600", job))
    assert chain.job(hung("node4")) == 1 and not chain.stopped
    assert (chain.run / "tries").read_text() == "1\n"


def test_a_node_on_which_ranks_hung_twice_is_left_out(chain: Chain, fault_times) -> None:
    """In one job or two. Without it there are too few nodes, and the job says so before it starts a step."""
    fault_times.note("planted")
    assert chain.job(ends("hung", "the job hangs", 76, "node3")) == 1
    fault_times.note("found")
    (entry,) = (chain.run / "launch/left_out_nodes").read_text().splitlines()
    assert entry.startswith("node3 ") and not chain.stopped
    assert chain.job("touch {run}/trained_again") == 1 and not (chain.run / "trained_again").exists()
    assert "only 15 are not left out" in (chain.folder / "log").read_text()


def with_clock(chain: Chain) -> Path:
    """Has the job read the seconds since its start from a file, which is returned."""
    clock, script = chain.stubs / "clock", (chain.folder / "job.sh").read_text()
    clock.write_text("0")
    assert script.count('"$SECONDS"') == 1
    (chain.folder / "job.sh").write_text(script.replace('"$SECONDS"', f'"$(cat "{clock}")"'))
    return clock


@pytest.mark.parametrize("reason", ["time", "cancelled"])
def test_a_job_of_pbs_asks_its_ranks_to_stop_by_itself(chain_of_pbs: Chain, reason: str) -> None:
    """Its scheduler sends no warning: the script takes the time, and looks whether the chain was ended."""
    chain = chain_of_pbs
    clock = with_clock(chain)
    first = f"echo 10000000 > '{clock}'" if reason == "time" else f"touch '{chain.folder}/chain/stopped'"
    assert chain.job(IS_ASKED.replace("{first}", first)) == 0
    assert (chain.run / "was_asked").exists()
    assert chain.attempts[-1].split("\t")[5] == "requeue"


def test_a_job_that_is_asked_to_stop_too_early_does_not_train(chain_of_pbs: Chain) -> None:
    """Its time is nearly over before the ranks begin; the next job goes on."""
    chain = chain_of_pbs
    with_clock(chain).write_text("10000000")
    script = (chain.folder / "job.sh").read_text()
    begin = "\nrefusal=\nwhile true"
    assert script.count(begin) == 1
    late = script.replace(begin, '\nwhile [ "$asked" = no ]; do sleep 0.1; done' + begin)
    (chain.folder / "job.sh").write_text(late)
    assert chain.job("touch {run}/trained") == 0
    assert not (chain.run / "trained").exists() and not chain.stopped
    assert "asked to stop before it began" in chain.attempts[-1]
